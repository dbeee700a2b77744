"""Convert the layers of a model in place, and back.

A layer is converted by changing its class and adding a few attributes, so that parents, parameters, hooks and
attributes stay what they were, a module with two parents is converted once, and one layer that cannot be converted
never stops the rest.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

from nemo_lowprec.compute.backends.base import Backend
from nemo_lowprec.compute.filters import LayerFilter
from nemo_lowprec.compute.half_layers import fp32_input_class
from nemo_lowprec.compute.half_linear import HalfLinear
from nemo_lowprec.compute.linear import GemmPlan, LowPrecisionConv1D, LowPrecisionLinear
from nemo_lowprec.compute.norms import LowPrecisionLayerNorm, LowPrecisionRMSNorm, rms_norm_kind
from nemo_lowprec.compute.recipe import FEATURE_MULTIPLE, OPERANDS, Recipe
from nemo_lowprec.compute.shared_input import SharedInput
from nemo_lowprec.formats import DelayedScaling

__all__ = ["Conversion", "convert_layers", "is_converted", "revert_layers", "take_fp32_input"]

_ORIGINAL = "_lowprec_original"  # (class, added attributes) on a converted module


@dataclass
class Conversion:
    """What became of each linear layer and norm.

    Attributes:
        low: names of layers whose GEMMs run below 16 bits.
        half: names of linear layers whose GEMMs run in half precision, and not by torch alone.
        norms: names of converted norms.
        kept: name to reason, for every linear layer and norm that was left alone.
    """

    low: list[str] = field(default_factory=list)
    half: list[str] = field(default_factory=list)
    norms: list[str] = field(default_factory=list)
    kept: dict[str, str] = field(default_factory=dict)


def is_converted(model: nn.Module) -> bool:
    """Whether any module of ``model`` is converted."""
    return any(_ORIGINAL in m.__dict__ for m in model.modules())


def convert_layers(
    model: nn.Module,
    half: torch.dtype,
    recipe: Recipe | None,
    backend: Backend,
    half_backend: Backend | None,
    layers: LayerFilter,
    histories: DelayedScaling | None,
    fp32_wgrad: bool = False,
) -> Conversion:
    """Convert linear layers and norms of ``model`` in place.

    Args:
        half: dtype of activations.
        recipe: the FP8 recipe; None converts no layer to FP8 and leaves norms alone.
        backend: runs the FP8 GEMMs.
        half_backend: runs the GEMMs of the linear layers left in half precision; None leaves that to torch.
        layers: which layers.
        histories: gets a column for every operand, for delayed scaling.
        fp32_wgrad: whether those layers' weight gradients are FP32; torch rounds them to half before.
    """
    result = Conversion()
    if recipe is not None:
        _convert_low(model, half, recipe, backend, layers, histories, result)
    for name, module in model.named_modules() if half_backend is not None or fp32_wgrad else ():
        if _ORIGINAL in module.__dict__:
            continue
        if isinstance(module, nn.Linear) and _linear_obstacle(module) is None:
            if half_backend is None:
                _swap(module, HalfLinear)
            else:
                _swap(module, LowPrecisionLinear, gemm_plan=GemmPlan(half_backend, half))
        elif half_backend is not None and _is_conv1d(module):
            _swap_conv1d(module, GemmPlan(half_backend, half))
        else:
            continue
        result.half.append(name)
    return result


def take_fp32_input(model: nn.Module, on_cpu: bool) -> None:
    """Let the layers of ``model`` that nothing converts take FP32 input where their weights are half."""
    for module in model.modules():
        cls = fp32_input_class(module, on_cpu)
        if cls is not None:
            _swap(module, cls)


def _convert_low(
    model: nn.Module,
    half: torch.dtype,
    recipe: Recipe,
    backend: Backend,
    layers: LayerFilter,
    histories: DelayedScaling | None,
    result: Conversion,
) -> None:
    linears: dict[str, nn.Module] = {}
    norms: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) or _is_conv1d(module):
            linears[name] = module
        elif type(module) in (nn.LayerNorm, nn.RMSNorm) or _looks_like_rms_norm(module):
            norms[name] = module
    candidates = {**linears, **norms}
    refused = layers.reasons(model, candidates, list(linears))

    chosen: dict[str, nn.Module] = {}
    for name, module in linears.items():
        reason = refused.get(name) or _linear_obstacle(module) or _size_obstacle(module, recipe)
        if reason:
            result.kept[name] = reason
        else:
            chosen[name] = module
    slots: dict[str, Any] = {}
    if histories is not None:
        keys = {f"{n}.{k}": recipe.operand(k).fmt for n in chosen for k in OPERANDS}
        histories.add_all(keys)
        slots = {key: histories.slots[key] for key in keys}
    inputs = SharedInput(histories)
    for name, module in chosen.items():
        operands = {kind: recipe.operand(kind, slots.get(f"{name}.{kind}")) for kind in OPERANDS}
        plan = GemmPlan(backend, half, recipe, operands, inputs)
        if _is_conv1d(module):
            _swap_conv1d(module, plan)
        else:
            _swap(module, LowPrecisionLinear, gemm_plan=plan)
        result.low.append(name)

    for name, module in norms.items():
        reason = refused.get(name) or _norm_obstacle(module)
        if reason:
            result.kept[name] = reason
        elif type(module) is nn.LayerNorm:
            _swap(module, LowPrecisionLayerNorm)
            result.norms.append(name)
        elif type(module) is nn.RMSNorm:
            _swap(module, LowPrecisionRMSNorm, norm_backend=backend, zero_centered=False)
            result.norms.append(name)
        else:
            kind = rms_norm_kind(module)
            if kind is None:
                result.kept[name] = f"{type(module).__name__} does not compute a plain RMSNorm"
                continue
            eps, zero_centered = kind
            shape = tuple(module.weight.shape)  # type: ignore[union-attr,arg-type]
            _swap(
                module, LowPrecisionRMSNorm, norm_backend=backend, zero_centered=zero_centered,
                eps=eps, normalized_shape=shape, elementwise_affine=True,
            )  # fmt: skip
            result.norms.append(name)


def revert_layers(model: nn.Module) -> None:
    """Give every converted module its own class back."""
    for module in model.modules():
        if _ORIGINAL in module.__dict__:
            original, added = module.__dict__.pop(_ORIGINAL)
            for name in added:
                del module.__dict__[name]
            module.__class__ = original


def _swap(module: nn.Module, cls: type[nn.Module], **attributes: Any) -> None:
    # Through __dict__: nn.Module.__setattr__ would register and check, and only what is new may be taken away again.
    added = [name for name in attributes if name not in module.__dict__]
    module.__dict__.update(attributes)
    module.__dict__[_ORIGINAL] = (type(module), added)
    module.__class__ = cls


def _swap_conv1d(module: nn.Module, plan: GemmPlan) -> None:
    in_features, out_features = module.weight.shape  # type: ignore[union-attr,misc]
    _swap(module, LowPrecisionConv1D, gemm_plan=plan, in_features=in_features, out_features=out_features)


def _is_conv1d(module: nn.Module) -> bool:
    # transformers.pytorch_utils.Conv1D, without importing transformers.
    cls = type(module)
    return cls.__name__ == "Conv1D" and cls.__module__ == "transformers.pytorch_utils"


def _looks_like_rms_norm(module: nn.Module) -> bool:
    cls = type(module)
    return cls.__name__.endswith("RMSNorm") and cls.__module__.startswith("transformers.")


def _linear_obstacle(module: nn.Module) -> str | None:
    """Why this linear layer cannot change its class."""
    if not (type(module) is nn.Linear or _is_conv1d(module)) or "forward" in module.__dict__:
        return f"{type(module).__name__} has a forward of its own"
    weight = module._parameters.get("weight")
    if weight is None:
        return "its weight is computed (weight_norm or another parametrization)"
    if isinstance(weight, UninitializedParameter):
        return "not initialised yet (run the model once before training)"
    return _dtype_obstacle(weight)


def _norm_obstacle(module: nn.Module) -> str | None:
    if "forward" in module.__dict__:
        return f"{type(module).__name__} has a forward of its own"
    weight = getattr(module, "weight", None)
    return _dtype_obstacle(weight) if isinstance(weight, torch.Tensor) else None


def _dtype_obstacle(weight: torch.Tensor) -> str | None:
    if weight.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"its weight is {str(weight.dtype).removeprefix('torch.')}"
    return None


def _size_obstacle(module: nn.Module, recipe: Recipe) -> str | None:
    multiple = FEATURE_MULTIPLE[recipe.scaling]
    for size in module.weight.shape:  # type: ignore[union-attr]
        if size % multiple or size == 0:
            return f"a side of {size} is no multiple of {multiple}"
    return None
