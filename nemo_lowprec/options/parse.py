"""The arguments of a level, and the objects they configure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from nemo_lowprec.chart import CHART, PrecisionLevel
from nemo_lowprec.options.layers import LayerFilter
from nemo_lowprec.options.loss_scale import LossScaleConfig
from nemo_lowprec.options.low_bit import LowBitOptions
from nemo_lowprec.options.recipe import Recipe

__all__ = ["ATTENTION", "BACKEND_NAMES", "Options", "option_defaults", "parse_options"]

BACKEND_NAMES = ("te", "torch", "reference")  # the order in which ``auto`` tries them
ATTENTION = ("auto", "cudnn")


@dataclass(frozen=True)
class Options:
    """A level's arguments, checked and sorted by the column they belong to."""

    level: PrecisionLevel
    recipe: Recipe | None
    loss_scale: LossScaleConfig | None
    layers: LayerFilter
    backend: str
    low_bit: LowBitOptions
    attention: str


def option_defaults(level: PrecisionLevel) -> dict[str, Any]:
    """Names and defaults of the arguments that ``level`` takes."""
    defaults: dict[str, Any] = {}
    if level.has_fp8:
        defaults |= Recipe.arguments(level) | {"backend": "auto"} | LayerFilter.arguments()
        defaults |= {"attention": "auto"}
    if level.half:
        defaults |= {"half": CHART[level.name].autocast}
    if level.is_low_bit:
        defaults |= LowBitOptions.arguments()
    if level.has_loss_scale or level.half:
        defaults |= LossScaleConfig.arguments()
    return defaults


def parse_options(level: PrecisionLevel, given: dict[str, Any]) -> Options:
    """Check the row ``level`` and the arguments given for it.

    Raises:
        TypeError: an argument that the level does not take.
        ValueError: a value that an argument or a column of the row does not take.
    """
    level.validate()
    defaults = option_defaults(level)
    for name in given:
        if name not in defaults:
            raise TypeError(_unknown(level, name, defaults))
    values = defaults | given

    scaling = None
    if level.has_loss_scale or level.half:
        scaling = LossScaleConfig(**{name: values[name] for name in LossScaleConfig.arguments()})
    if level.half:
        level = level.with_half(values["half"])
        if not level.has_loss_scale:
            for name in LossScaleConfig.arguments():
                if values[name] != defaults[name]:
                    raise ValueError(f"{name}={values[name]!r} has no effect in bf16, which needs no loss scaling. "
                                     f"Leave it out, or pass half='fp16' to {level.name}.")  # fmt: skip

    def pick(arguments: dict[str, Any]) -> dict[str, Any]:
        return {name: values[name] for name in arguments}

    recipe = None
    if level.scaling is not None:
        arguments: dict[str, Any] = {"fp8": "e4m3"} if level.scaling == "nvfp4" else {}
        flags = values["override_linear_precision"]
        # Hydra and JSON know lists only.
        values["override_linear_precision"] = tuple(flags) if hasattr(flags, "__iter__") else flags
        recipe = Recipe(level.scaling, **arguments, **pick(Recipe.arguments(level)))
        if values["backend"] != "auto" and values["backend"] not in BACKEND_NAMES:
            raise ValueError(f"Unknown backend {values['backend']!r}. Choose one of: auto, {', '.join(BACKEND_NAMES)}.")
        if values["attention"] not in ATTENTION:
            raise ValueError(f"attention={values['attention']!r} must be one of: {', '.join(ATTENTION)}.")
    low_bit = LowBitOptions(**pick(LowBitOptions.arguments())) if level.is_low_bit else LowBitOptions()
    if low_bit.gradient_release and level.has_loss_scale:
        raise ValueError(
            "gradient_release=True steps before all gradients are there, so that an overflow could not skip the step. "
            "Use half='bf16', which needs no loss scaling."
        )
    return Options(
        level,
        recipe,
        scaling if level.has_loss_scale else None,
        LayerFilter(**pick(LayerFilter.arguments())) if level.has_fp8 else LayerFilter(),
        values.get("backend", "auto"),
        low_bit,
        values.get("attention", "auto"),
    )


def _unknown(level: PrecisionLevel, name: str, defaults: dict[str, Any]) -> str:
    takers = [row.name for row in CHART.values() if name in option_defaults(row)]
    if takers:
        return f"{level.name} takes no {name!r}. Levels that do: {', '.join(takers)}."
    known = ", ".join(defaults) or "no arguments"
    return f"{level.name} has no argument {name!r}. It takes: {known}."
