"""A level as the ``dtype_config`` that NeMo 2's own MegatronStrategy reads from its precision plugin.

NeMo copies each field onto every config that has a field of the same name: TransformerConfig, OptimizerConfig and
DistributedDataParallelConfig. The ``dtype_config`` therefore has only fields that the level decides. This module needs
neither NeMo nor Megatron-core.

Source: nemo-toolkit 2.7.3 (``DtypeConfig``, ``update_config_with_dtype_overrides``).
"""

from __future__ import annotations

from dataclasses import asdict, make_dataclass
from functools import cache
from typing import Any

from nemo_lowprec.chart.options import Options
from nemo_lowprec.megatron.settings import resolve

_FIELDS = (
    "fp16", "bf16", "params_dtype", "pipeline_dtype", "autocast_dtype", "grad_reduce_in_fp32", "fp8", "fp4",
    "fp8_param", "fp8_param_gather",
)  # fmt: skip
_FIRST_LAST = {"first_last_layers_bf16": False, "num_layers_at_start_in_bf16": 0, "num_layers_at_end_in_bf16": 0}
_DELAYED = ("fp8_margin", "fp8_amax_history_len", "fp8_amax_compute_algo")


def dtype_config(options: Options) -> Any:
    """The fields of a level: a frozen dataclass, equal for equal levels.

    The names are NeMo's, for fields of the same meaning in Megatron-core's configs. ``check_for_nan_in_grad``, at
    levels with a loss scale, is Megatron-core's alone. A level with FP8 or FP4 GEMMs has more fields than others.

    Raises:
        ValueError: NeMo's strategy, or Transformer Engine in Megatron-core's layers, cannot train the level; the
            message names the nearest choice that works.
    """
    _check(options)
    settings = resolve(options)
    model = settings.model
    every = {**model, **settings.ddp}
    decided = {name: every[name] for name in _FIELDS}
    if model["fp4"] is not None:
        decided["fp4_recipe"] = model["fp4_recipe"]
    if model["fp8"] is not None:
        decided |= {name: model[name] for name in ("fp8_recipe", "fp8_wgrad")}
        decided |= {name: model.get(name, default) for name, default in _FIRST_LAST.items()}
        decided["reuse_grad_buf_for_mxfp8_param_ag"] = False  # for stored MXFP8 weights, which no level has
        if model["fp8_recipe"] == "delayed":
            decided |= {name: model[name] for name in _DELAYED}
    if options.loss_scale is not None:
        decided |= asdict(options.loss_scale)
        decided["check_for_nan_in_grad"] = False  # an overflow skips a step, and would end a run of NeMo's recipes
    return _class_of(tuple(decided))(**decided)


@cache
def _class_of(names: tuple[str, ...]) -> type:
    return make_dataclass("DtypeConfig", names, frozen=True)


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
