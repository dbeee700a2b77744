"""Makes one function for each row of the chart; its signature has exactly the arguments of the row."""

from __future__ import annotations

import typing
from collections.abc import Callable
from inspect import Parameter, Signature
from typing import Any

from nemo_lowprec.chart import CHART, PrecisionLevel
from nemo_lowprec.options import LayerFilter, LossScaleConfig, LowBitOptions, Recipe, option_defaults
from nemo_lowprec.plugins.precision import LowPrecision

_CLASSES = (Recipe, LossScaleConfig, LayerFilter, LowBitOptions)
_HINTS: dict[str, Any] = {name: hint for cls in _CLASSES for name, hint in typing.get_type_hints(cls).items()} | {
    "backend": typing.Literal["auto", "te", "torch", "reference"],
    "attention": typing.Literal["auto", "cudnn"],
    "half": typing.Literal["bf16", "fp16"],
    "fp8": typing.Literal["hybrid", "e4m3"],
    "fp8_amax_compute_algo": typing.Literal["max", "most_recent"],
}

_DOCS = {
    "fp8": "'hybrid' (E4M3, output gradients E5M2) or 'e4m3'.",
    "fp8_margin": "scales are divided by 2**fp8_margin, from -1 to 8.",
    "fp8_amax_history_len": "steps in the amax history.",
    "fp8_amax_compute_algo": "'max' over the history, or its 'most_recent' entry.",
    "fp8_params": "store the weights of converted layers in FP8.",
    "interval": "steps between two computations of the scales.",
    "override_linear_precision": "(fprop, dgrad, wgrad): True runs that GEMM in half precision.",
    "backend": "'auto', 'te' (Transformer Engine), 'torch' (scaled_mm) or 'reference' (plain torch).",
    "convert": "names or globs of layers to convert, or a callable (name, module) -> bool; None: all but the head.",
    "skip": "names or globs of layers to leave in half precision.",
    "num_layers_at_start_in_half": "blocks at the start of the stack to leave in half precision.",
    "num_layers_at_end_in_half": "blocks at the end of the stack to leave in half precision.",
    "attention": "'auto' (torch's choice) or 'cudnn' (its kernels first; each new shape takes a while).",
    "half": "'bf16', or 'fp16' with loss scaling: the format of everything that is not FP8.",
    "stochastic_rounding": "round updated 16-bit weights at random, up or down by the fraction cut off.",
    "rounding_seed": "seed of stochastic_rounding.",
    "gradient_release": "step each parameter as soon as its gradient is there, and drop the gradient.",
    "loss_scale": "a static loss scale; None for dynamic scaling.",
    "initial_loss_scale": "first scale of dynamic scaling.",
    "loss_scale_window": "good steps after which the scale doubles.",
    "hysteresis": "overflows tolerated before the scale halves.",
    "min_loss_scale": "the scale never falls below this.",
}


def _factory(level: PrecisionLevel) -> Callable[..., LowPrecision]:
    def build(**options: Any) -> LowPrecision:
        return LowPrecision(level.name, **options)

    defaults = option_defaults(level)
    build.__name__ = build.__qualname__ = level.name
    build.__module__ = "nemo_lowprec"
    arguments = "".join(f"\n    {name}: {_DOCS[name]}" for name in defaults)
    build.__doc__ = f"{level.summary}.\n" + (f"\nArgs:{arguments}\n" if defaults else "")
    build.__annotations__ = {**{name: _HINTS[name] for name in defaults}, "return": LowPrecision}
    build.__signature__ = Signature(  # type: ignore[attr-defined]
        [
            Parameter(name, Parameter.KEYWORD_ONLY, default=value, annotation=_HINTS[name])
            for name, value in defaults.items()
        ],
        return_annotation=LowPrecision,
    )
    return build


LEVELS: dict[str, Callable[..., LowPrecision]] = {name: _factory(level) for name, level in CHART.items()}
