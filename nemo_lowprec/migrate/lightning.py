"""Lightning's Transformer Engine plugin, and the names that Trainer and Fabric have for it."""

from __future__ import annotations

import libcst as cst

from nemo_lowprec.compat.transformer_engine import ignored_arguments
from nemo_lowprec.migrate.edits import with_arguments
from nemo_lowprec.migrate.recipes import keywords, target_of_recipe, without
from nemo_lowprec.migrate.script import Change, Notes, Obstacle, Script

_PLUGIN = "TransformerEnginePrecision"
_PRECISIONS = {"transformer-engine": "bf16", "transformer-engine-float16": "fp16"}
_WEIGHTS = {
    "torch.bfloat16": "bf16",
    **dict.fromkeys(("torch.float16", "torch.half"), "fp16"),
    **dict.fromkeys(("torch.float32", "torch.float"), "fp32"),
}
_LAYERS = "The layer that computes the model's output stays in half precision; head='fp8' converts it, too."
_NOTES = {
    "bf16": (
        "Lightning's plugin has BF16 weights only; {level} keeps FP32 master weights, gradients and optimizer states "
        "beside them, 10 bytes a parameter more with Adam."
    ),
    "fp16": (
        "Lightning's plugin has FP16 weights only and scales no loss; {level} keeps FP32 master weights and optimizer "
        "states, and scales the loss."
    ),
    "fp32": "Outside FP8 layers {level} computes in BF16.",
}


def find(script: Script) -> None:
    """Look for Transformer Engine in the Trainers, Fabrics and plugins of ``lightning``."""
    called = set()
    seen: set[cst.CSTNode] = set()
    for call in script.all(cst.Call):
        name = script.name(call.func)
        root, _, last = name.partition(".")
        if root not in ("lightning", "pytorch_lightning", "lightning_fabric"):
            continue
        if last.endswith(_PLUGIN):
            called.add(call.func)
            script.take(call, _plugin)
        elif last.rpartition(".")[2] in ("Trainer", "Fabric"):
            script.take(call, _trainer, seen)
    for node in script.nodes:
        if not isinstance(node, cst.Name | cst.Attribute) or node in called or _is_part(script, node):
            continue
        if script.name(node).endswith(f".{_PLUGIN}"):
            script.obstacles.append((node, f"{_PLUGIN} is used without a call."))
    for statement in script.imports("transformer_engine"):
        if "transformer_engine.pytorch" in script.text(statement):
            script.obstacles.append(
                (statement, "The script calls Transformer Engine itself; convert layers of torch by a level instead.")
            )
    if any(script.imports(package) for package in ("lightning", "pytorch_lightning", "lightning_fabric")):
        for text in script.all(cst.SimpleString):
            if text.evaluated_value in _PRECISIONS and text not in seen:
                script.obstacles.append(
                    (text, f"{text.value} reaches no Trainer that the script shows; pass a level as plugins= there.")
                )


def _is_part(script: Script, node: cst.CSTNode) -> bool:
    """Whether ``node`` belongs to an import, or is the last name of ``a.b.name``."""
    parent = script.parent(node)
    return isinstance(parent, cst.ImportAlias | cst.ImportFrom) or (
        isinstance(parent, cst.Attribute) and parent.attr is node
    )


def _check_package(script: Script, call: cst.Call) -> None:
    package = script.name(call.func).partition(".")[0]
    if package != "lightning":
        raise Obstacle(call, f"The levels are plugins of the package lightning: import it in the place of {package}.")


def _plugin(script: Script, call: cst.Call) -> Change:
    """TransformerEnginePrecision(...) becomes the call of a level."""
    _check_package(script, call)
    given = keywords(script, call)
    dtype = given.pop("weights_dtype", given.pop("dtype", None))  # ``dtype``: its name in Lightning 2.1
    weight = None if dtype is None else _WEIGHTS.get(script.name(script.resolve(dtype)))
    if weight is None:
        raise Obstacle(dtype or call, "weights_dtype must be torch.bfloat16, torch.float16 or torch.float32 here.")
    if (layers := given.pop("replace_layers", None)) is not None and script.value(layers) is False:
        raise Obstacle(
            layers, "replace_layers=False leaves the layers to the script; name those to convert by convert=[...]."
        )
    recipe = given.pop("recipe", None)
    target = target_of_recipe(script, recipe, weight)
    fallback = given.pop("fallback_compute_dtype", None)
    computes = "fp16" if weight == "fp16" else "bf16"
    if fallback is not None and _WEIGHTS.get(script.name(script.resolve(fallback))) != computes:
        raise Obstacle(fallback, f"{target.level} computes in {computes.upper()} outside FP8 layers.")
    for name, node in given.items():
        raise Obstacle(node, f"{_PLUGIN} has no argument {name}.")
    notes = _notes(call, target.level, weight if fallback is None or weight != "fp32" else "")
    values = {name: value for name, (value, _) in target.options.items()}
    notes += [(call, sentence) for sentence in ignored_arguments(values)]
    level, options = target.level, target.arguments()
    return Change(
        {call: lambda new: with_arguments(new.with_changes(func=cst.Name(level)), options)},
        {("nemo_lowprec", level): None},
        notes,
    )


def _notes(node: cst.CSTNode, level: str, weight: str) -> Notes:
    notes = [(node, _NOTES[weight].format(level=level))] if weight else []
    return [*notes, (node, _LAYERS)]


def _trainer(script: Script, call: cst.Call, seen: set[cst.CSTNode]) -> Change | None:
    """Trainer(precision="transformer-engine") gets the level as a plugin."""
    given = script.keywords(call, "a precision or plugin of Transformer Engine")
    node = given.get("precision")
    if node is None:
        return None
    try:
        precision = script.value(node)
    except Obstacle:
        raise Obstacle(
            node, f"precision={script.short(node)} is known only when the script runs; in the place of "
            "'transformer-engine' pass plugins=bf16_with_fp8_mixed().",
        ) from None  # fmt: skip
    if precision not in _PRECISIONS:
        return None
    seen.add(script.resolve(node))
    _check_package(script, call)
    weight = _PRECISIONS[precision]
    level = target_of_recipe(script, None, weight).level
    plugins = given.get("plugins")
    if plugins is not None and not isinstance(plugins, cst.List | cst.Call) and script.text(plugins) != "None":
        raise Obstacle(plugins, f"plugins={script.short(plugins)} is no list or call; add {level}() to the plugins.")
    return Change(
        {call: lambda new: with_arguments(new, _with_level(new, level))},
        {("nemo_lowprec", level): None},
        _notes(node, level, weight),
    )


def _with_level(trainer: cst.Call, level: str) -> list[cst.Arg]:
    """The Trainer's arguments with a level among its plugins, in the place of ``precision``."""
    made = cst.parse_expression(f"{level}()")
    given = {arg.keyword.value: arg.value for arg in trainer.args if arg.keyword is not None}
    plugins = given.get("plugins")
    if isinstance(plugins, cst.List):
        made = plugins.with_changes(elements=[*plugins.elements, cst.Element(made)])
    elif isinstance(plugins, cst.Call):
        made = cst.List([cst.Element(plugins), cst.Element(made)])
    replaced = "precision" if plugins is None else "plugins"
    return [
        arg.with_changes(keyword=cst.Name("plugins"), value=made) if _is(arg, replaced) else arg
        for arg in without(trainer, {"precision"} - {replaced})
    ]


def _is(arg: cst.Arg, name: str) -> bool:
    return arg.keyword is not None and arg.keyword.value == name
