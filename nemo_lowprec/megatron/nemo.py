"""A level as the ``dtype_config`` that NeMo 2's own MegatronStrategy reads from its precision plugin.

NeMo copies each field onto every config that has a field of the same name: TransformerConfig, OptimizerConfig and
DistributedDataParallelConfig. The ``dtype_config`` therefore has only fields that the level decides. This module needs
neither NeMo nor Megatron-core.

Source: nemo-toolkit 2.7.3 (``DtypeConfig``, ``update_config_with_dtype_overrides``).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, make_dataclass
from functools import cache
from typing import Any

import torch

from nemo_lowprec.megatron.settings import resolve
from nemo_lowprec.options import Options


@dataclass(frozen=True)
class DtypeConfig:
    """The fields of every level. A level with FP8 or FP4 GEMMs, or with a loss scale, has more fields.

    The names are NeMo's; only ``check_for_nan_in_grad``, at levels with a loss scale, is Megatron-core's.

    Attributes:
        fp16: whether parameters and activations are FP16, and the loss is scaled.
        bf16: whether parameters and activations are BF16.
        params_dtype: dtype of parameters that are not stored in FP8.
        pipeline_dtype: dtype of activations and gradients between pipeline stages.
        autocast_dtype: dtype of autocast, if the model's config turns autocast on.
        grad_reduce_in_fp32: whether gradients are stored and reduced in FP32; else in ``params_dtype``.
        fp8: format of low-precision GEMMs, ``hybrid`` or ``e4m3``; None without FP8.
        fp4: ``e2m1``; None without FP4.
        fp8_param: whether the layers' weights are stored in FP8.
        fp8_param_gather: whether the layers' weights are gathered in FP8.
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


def dtype_config(options: Options) -> DtypeConfig:
    """The fields of a level.

    Raises:
        ValueError: NeMo's strategy, or Transformer Engine in Megatron-core's layers, cannot train the level; the
            message names the nearest choice that works.
    """
    _check(options)
    settings = resolve(options)
    model, more = settings.model, dict[str, Any]()
    if model["fp4"] is not None:
        more["fp4_recipe"] = model["fp4_recipe"]
    if model["fp8"] is not None:
        more |= {
            "fp8_recipe": model["fp8_recipe"],
            "fp8_wgrad": True,
            "first_last_layers_bf16": model.get("first_last_layers_bf16", False),
            "num_layers_at_start_in_bf16": model.get("num_layers_at_start_in_bf16", 0),
            "num_layers_at_end_in_bf16": model.get("num_layers_at_end_in_bf16", 0),
            # For stored MXFP8 weights, which no level has.
            "reuse_grad_buf_for_mxfp8_param_ag": False,
        }
        if model["fp8_recipe"] == "delayed":
            more |= {name: model[name] for name in _DELAYED}
    if options.loss_scale is not None:
        more |= asdict(options.loss_scale)
        more["check_for_nan_in_grad"] = False  # an overflow skips a step, and would end a run of NeMo's recipes
    decided = {**model, **settings.ddp}
    return _with_fields(tuple(more))(**{field.name: decided[field.name] for field in fields(DtypeConfig)}, **more)


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
