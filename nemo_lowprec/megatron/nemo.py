"""A level as the ``dtype_config`` that NeMo 2's own MegatronStrategy reads from its precision plugin.

NeMo copies each field onto every config that has one of its name: TransformerConfig, OptimizerConfig and
DistributedDataParallelConfig. So there is a field for what the level decides there, and for nothing else. Needs neither
NeMo nor Megatron-core.

Source: nemo-toolkit 2.7.3 (``DtypeConfig``, ``update_config_with_dtype_overrides``).
"""

from __future__ import annotations

from dataclasses import dataclass, make_dataclass
from functools import cache
from typing import Any

import torch

from nemo_lowprec.megatron.settings import resolve
from nemo_lowprec.options import Options


@dataclass(frozen=True)
class DtypeConfig:
    """What every level decides. A level with FP8 or FP4 GEMMs, or with a loss scale, has more fields.

    Names are NeMo's, but for ``check_for_nan_in_grad`` of levels with a loss scale, which is Megatron-core's.

    Attributes:
        fp16: whether parameters and activations are FP16, and the loss is scaled.
        bf16: whether parameters and activations are BF16.
        params_dtype: dtype of parameters, but for those that are stored in FP8.
        pipeline_dtype: dtype of what pipeline stages send each other.
        autocast_dtype: where the model's config asks for autocast.
        grad_reduce_in_fp32: whether gradients are stored and reduced in FP32; else as ``params_dtype``.
        fp8: format of low-precision GEMMs, ``hybrid`` or ``e4m3``; None without FP8.
        fp4: ``e2m1``; None without FP4.
        fp8_param: whether the layers' weights are stored in FP8.
        fp8_param_gather: whether they are gathered so.
    """

    fp16: bool
    bf16: bool
    params_dtype: torch.dtype
    pipeline_dtype: torch.dtype
    autocast_dtype: torch.dtype
    grad_reduce_in_fp32: bool
    fp8: str | None
    fp4: str | None
    fp8_param: bool
    fp8_param_gather: bool


_DELAYED = ("fp8_margin", "fp8_amax_history_len", "fp8_amax_compute_algo")
_LOSS_SCALE = ("loss_scale", "initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis")


def dtype_config(options: Options) -> DtypeConfig:
    """The fields of a level.

    Raises:
        ValueError: what NeMo's strategy, or the Transformer Engine in Megatron-core's layers, cannot do; with the
            nearest that works.
    """
    _check(options)
    settings = resolve(options)
    model, ddp = settings.model, settings.ddp
    more: dict[str, Any] = {}
    if model["fp4"] is not None:
        more["fp4_recipe"] = model["fp4_recipe"]
    if model["fp8"] is not None:
        more |= {
            "fp8_recipe": model["fp8_recipe"],
            "fp8_wgrad": True,
            "first_last_layers_bf16": model.get("first_last_layers_bf16", False),
            "num_layers_at_start_in_bf16": model.get("num_layers_at_start_in_bf16", 0),
            "num_layers_at_end_in_bf16": model.get("num_layers_at_end_in_bf16", 0),
            # Of a recipe for MXFP8 weights, which no level stores.
            "reuse_grad_buf_for_mxfp8_param_ag": False,
        }
        if model["fp8_recipe"] == "delayed":
            more |= {name: model[name] for name in _DELAYED}
    if settings.level.has_loss_scale:
        more |= {name: settings.optimizer[name] for name in _LOSS_SCALE}
        more["check_for_nan_in_grad"] = False  # an overflow skips a step, where NeMo's recipes would end the run
    return _with_fields(tuple(more))(
        fp16=model["fp16"],
        bf16=model["bf16"],
        params_dtype=model["params_dtype"],
        pipeline_dtype=model["pipeline_dtype"],
        autocast_dtype=model["autocast_dtype"],
        grad_reduce_in_fp32=ddp["grad_reduce_in_fp32"],
        fp8=model["fp8"],
        fp4=model["fp4"],
        fp8_param=model["fp8_param"],
        fp8_param_gather=ddp["fp8_param_gather"],
        **more,
    )


@cache
def _with_fields(names: tuple[str, ...]) -> type[DtypeConfig]:
    return make_dataclass("DtypeConfig", names, bases=(DtypeConfig,), frozen=True)


def _check(options: Options) -> None:
    level = options.level
    nearest = f"{level.autocast}_with_fp8_mixed" if level.has_fp8 else f"{level.autocast}_mixed"
    instead = f"Use {nearest}, or the MegatronStrategy of nemo_lowprec."
    if level.is_low_bit:
        raise ValueError(
            f"{level.name} stores gradients in FP8 and steps weights in 16 bits, which NeMo's MegatronStrategy cannot "
            f"do. {instead}"
        )
    if not level.has_half_weights:
        raise ValueError(
            f"{level.name} trains FP32 weights under autocast, and NeMo's MegatronStrategy runs without it. {instead}"
        )
    if options.attention != "auto":
        raise ValueError(
            f"attention={options.attention!r}: NeMo takes the kernels of attention from the model's config. Leave it "
            "out, and set attention_backend=AttnBackend.fused there."
        )
