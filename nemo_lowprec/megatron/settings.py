"""A level of the chart as settings of Megatron-core: resolved once from the level's arguments, checked, and frozen.

This module does not import Megatron-core: it refuses a level that Megatron-core cannot train before anything is built.

Sources: megatron-core 0.16.1 and 0.19.2 (TransformerConfig, OptimizerConfig, DistributedDataParallelConfig).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any

import torch

from nemo_lowprec.chart import PrecisionLevel
from nemo_lowprec.chart.options import Options
from nemo_lowprec.engine import DTYPES

_RECIPES = {"delayed": "delayed", "current": "tensorwise", "blockwise": "blockwise", "mxfp8": "mxfp8"}
_STATES = {"fp32": torch.float32, "fp16": torch.float16, "fp8": torch.uint8}  # Megatron's name of FP8 states is uint8


@dataclass(frozen=True)
class MegatronSettings:
    """The fields of Megatron-core's configs for one level and one kind of model.

    Attributes:
        options, own_layers: the arguments of ``resolve``.
        model: fields of TransformerConfig.
        optimizer: fields of OptimizerConfig; ``exp_avg_dtype`` and the like are the formats of this package's AdamW.
        ddp: fields of DistributedDataParallelConfig, without the overlaps, which are the strategy's arguments.
        matrices: dtype of parameters of two or more dimensions that are not stored in FP8.
        vectors: dtype of parameters of fewer dimensions.
    """

    options: Options
    own_layers: bool
    model: Mapping[str, Any]
    optimizer: Mapping[str, Any]
    ddp: Mapping[str, Any]
    matrices: torch.dtype
    vectors: torch.dtype

    def __reduce__(self) -> Any:  # pickle refuses a MappingProxyType
        return resolve, (self.options, self.own_layers)

    @property
    def level(self) -> PrecisionLevel:
        """The row of the chart."""
        return self.options.level

    @property
    def fp8_weights(self) -> bool:
        """Whether the layers' weights are stored, and gathered, in FP8."""
        return bool(self.model["fp8_param"])

    @property
    def fp8_gradients(self) -> bool:
        """Whether gradients are stored and reduced in FP8, in the buffers of ``megatron.gradients``."""
        return self.level.weight_grad == "fp8"

    @property
    def master_weight(self) -> torch.dtype | None:
        """Dtype of the master weights of the layers; None where the optimizer updates the weights themselves."""
        return DTYPES[self.level.master_weight] if self.level.master_weight is not None else None


def resolve(options: Options, own_layers: bool = False) -> MegatronSettings:
    """The settings of a level.

    Args:
        options: the level's arguments.
        own_layers: whether this package converts the model's layers (any ``nn.Module``, data-parallel); else
            Megatron-core builds them from its config (``GPTModel``).

    Raises:
        ValueError: Megatron-core, or Transformer Engine in its layers, cannot train the level; the message names the
            nearest choice that works.
    """
    level = options.level
    if level.is_low_bit and not level.has_loss_scale:
        raise ValueError(
            f"{level.name} keeps FP16 weights, and Megatron-core computes in its weights' format: with a loss scale. "
            f"Use {level.name}(half='fp16'), or strategy='lowprec_sharded'."
        )
    if options.frozen == "fp8":
        raise ValueError(
            "frozen='fp8': Megatron-core's frozen weights are stored as its trained ones are. Leave it out."
        )
    if options.graphs is True:
        raise ValueError(
            "graphs=True: no block is captured under Megatron-core. Leave it out; Megatron-core's own graphs are "
            "cuda_graph_impl in its config."
        )
    (_check_own_layers if own_layers else _check_layers)(options)
    fp16, bf16 = level.autocast == "fp16", level.autocast == "bf16"
    half = DTYPES[level.autocast]
    # FP32 parameters need autocast, with or without half parameters beside them.
    autocasts = not level.has_half_weights or level.vectors == "fp32"
    params = DTYPES[level.rest]
    model: dict[str, Any] = {
        "fp16": level.has_half_weights and fp16,
        "bf16": level.has_half_weights and bf16,
        "params_dtype": params,
        "pipeline_dtype": half if level.has_half_weights else params,  # dtype of the residual stream
        "enable_autocast": autocasts,
        "autocast_dtype": half,
        **_gemms(options, own_layers),
    }
    first, second = level.optimizer_states
    low_bit = level.is_low_bit
    optimizer: dict[str, Any] = {
        "optimizer": "adam",
        "fp16": fp16,  # scales the loss, also with FP32 parameters
        "bf16": level.has_half_weights and bf16,
        "params_dtype": params,
        "fp8_recipe": model["fp8_recipe"] if model["fp8"] else None,
        "use_distributed_optimizer": True,
        "use_precision_aware_optimizer": low_bit,
        "store_param_remainders": False,
        "main_params_dtype": torch.float16 if low_bit else torch.float32,
        "main_grads_dtype": torch.float32,
        "exp_avg_dtype": _STATES[first],
        "exp_avg_sq_dtype": _STATES[second],
        **(asdict(options.loss_scale) if options.loss_scale is not None else {}),
    }
    ddp = {
        "use_distributed_optimizer": True,
        "grad_reduce_in_fp32": level.weight_grad == "fp32",
        "average_in_collective": True,
        "fp8_param_gather": model["fp8_param"],
        # Pads buckets, so that every rank gets whole blocks of 128 elements.
        "pad_buckets_for_high_nccl_busbw": level.weight_grad == "fp8",
    }
    vectors = DTYPES[level.vectors] if level.vectors is not None else params
    frozen = MappingProxyType(model), MappingProxyType(optimizer), MappingProxyType(ddp)
    return MegatronSettings(options, own_layers, *frozen, params, vectors)


def _gemms(options: Options, own_layers: bool) -> dict[str, Any]:
    """Fields of TransformerConfig for low-precision GEMMs; all off where this package converts the layers."""
    level, recipe, layers = options.level, options.recipe, options.layers
    fields: dict[str, Any] = {"fp8": None, "fp8_recipe": "delayed", "fp8_param": False, "fp4": None}
    if recipe is None or own_layers:
        return fields
    fields["attention_backend"] = {"auto": "auto", "cudnn": "fused"}[options.attention]
    if recipe.scaling == "nvfp4":
        return fields | {"fp4": "e2m1", "fp4_recipe": "nvfp4"}
    fields |= {
        "fp8": recipe.fp8,
        "fp8_recipe": _RECIPES[recipe.scaling],
        "fp8_wgrad": True,  # Transformer Engine 2.20 ignores a request for half precision
        "fp8_param": recipe.fp8_params or level.weight == "fp8",
        "fp8_margin": recipe.fp8_margin,
        "fp8_amax_history_len": recipe.fp8_amax_history_len,
        "fp8_amax_compute_algo": recipe.fp8_amax_compute_algo,
    }
    start, end = layers.num_layers_at_start_in_half, layers.num_layers_at_end_in_half
    if start or end:
        fields |= {
            "first_last_layers_bf16": True,
            "num_layers_at_start_in_bf16": start,
            "num_layers_at_end_in_bf16": end,
        }
    return fields


def _check_layers(options: Options) -> None:
    """Raise ValueError for arguments that layers of Megatron-core cannot follow."""
    level, recipe, layers = options.level, options.recipe, options.layers
    if recipe is None:
        return
    if recipe.scaling == "rowwise":
        raise ValueError(
            f"{level.name}: Transformer Engine, whose layers Megatron-core's are, has no rowwise scaling. Use "
            "bf16_with_fp8_current_scaling_mixed or bf16_with_fp8_subchannel_scaling_mixed."
        )
    if options.backend not in ("auto", "te"):
        raise ValueError(
            f"backend={options.backend!r}: Megatron-core's layers are Transformer Engine's. Use backend='te'."
        )
    if options.weight_cache != "auto":
        raise ValueError(
            f"weight_cache={options.weight_cache}: Transformer Engine's layers keep their quantized weights within a "
            "step. Leave it out."
        )
    if recipe.interval != 1:
        raise ValueError(
            f"interval={recipe.interval}: Transformer Engine 2 computes its scales at every step. Use interval=1."
        )
    if recipe.fast_accum:
        raise ValueError(
            "fast_accum=True: Transformer Engine's layers sum in FP32 in backward. Leave it out, or use "
            "strategy='lowprec_sharded' with backend='torch'."
        )
    if recipe.fp8_margin and recipe.scaling != "delayed":
        raise ValueError(
            f"fp8_margin={recipe.fp8_margin}: Transformer Engine's {recipe.scaling} scaling has no margin. Leave it "
            "out, or use strategy='lowprec_sharded' with backend='torch'."
        )
    if any(recipe.override_linear_precision):
        raise ValueError(
            f"override_linear_precision={recipe.override_linear_precision}: Transformer Engine 2 has no such choice. "
            "Leave it out, or use strategy='lowprec_sharded' with backend='torch'."
        )
    if options.activations is not None:
        raise ValueError(
            f"activations={options.activations!r}: Megatron-core's layers decide what they keep for backward. Leave it "
            "out, and set recompute_granularity='selective' in the model's config, with recompute_modules=['layernorm',"
            "'mlp'] or the like."
        )
    if layers.head != "half":
        raise ValueError("head='fp8': Megatron-core computes its output layer in half precision. Leave it out.")
    if layers.chosen is not None or layers.skip:
        raise ValueError(
            "convert and skip choose layers by name, and Megatron-core builds all of a GPTModel's alike. Leave them "
            "out; num_layers_at_start_in_half and num_layers_at_end_in_half leave whole blocks in half precision."
        )
    if layers.num_layers_at_start_in_half or layers.num_layers_at_end_in_half:
        if recipe.scaling == "delayed":
            nearest = "bf16_with_fp8_current_scaling_mixed"
            raise ValueError(
                f"{level.name} scales by amaxes of earlier steps, with which Megatron-core leaves no blocks in half "
                f"precision. Use {nearest}, or leave num_layers_at_start_in_half and num_layers_at_end_in_half out."
            )
        if recipe.scaling == "nvfp4":
            raise ValueError(
                f"Megatron-core leaves blocks in half precision with FP8 recipes only, not at {level.name}. Leave "
                "num_layers_at_start_in_half and num_layers_at_end_in_half out."
            )


def _check_own_layers(options: Options) -> None:
    """Raise ValueError for FP8 weights of layers that this package converts: Megatron-core cannot gather them."""
    level, recipe = options.level, options.recipe
    stored = level.weight == "fp8" or (recipe is not None and recipe.fp8_params)
    if stored:
        choice = "msamp_o2" if level.is_low_bit else f"{level.name} without fp8_params"
        raise ValueError(
            f"{level.name} stores weights in FP8, which Megatron-core gathers for its own layers only. Use {choice}, "
            "a GPTModel, or strategy='lowprec_sharded'."
        )
