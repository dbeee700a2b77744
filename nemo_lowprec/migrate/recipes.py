"""FP8 recipes of Transformer Engine, and their arguments, as levels and arguments of this package."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import libcst as cst

from nemo_lowprec.chart import CHART, get_level
from nemo_lowprec.chart.options import parse_options
from nemo_lowprec.migrate.edits import argument
from nemo_lowprec.migrate.script import Obstacle, Script

__all__ = ["SCALINGS", "Target", "fp8_arguments", "level_of", "literal_keys", "target_of_recipe"]

# Classes of transformer_engine.common.recipe, and the chart's names of their scaling.
SCALINGS = {
    "DelayedScaling": "delayed",
    "Float8CurrentScaling": "current",
    "Float8BlockScaling": "blockwise",
    "MXFP8BlockScaling": "mxfp8",
    "NVFP4BlockScaling": "nvfp4",
}
_RECIPES = "transformer_engine.common.recipe."
_NAMES = {
    "margin": "fp8_margin",
    "interval": "interval",
    "fp8_format": "fp8",
    "amax_history_len": "fp8_amax_history_len",
    "amax_compute_algo": "fp8_amax_compute_algo",
    "override_linear_precision": "override_linear_precision",
}
# Arguments without a counterpart, with the only value that needs none.
_FIXED = {"reduce_amax": True, "fp8_dpa": False, "fp8_mha": False, "scaling_factor_compute_algo": None}


@dataclass
class Target:
    """A level and its arguments, checked.

    Attributes:
        options: for each argument its value, and the expression to write for it.
    """

    level: str
    options: dict[str, tuple[Any, cst.BaseExpression]] = field(default_factory=dict)

    def check(self, node: cst.CSTNode) -> Target:
        """This target.

        Raises:
            Obstacle: at ``node``; the level does not take an argument or its value.
        """
        try:
            parse_options(get_level(self.level), {name: value for name, (value, _) in self.options.items()})
        except (TypeError, ValueError) as error:
            raise Obstacle(node, str(error)) from None
        return self

    def arguments(self) -> list[cst.Arg]:
        """The options as arguments of a call."""
        return [argument(name, expression) for name, (_, expression) in self.options.items()]


def level_of(weight: str, scaling: str, node: cst.CSTNode) -> str:
    """The level with weights of a format (``fp32``, ``bf16``, ``fp16``) and a way of scaling.

    Raises:
        Obstacle: at ``node``; no level has both.
    """
    rows = [row for row in CHART.values() if row.scaling == scaling and not row.is_low_bit]
    for row in rows:
        if row.weight == weight:
            return row.name
    others = " or ".join(f"{row.name} ({row.weight.upper()} weights)" for row in rows)
    raise Obstacle(node, f"No level has {weight.upper()} weights and {scaling} scaling; there is {others}.")


def target_of_recipe(script: Script, recipe: cst.BaseExpression | None, weight: str) -> Target:
    """The level of a recipe of Transformer Engine: an object, a dict of DelayedScaling's arguments, or None.

    Raises:
        Obstacle: the recipe is known only when the script runs, or no level has its arguments.
    """
    found = None if recipe is None else script.resolve(recipe)
    if recipe is None or found is None or script.text(found) == "None":
        return Target(level_of(weight, "delayed", recipe or script.module))
    if isinstance(found, cst.Dict):
        scaling, given = "delayed", literal_keys(script, found)
    elif isinstance(found, cst.Call) and script.name(found.func).startswith(_RECIPES):
        kind = script.name(found.func).removeprefix(_RECIPES)
        if kind not in SCALINGS:
            raise Obstacle(recipe, f"No level has the recipe {kind}.")
        scaling, given = SCALINGS[kind], keywords(script, found)
    else:
        raise Obstacle(recipe, f"The recipe {script.short(recipe)} is made where the script does not show how.")
    return Target(level_of(weight, scaling, recipe), fp8_arguments(script, given)).check(recipe)


def fp8_arguments(script: Script, given: Mapping[str, cst.BaseExpression]) -> dict[str, tuple[Any, cst.BaseExpression]]:
    """Options of a level for arguments of a recipe.

    Raises:
        Obstacle: an argument has no counterpart, or its value is known only when the script runs.
    """
    options: dict[str, tuple[Any, cst.BaseExpression]] = {}
    for name, node in given.items():
        if name == "fp8_format":
            text = _format(script, node)
            options["fp8"] = text, cst.parse_expression(f'"{text}"')
            continue
        value = script.value(node)
        if name in _NAMES:
            options[_NAMES[name]] = value, node
        elif name not in _FIXED or value != _FIXED[name]:
            raise Obstacle(node, f"The recipe's {name}={script.short(node)} has no counterpart.")
    return options


def _format(script: Script, node: cst.BaseExpression) -> str:
    found = script.resolve(node)
    name = script.name(found)
    if name.startswith(f"{_RECIPES}Format."):
        text = name.rpartition(".")[2]
    else:
        text = str(script.value(node))
    if text.upper() not in ("HYBRID", "E4M3"):
        raise Obstacle(node, f"FP8 format {text} has no counterpart; there are HYBRID and E4M3.")
    return text.lower()


def keywords(script: Script, call: cst.Call) -> dict[str, cst.BaseExpression]:
    """The keyword arguments of a call.

    Raises:
        Obstacle: the call has others.
    """
    for arg in call.args:
        if arg.keyword is None:
            what = f"**{script.short(arg.value)}" if arg.star else script.short(arg.value)
            raise Obstacle(arg, f"{script.short(call.func)} takes {what}, an argument without a name.")
    return {arg.keyword.value: arg.value for arg in call.args if arg.keyword is not None}


def literal_keys(script: Script, found: cst.Dict) -> dict[str, cst.BaseExpression]:
    """The values of a dict by its keys.

    Raises:
        Obstacle: a key is no literal text.
    """
    given: dict[str, cst.BaseExpression] = {}
    for element in found.elements:
        if not isinstance(element, cst.DictElement):
            raise Obstacle(element, f"{script.short(element)} is known only when the script runs.")
        given[str(script.value(element.key))] = element.value
    return given


def without(call: cst.Call, names: Iterable[str]) -> list[cst.Arg]:
    """The arguments of a call but for those of these names."""
    return [arg for arg in call.args if arg.keyword is None or arg.keyword.value not in names]
