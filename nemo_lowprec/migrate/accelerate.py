"""Accelerate's FP8 recipes, and the calls of ``accelerator.prepare`` that they act on."""

from __future__ import annotations

import re
import warnings

import libcst as cst

from nemo_lowprec.accelerate import level_of as from_settings
from nemo_lowprec.chart import get_level
from nemo_lowprec.chart.options import option_defaults
from nemo_lowprec.migrate.edits import argument, with_arguments
from nemo_lowprec.migrate.recipes import Target, keywords, without
from nemo_lowprec.migrate.script import Change, Notes, Obstacle, Script

_RECIPES = ("FP8RecipeKwargs", "TERecipeKwargs", "MSAMPRecipeKwargs", "AORecipeKwargs")
_ENGINES = ("deepspeed_plugin", "deepspeed_plugins", "fsdp_plugin", "megatron_lm_plugin")
# Levels for recipes of torchao, by the names of torchao's recipes.
_TORCHAO = {"tensorwise": "bf16_with_fp8_current_scaling_mixed", "rowwise": "bf16_with_fp8_rowwise_mixed"}
_TORCHAO_DEFAULTS = ("pad_inner_dim", "enable_fsdp_float8_all_gather")
_HEAD = "The layer that computes the model's output stays in half precision; head='fp8' converts it, too."
_MASTERS = "Accelerate's weights are FP32; {level} has BF16 weights with FP32 master weights."
_OPTIMIZER, _OTHER, _MODEL = "optimizer", "other", "model"


def find(script: Script) -> None:
    """Look for Accelerators that train in FP8."""
    used: set[cst.CSTNode] = set()
    for call in script.all(cst.Call):
        name = script.name(call.func)
        if name.startswith("accelerate.") and name.endswith(".Accelerator"):
            script.take(call, _accelerator, used)
    for call in script.all(cst.Call):
        if (kind := _recipe_kind(script, call)) and call not in used:
            script.obstacles.append((call, f"This {kind} reaches no Accelerator that the script shows."))


def _recipe_kind(script: Script, node: cst.CSTNode) -> str:
    """The class of Accelerate whose FP8 recipe ``node`` makes, or an empty text."""
    if not isinstance(node, cst.Call):
        return ""
    root, _, name = script.name(node.func).partition(".")
    kind = name.rpartition(".")[2]
    return kind if root == "accelerate" and kind in _RECIPES else ""


def _accelerator(script: Script, call: cst.Call, used: set[cst.CSTNode]) -> Change | None:
    """Accelerator(mixed_precision="fp8", kwargs_handlers=[recipe]) and the call of prepare on it."""
    given = script.keywords(call, "FP8")
    handlers = given.get("kwargs_handlers")
    listed = script.resolve(handlers) if handlers is not None else None
    recipe = _recipe_in(script, listed)
    if recipe is not None:
        used.add(recipe[1])
    precision = given.get("mixed_precision")
    if precision is not None:
        try:
            if script.value(precision) != "fp8":
                return None
        except Obstacle:
            raise Obstacle(
                precision, f"mixed_precision={script.short(precision)} is known only when the script runs; in the "
                "place of 'fp8' call nemo_lowprec.accelerate.prepare(accelerator, model, optimizer, level=...).",
            ) from None  # fmt: skip
    elif recipe is None:
        return None
    for name in _ENGINES:
        if name in given:
            raise Obstacle(given[name], f"A level does not train under Accelerate's {name}.")
    if any(script.name(c.func) == "nemo_lowprec.accelerate.prepare" for c in script.all(cst.Call)):
        return None
    if recipe is None:
        raise Obstacle(
            call,
            "The backend that trains in FP8 is the one that is installed, or chosen by a configuration; name it by a "
            "recipe, such as kwargs_handlers=[TERecipeKwargs()].",
        )
    where, made = recipe
    target, notes = _target(script, made)
    change = Change(notes=notes)
    name = _variable(script, call)
    for prepare in _prepares(script, call, name):
        change.add(_prepare(script, prepare, target))
    change.notes += [
        (node, f"{name}.mixed_precision is 'bf16' now.")
        for node in script.all(cst.Attribute)
        if node.attr.value == "mixed_precision" and script.text(node.value) == name
    ]
    change.add(_without_recipe(script, call, where, listed))
    change.imports[("nemo_lowprec.accelerate", None)] = None
    return change


def _recipe_in(script: Script, listed: cst.BaseExpression | None) -> tuple[cst.BaseExpression, cst.Call] | None:
    """The expression of a list that stands for a recipe, and the call that makes the recipe."""
    if listed is None or script.text(listed) == "None":
        return None
    if not isinstance(listed, cst.List):
        raise Obstacle(listed, f"kwargs_handlers={script.short(listed)} is known only when the script runs.")
    found = []
    for element in listed.elements:
        made = script.resolve(element.value)
        if _recipe_kind(script, made):
            assert isinstance(made, cst.Call)
            found.append((element.value, made))
        elif not (isinstance(made, cst.Call) and script.name(made.func)):
            raise Obstacle(element.value, f"{script.short(element.value)} is known only when the script runs.")
    if len(found) > 1:
        raise Obstacle(found[1][0], "The Accelerator has two FP8 recipes; leave one.")
    return found[0] if found else None


def _target(script: Script, recipe: cst.Call) -> tuple[Target, Notes]:
    """The level of a recipe of Accelerate's, with the values that Transformer Engine gets from it."""
    kind = _recipe_kind(script, recipe)
    given = keywords(script, recipe)
    if kind == "AORecipeKwargs":
        return _torchao(script, recipe, given)
    if kind == "FP8RecipeKwargs" and "backend" not in given:
        raise Obstacle(recipe, "The backend of FP8RecipeKwargs() is the one that is installed; name it by backend=.")
    values = {name: script.value(node) for name, node in given.items()}
    in_evaluation = values.pop("use_autocast_during_eval", False)
    backend = str(values.setdefault("backend", kind.removesuffix("RecipeKwargs"))).upper()
    if backend == "TE":
        values["use_autocast_during_eval"] = True  # without a warning; there is a note
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            level, arguments = from_settings(values)
        except (TypeError, ValueError) as error:
            raise Obstacle(recipe, str(error)) from None
    defaults = option_defaults(get_level(level))
    options = {}
    for name, value in arguments.items():
        node = given.get(name.removeprefix("fp8_"), given.get("fp8_format") if name == "fp8" else None)
        if node is not None and not isinstance(value, str):
            options[name] = value, node
        elif node is not None or value != defaults[name]:
            options[name] = value, cst.parse_expression(f'"{value}"' if isinstance(value, str) else repr(value))
    notes: Notes = [(recipe, str(warning.message)) for warning in said]
    if backend == "TE":
        notes.append((recipe, _HEAD))
        if not in_evaluation:
            notes.append((recipe, "Evaluation computes in FP8, too; Accelerate evaluates in BF16."))
    return Target(level, options).check(recipe), notes


def _torchao(script: Script, recipe: cst.Call, given: dict[str, cst.BaseExpression]) -> tuple[Target, Notes]:
    """The level of torchao's recipe."""
    config = given.pop("config", None)
    for name in _TORCHAO_DEFAULTS:
        if name in given and script.value(given.pop(name)) is not True:
            raise Obstacle(recipe, f"{name}=False has no counterpart.")
    for name, node in given.items():
        raise Obstacle(node, f"{name}={script.short(node)} has no counterpart; name layers by convert=[...].")
    text = "tensorwise"
    if config is not None:
        made = script.resolve(config)
        if not (
            isinstance(made, cst.Call)
            and script.name(made.func).endswith("Float8LinearConfig.from_recipe_name")
            and len(made.args) == 1
        ):
            raise Obstacle(config, f"No level is known for {script.short(config)}.")
        text = script.value(made.args[0].value)
    if text not in _TORCHAO:
        raise Obstacle(config or recipe, f"No level is known for torchao's recipe {text!r}.")
    level = _TORCHAO[text]
    return Target(level).check(recipe), [(recipe, _MASTERS.format(level=level))]


def _variable(script: Script, call: cst.Call) -> str:
    """The variable, or attribute, of the Accelerator that ``call`` makes."""
    assigned = script.parent(call)
    if not (isinstance(assigned, cst.Assign) and len(assigned.targets) == 1):
        raise Obstacle(call, "The Accelerator is assigned to no variable.")
    name = script.text(assigned.targets[0].target)
    if [script.text(target.target) for target in script.all(cst.AssignTarget)].count(name) > 1:
        raise Obstacle(call, f"{name} is assigned at several places.")
    return name


def _prepares(script: Script, call: cst.Call, name: str) -> list[cst.Call]:
    """The calls of ``prepare`` with a model on the Accelerator ``name``, which ``call`` makes."""
    found = []
    for other in script.all(cst.Call):
        if not (isinstance(other.func, cst.Attribute) and script.text(other.func.value) == name):
            continue
        method = other.func.attr.value
        if method in ("prepare_model", "prepare_optimizer"):
            raise Obstacle(other, f"{name}.{method} prepares one object; prepare model and optimizer together.")
        if method == "prepare" and any(_role(script, arg.value) != _OTHER for arg in other.args):
            found.append(other)
    if not found:
        raise Obstacle(call, f"{name}.prepare is called with a model at no place of this script.")
    return found


def _role(script: Script, node: cst.BaseExpression) -> str:
    """Whether an argument of prepare is the model, the optimizer or another object; empty where its name says nothing.

    The call that makes the object tells most; else the object's name does.
    """
    made = script.resolve(node)
    name = script.name(made.func) if isinstance(made, cst.Call) else ""
    text = (name if name else script.text(node)).lower()
    last = text.rpartition(".")[2]
    if re.search(r"loader|dataset|sched|_dl$|lr_", text):
        return _OTHER
    if re.search(r"optim|^opt|^adam|^sgd|^lion$|^muon$", last) or ".optim." in text:
        return _OPTIMIZER
    if re.search(r"model|net$|automodel", last) or re.search(r"model|network", script.text(node).lower()):
        return _MODEL
    return ""


def _prepare(script: Script, call: cst.Call, target: Target) -> Change:
    """accelerator.prepare(model, optimizer, ...) becomes nemo_lowprec.accelerate.prepare(accelerator, ...)."""
    assert isinstance(call.func, cst.Attribute)
    accelerator = call.func.value
    for arg in call.args:
        if arg.star or arg.keyword is not None:
            raise Obstacle(arg, f"{script.short(call)} is called with {script.short(arg).rstrip(',')}.")
    roles = [_role(script, arg.value) for arg in call.args]
    if roles.count(_MODEL) == 0 and roles.count("") == 1:
        roles[roles.index("")] = _MODEL
    if roles.count(_MODEL) != 1 or roles.count(_OPTIMIZER) != 1:
        raise Obstacle(call, f"The names in {script.short(call)} do not tell model and optimizer apart.")
    first = [roles.index(_MODEL), roles.index(_OPTIMIZER)]
    order = first + [i for i in range(len(roles)) if i not in first]
    change = Change()
    if order != sorted(order):
        change.add(_reorder(script, call, order))

    def new_call(new: cst.Call) -> cst.Call:
        args = [old.with_changes(value=new.args[i].value) for old, i in zip(new.args, order, strict=True)]
        wanted = [cst.Arg(accelerator), *args, argument("level", f'"{target.level}"'), *target.arguments()]
        return with_arguments(new.with_changes(func=cst.parse_expression("nemo_lowprec.accelerate.prepare")), wanted)

    change.edits[call] = new_call
    return change


def _reorder(script: Script, call: cst.Call, order: list[int]) -> Change:
    """The variables that get the prepared objects, in the order of the new call."""
    statement = script.parent(call)
    target = statement.targets[0].target if isinstance(statement, cst.Assign) and len(statement.targets) == 1 else None
    if not isinstance(target, cst.Tuple) or len(target.elements) != len(order):
        raise Obstacle(call, f"{script.short(call)} must take the model first, and the optimizer second.")
    return Change(
        {
            target: lambda new: new.with_changes(
                elements=[
                    old.with_changes(value=new.elements[i].value) for old, i in zip(new.elements, order, strict=True)
                ]
            )
        }
    )


def _without_recipe(
    script: Script, call: cst.Call, recipe: cst.BaseExpression, listed: cst.BaseExpression | None
) -> Change:
    """The Accelerator trains in BF16 and has its other handlers only."""
    assert isinstance(listed, cst.List)
    change = Change()
    alone = len(listed.elements) == 1
    inline = any(arg.value is listed for arg in call.args)
    if not alone and not inline and _uses_of_list(script, call) != 1:
        raise Obstacle(listed, "The list of handlers is used at several places.")

    def new_call(new: cst.Call) -> cst.Call:
        args = without(new, ["kwargs_handlers"] if alone else [])
        in_bf16 = [_with_precision(arg) for arg in args]
        if not any(arg.keyword is not None and arg.keyword.value == "mixed_precision" for arg in args):
            in_bf16.append(argument("mixed_precision", '"bf16"'))
        return with_arguments(new, in_bf16)

    change.edits[call] = new_call
    if not alone:
        index = next(i for i, element in enumerate(listed.elements) if element.value is recipe)

        def new_list(new: cst.List) -> cst.List:
            kept = [element for i, element in enumerate(new.elements) if i != index]
            kept[-1] = kept[-1].with_changes(comma=new.elements[-1].comma)
            return new.with_changes(elements=kept)

        change.edits[listed] = new_list
    return change


def _uses_of_list(script: Script, call: cst.Call) -> int:
    node = next(arg.value for arg in call.args if arg.keyword is not None and arg.keyword.value == "kwargs_handlers")
    definition = script.definition(node)
    return 0 if definition is None else script.users(definition)


def _with_precision(arg: cst.Arg) -> cst.Arg:
    if arg.keyword is not None and arg.keyword.value == "mixed_precision":
        return arg.with_changes(value=cst.parse_expression('"bf16"'))
    return arg
