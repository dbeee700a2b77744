"""The arguments of a level, and the objects they configure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from nemo_lowprec.chart.groups import LayerFilter, LossScaleConfig, LowBitOptions
from nemo_lowprec.chart.recipe import Recipe
from nemo_lowprec.chart.rows import CHART, PrecisionLevel
from nemo_lowprec.lines import did_you_mean

BACKEND_NAMES = ("torch", "te", "reference")  # the order in which ``auto`` tries them
ATTENTION = ("auto", "cudnn")
ACTIVATIONS = ("fp8", "recompute", "fp8+recompute")
FROZEN = ("auto", "half", "fp8")


@dataclass(frozen=True)
class Options:
    """The checked arguments of a level, sorted by the column that reads them.

    Attributes:
        chosen: the arguments that the user has given and that differ from their defaults; lists as tuples.
    """

    level: PrecisionLevel
    recipe: Recipe | None
    loss_scale: LossScaleConfig | None
    layers: LayerFilter
    backend: str
    low_bit: LowBitOptions
    attention: str
    weight_cache: str | bool
    graphs: str | bool
    activations: str | None
    frozen: str
    chosen: dict[str, Any] = field(default_factory=dict, compare=False)

    @property
    def given(self) -> str:
        """``chosen`` as text."""
        return ", ".join(f"{name}={value!r}" for name, value in self.chosen.items())


def option_defaults(level: PrecisionLevel) -> dict[str, Any]:
    """Names and defaults of the arguments that ``level`` takes."""
    defaults: dict[str, Any] = {}
    if level.has_fp8:
        defaults |= Recipe.arguments(level) | {"backend": "auto"} | LayerFilter.arguments()
        defaults |= {"attention": "auto", "weight_cache": "auto", "activations": None}
    if level.scaling in ("delayed", "current"):  # whose GEMMs read weights with one scale
        defaults |= {"frozen": "auto"}
    if level.half:
        defaults |= {"half": level.autocast}
    if level.is_low_bit:
        defaults |= LowBitOptions.arguments()
    if level.has_fp8_states:
        defaults |= {"states": "+".join(level.optimizer_states)}
    if level.has_loss_scale or level.half:
        defaults |= LossScaleConfig.arguments()
    return defaults | {"graphs": "auto"}


def check_option(level: PrecisionLevel, name: str) -> None:
    """Check that ``level`` takes an argument of this name.

    Raises:
        TypeError: the level does not; the message lists the levels that do, or else the level's own arguments.
    """
    known = option_defaults(level)
    if name in known:
        return
    takers = [row.name for row in CHART.values() if name in option_defaults(row)]
    if takers:
        raise TypeError(f"{level.name} takes no {name!r}. Levels that do: {', '.join(takers)}.")
    raise TypeError(f"{level.name} has no argument {name!r}. It takes: {', '.join(known)}.{did_you_mean(name, known)}")


def parse_options(level: PrecisionLevel, given: dict[str, Any]) -> Options:
    """Check the row ``level`` and the arguments given for it.

    Raises:
        TypeError: an argument that the level does not take.
        ValueError: a value that an argument or a column of the row does not take.
    """
    level.validate()
    for name in given:
        check_option(level, name)
    defaults = option_defaults(level)
    values = defaults | given
    plain = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}

    def pick(arguments: dict[str, Any]) -> dict[str, Any]:
        return {name: values[name] for name in arguments}

    scaling = LossScaleConfig(**pick(LossScaleConfig.arguments())) if level.has_loss_scale or level.half else None
    if level.half:
        level = level.with_half(values["half"])
        if not level.has_loss_scale:
            for name in LossScaleConfig.arguments():
                if values[name] != defaults[name]:
                    raise ValueError(
                        f"{name}={values[name]!r} has no effect in bf16, which needs no loss scaling. Leave it out, or "
                        f"pass half='fp16' to {level.name}."
                    )

    if level.has_fp8_states:
        level = level.with_states(values["states"])
    recipe = None
    if level.scaling is not None:
        arguments: dict[str, Any] = {"fp8": "e4m3"} if level.scaling == "nvfp4" else {}
        flags = values["override_linear_precision"]
        # Hydra and JSON have lists and no tuples.
        values["override_linear_precision"] = tuple(flags) if hasattr(flags, "__iter__") else flags
        recipe = Recipe(level.scaling, **arguments, **pick(Recipe.arguments(level)))
        if values["backend"] != "auto" and values["backend"] not in BACKEND_NAMES:
            raise ValueError(f"Unknown backend {values['backend']!r}. Choose one of: auto, {', '.join(BACKEND_NAMES)}.")
        if values["attention"] not in ATTENTION:
            raise ValueError(f"attention={values['attention']!r} must be one of: {', '.join(ATTENTION)}.")
        if values["activations"] not in (None, *ACTIVATIONS):
            raise ValueError(f"activations={values['activations']!r} must be None or one of: {', '.join(ACTIVATIONS)}.")
        if values.get("frozen", "auto") not in FROZEN:
            raise ValueError(f"frozen={values['frozen']!r} must be one of: {', '.join(FROZEN)}.")
    for name in ("weight_cache", "graphs"):
        if not any(values.get(name, "auto") is value for value in (True, False)) and values.get(name, "auto") != "auto":
            raise ValueError(f"{name}={values[name]!r} must be 'auto', True or False.")
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
        values.get("weight_cache", "auto"),
        values["graphs"],
        values.get("activations"),
        values.get("frozen", "half"),
        {name: value for name, value in plain.items() if value != defaults[name]},
    )
