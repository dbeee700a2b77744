"""Hooks by which a model's state_dict holds exact values under the parameters' own names, at every level.

The hooks are plain functions that read the parameter's own attributes, so that a deep copy of the model (whose
parameters have no masters) saves and loads its own values.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from nemo_lowprec.compat.modules import has_state_dict_hook, remove_state_dict_hooks
from nemo_lowprec.formats import FP16, compute_amax
from nemo_lowprec.tensors import BlockScaledTensor, Fp16Weight, QuantizedTensor
from nemo_lowprec.tensors.quantized_tensor import MASTER
from nemo_lowprec.weights.frozen import is_frozen_fp8, store_again
from nemo_lowprec.weights.widened import to_original_dtype
from nemo_lowprec.weights.written import note, note_frozen, take_over_written

__all__ = ["MASTER", "cover_new_modules", "install_hooks", "master_of", "remove_hooks", "with_masters"]


def master_of(param: Tensor) -> Tensor | None:
    """The master of a half or FP8 parameter; None for a parameter without a master."""
    return getattr(param, MASTER, None)


def with_masters(params: Iterable[Any]) -> list[tuple[Any, Tensor]]:
    """(parameter, master) of each of ``params`` that has a master."""
    return [(param, master) for param in params if (master := master_of(param)) is not None]


def install_hooks(module: nn.Module) -> None:
    """Let ``module`` save the exact values of its own parameters, and load into masters."""
    module.register_state_dict_post_hook(_emit_values)
    module.register_load_state_dict_pre_hook(_load_masters)
    module.register_load_state_dict_post_hook(_refresh_after_load)


def remove_hooks(model: nn.Module) -> None:
    """Undo ``install_hooks`` in all modules of ``model``."""
    for module in model.modules():
        remove_state_dict_hooks(module, (_emit_values, _load_masters, _refresh_after_load))


def cover_new_modules(model: nn.Module) -> list[Any]:
    """Call ``install_hooks`` for modules that take over parameters of ``model`` later, such as parametrizations.

    Returns the handles of two hooks of ``model``.
    """
    return [model.register_state_dict_pre_hook(_cover), model.register_load_state_dict_pre_hook(_cover)]


def _cover(model: nn.Module, *_: Any) -> None:
    for module in model.modules():
        if not has_state_dict_hook(module, _emit_values):
            own = [p for p in module._parameters.values() if p is not None]
            if any(isinstance(p, QuantizedTensor) or master_of(p) is not None for p in own):
                install_hooks(module)


def _emit_values(module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
    for name, param in module._parameters.items():
        if param is not None and prefix + name in state_dict:
            master = master_of(param)
            if is_frozen_fp8(param):
                # On the CPU, so that a checkpoint takes no GPU memory; merged values are there in any case.
                values = param.frozen_values()  # type: ignore[operator]
                state_dict[prefix + name] = values if master is not None else values.to("cpu")
            elif isinstance(master, BlockScaledTensor):
                # Dequantized to FP32 on the CPU, so that a checkpoint takes no GPU memory.
                state_dict[prefix + name] = master.to("cpu").dequantize()
            elif master is not None:
                if not isinstance(param, QuantizedTensor):
                    take_over_written(param, master)
                state_dict[prefix + name] = master.detach()
            elif isinstance(param, Fp16Weight):
                state_dict[prefix + name] = param.data_fp16
            elif isinstance(param, QuantizedTensor):
                state_dict[prefix + name] = param.detach().dequantize()
            else:
                state_dict[prefix + name] = to_original_dtype(param, state_dict[prefix + name])
    for name, buffer in module._buffers.items():
        if buffer is not None and prefix + name in state_dict:
            state_dict[prefix + name] = to_original_dtype(buffer, state_dict[prefix + name])


def _load_masters(
    module: nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    local_metadata: dict[str, Any],
    strict: bool,
    missing: list[str],
    unexpected: list[str],
    errors: list[str],
) -> None:
    for name, param in module._parameters.items():
        value = state_dict.get(prefix + name)
        if param is None or value is None:
            continue
        master = master_of(param)
        if master is None and not isinstance(param, QuantizedTensor) and param.dtype != torch.float16:
            continue
        if local_metadata.get("assign_to_params_buffers"):
            raise RuntimeError(
                f"load_state_dict(assign=True) would part {prefix + name} from its storage: use assign=False."
            )
        if torch.__future__.get_swap_module_params_on_conversion():
            raise RuntimeError(
                f"torch.__future__.set_swap_module_params_on_conversion(True) would part {prefix + name} from its "
                "storage: set it to False for load_state_dict."
            )
        if _is_fp16(param, master) and value.numel() and float(compute_amax(value.detach())) > FP16.max:
            errors.append(
                f"{prefix + name} has values beyond {FP16.max:.0f}, the largest of FP16, in which it is kept."
            )
            continue
        if master is not None and value.shape == master.shape:
            with torch.no_grad():
                master.copy_(value)


def _is_fp16(param: Tensor, master: Tensor | None) -> bool:
    """Whether the exact values, those of ``master`` where ``param`` has one, are FP16."""
    if master is not None:
        return isinstance(master, BlockScaledTensor)
    return (param.data_fp16 if isinstance(param, Fp16Weight) else param).dtype == torch.float16


def _refresh_after_load(module: nn.Module, incompatible: Any) -> None:
    # load_state_dict has written the copy, rounded from the file's value. The copy must be the rounded master.
    with torch.no_grad():
        for param in module._parameters.values():
            master = master_of(param) if param is not None else None
            if is_frozen_fp8(param):
                store_again(param)
            elif param is not None and master is not None:
                param.copy_(master)
                if not isinstance(param, QuantizedTensor):
                    note(param, master)
            elif param is not None and not param.requires_grad:
                note_frozen(param)
