"""Makes one function for each row of the chart and each alias; its signature has exactly the arguments of the row."""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Callable
from inspect import Parameter, Signature
from typing import Any

from nemo_lowprec.chart import ALIASES, CHART, get_level, preset_of
from nemo_lowprec.chart.groups import LayerFilter, LossScaleConfig, LowBitOptions
from nemo_lowprec.chart.options import option_defaults
from nemo_lowprec.chart.recipe import Recipe
from nemo_lowprec.lines import text_lines
from nemo_lowprec.plugins.precision import LowPrecision

_CLASSES = (Recipe, LossScaleConfig, LayerFilter, LowBitOptions)
_HINTS: dict[str, Any] = {name: hint for cls in _CLASSES for name, hint in typing.get_type_hints(cls).items()} | {
    "backend": typing.Literal["auto", "te", "torch", "reference"],
    "attention": typing.Literal["auto", "cudnn"],
    "weight_cache": typing.Literal["auto", True, False],
    "graphs": typing.Literal["auto", True, False],
    "activations": typing.Literal["fp8", "recompute", "fp8+recompute"] | None,
    "frozen": typing.Literal["auto", "half", "fp8"],
    "half": typing.Literal["bf16", "fp16"],
    "states": typing.Literal["fp8+fp16", "fp8+fp8"],
    "fp8": typing.Literal["hybrid", "e4m3"],
    "fp8_amax_compute_algo": typing.Literal["max", "most_recent"],
}


def _texts_of(cls: type) -> dict[str, str]:
    """The text of each argument in the docstring of ``cls``."""
    entries = re.findall(r"^ {4}(\w[\w, ]*): (.*(?:\n {8}.*)*)", inspect.getdoc(cls) or "", re.MULTILINE)
    return {name: " ".join(text.split()) for names, text in entries for name in names.split(", ")}


_TEXTS = {name: text for cls in _CLASSES for name, text in _texts_of(cls).items()} | {
    "backend": "'auto', 'torch' (scaled_mm), 'te' (Transformer Engine) or 'reference' (plain torch).",
    "attention": "'auto' (torch's choice) or 'cudnn' (its kernels first; each new shape takes a while).",
    "weight_cache": (
        "keep the FP8 forms of weights from step to step, which takes 2 bytes a parameter on a GPU; 'auto' keeps them "
        "where the converted weights hold at most 2**31 elements and activations=None. FSDP2's gathered weights are "
        "never kept."
    ),
    "graphs": (
        "run the model's repeated blocks as CUDA graphs: the host launches all kernels of a block at once; 'auto' "
        "captures the blocks whose kernels the GPU finishes before the host has launched the next ones, with one "
        "process and activations=None."
    ),
    "activations": (
        "what norms, activations and gated MLPs keep for backward: None (what autograd keeps), 'fp8' (their inputs, in "
        "E4M3 with a scale for 128 features of a token), 'recompute' (their inputs; the linear layers that read their "
        "outputs keep neither input nor FP8 weight, and results are the same), or 'fp8+recompute'."
    ),
    "states": (
        "optimizer states: 'fp8+fp16', or 'fp8+fp8' for a second moment in E5M3, FP8 without a sign; the first format "
        "counts where an optimizer has one moment."
    ),
    "frozen": (
        "how weights of converted layers are stored that are frozen when training starts: 'half' (as other frozen "
        "parameters), 'fp8' (E4M3 with one scale, 1 byte a parameter), or 'auto' ('fp8' in a model with adapters of "
        "PEFT)."
    ),
    "half": "'bf16', or 'fp16' with loss scaling: the format of everything that is not FP8.",
}


def _factory(name: str) -> Callable[..., LowPrecision]:
    """The function of a level or an alias."""
    level, preset = get_level(name), preset_of(name)

    def build(**options: Any) -> LowPrecision:
        return LowPrecision(name, **options)

    defaults = option_defaults(level) | preset
    build.__name__ = build.__qualname__ = name
    build.__module__ = "nemo_lowprec"
    arguments = [line for name in defaults for line in text_lines(f"{name}: {_TEXTS.get(name, '')}", 4, hanging=8)]
    build.__doc__ = "\n".join([f"{level.summary}.", "", *(["Args:", *arguments, ""] if defaults else [])])
    build.__annotations__ = {**{name: _HINTS[name] for name in defaults}, "return": LowPrecision}
    build.__signature__ = Signature(  # type: ignore[attr-defined]
        [
            Parameter(name, Parameter.KEYWORD_ONLY, default=value, annotation=_HINTS[name])
            for name, value in defaults.items()
        ],
        return_annotation=LowPrecision,
    )
    return build


LEVELS: dict[str, Callable[..., LowPrecision]] = {name: _factory(name) for name in CHART}
ALIASED: dict[str, Callable[..., LowPrecision]] = {name: _factory(name) for name in ALIASES}
