"""The command line of ``nemo-lowprec run``, checked before nemo_run reads it.

nemo_run, Lightning and torch take seconds to import, and this file imports none of them. So ``--help`` and mistakes in
options, recipes, levels and the arguments of levels are answered at once. ``nemo_lowprec.recipes.names`` checks the
names that only a recipe knows.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from nemo_lowprec.chart import ALIASES, CHART, get_level
from nemo_lowprec.chart.options import check_option
from nemo_lowprec.conf.choices import arguments_of
from nemo_lowprec.lines import did_you_mean, help_page, nearest

# each recipe's level and summary
RECIPES = {
    "tiny": ("bf16_with_fp8_mixed", "1.3 M parameters, 200 steps: a minute on two CPU cores"),
    "llama32_1b": ("bf16_mixed", "Llama 3.2 1B on one GPU"),
    "llama3_8b": ("bf16_mixed", "Llama 3 8B, sharded over several GPUs"),
    "megatron_tiny": ("bf16_mixed", "tiny on Megatron-core, one GPU"),
    "megatron_llama32_1b": ("bf16_mixed", "Llama 3.2 1B on Megatron-core, 8 GPUs"),
    "megatron_llama3_8b": ("bf16_mixed", "Llama 3 8B on Megatron-core, 8 GPUs"),
    "megatron_llama3_70b": ("bf16_mixed", "Llama 3 70B on Megatron-core, 4 machines of 8 GPUs"),
}
DEFAULT_RECIPE = "tiny"
RECIPE_ARGUMENTS = ("dir", "name", "num_nodes", "num_gpus_per_node", "max_steps", "monitor")
# arguments of the recipes' model, data and Trainer that are in no file of the Hydra groups
_NOT_LISTED = {
    "model": {"model_type"},
    "data": set(),
    "trainer": {"precision", "plugins", "strategy", "devices", "num_nodes", "logger", "callbacks", "model_registry"},
}
SETTINGS = ("model", "data", "trainer", "ckpt_path", "monitor", "run")  # of `pretrain`; run.executor is nemo_run's own

# nemo_run's options with a value, by their long and short names, and its options without a value
VALUED = {
    **{"--name": "-n", "--factory": "-f", "--load": "-l"},
    **dict.fromkeys(("--yaml", "--rich-theme", "--to-yaml", "--to-toml", "--to-json"), ""),
}
_YES = {"--yes", "--no-confirm", "-y"}
_ASKS_NOTHING = _YES | {"--dryrun", "--repl", "-r", "--to-yaml", "--to-toml", "--to-json", "--help"}
FLAGS = {
    *_YES, "--direct", "--no-direct", "--dryrun", "--repl", "-r", "--detach", "--tail-logs", "--no-tail-logs",
    "--verbose", "-v", "--rich-exceptions", "--no-rich-exceptions", "--rich-traceback-short", "--rich-traceback-full",
    "--rich-show-locals", "--rich-hide-locals", "--install-completion", "--show-completion", "--help",
}  # fmt: skip

_PLUGINS = "trainer.plugins"


def check_run_arguments(arguments: Sequence[str]) -> None:
    """Check the arguments of ``nemo-lowprec run`` as far as possible without nemo_run.

    Args:
        arguments: without the program's name and without ``run``.

    Raises:
        ValueError: an unknown recipe or level, a word that is no setting, a setting that a later setting replaces, or
            a question that nobody could answer without a terminal.
        TypeError: an unknown option, setting, or argument of a recipe, a level, the model, the data or the Trainer.
    """
    options, settings = _read(arguments)
    recipe = options.get("--factory", None if {"--yaml", "--load"} & options.keys() else DEFAULT_RECIPE)
    if recipe is not None:
        check_recipe(recipe)
    level, _ = RECIPES.get((recipe or "").partition("(")[0].strip(), (None, None))
    for i, (path, value) in enumerate(settings):
        first = re.split(r"[.\[]", path)[0]
        if first not in SETTINGS:
            raise TypeError(f"There is no setting {path!r}.{nearest(first, [*SETTINGS[:-1], 'run.executor'])}")
        if recipe is not None and recipe.partition("(")[0].strip() in RECIPES:
            _check_argument(path, replaced=any(whole == first for whole, _ in settings))
        for later, other in settings[i + 1 :]:
            if path.startswith(f"{later}."):
                raise ValueError(f"{path}={value} comes before {later}={other}, which replaces it: write it after.")
        if path == _PLUGINS or _PLUGINS.startswith(f"{path}."):
            level = check_level(value) if path == _PLUGINS else None
        elif path.startswith(f"{_PLUGINS}.") and level is not None:
            check_option(get_level(level), path.removeprefix(f"{_PLUGINS}."))
    check_terminal(not _ASKS_NOTHING & options.keys())


def _read(arguments: Sequence[str]) -> tuple[dict[str, str], list[tuple[str, str]]]:
    """The options of a command line by their long names (a flag has an empty value), and its settings in order.

    Raises:
        TypeError: an unknown option.
        ValueError: an option without its value, or a word that is no setting.
    """
    options: dict[str, str] = {}
    settings, rest = [], list(arguments)
    long = {short: name for name, short in VALUED.items() if short}
    known = [*VALUED, *sorted(flag for flag in FLAGS if flag.startswith("--"))]
    while rest:
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        name = long.get(name, name)
        if name in VALUED:
            if not equals and not rest:
                raise ValueError(f"{word} needs a value.")
            options[name] = value if equals else rest.pop(0)
        elif word in FLAGS:
            options[word] = ""
        elif word.startswith("-"):
            raise TypeError(f"There is no option {name!r}.{nearest(name, known)}")
        else:
            settings.append(split_setting(word))
    return options, settings


def split_setting(word: str) -> tuple[str, str]:
    """The path and the value of a setting, such as ``trainer.max_steps=20`` or ``model.lr*=2``.

    Raises:
        ValueError: the word is no setting.
    """
    found = re.fullmatch(r"([\w\[\].]+)\s*[-+*/|&]?=\s*(.+)", word, re.DOTALL)
    if found is None:
        way = f"--factory {word}" if word in RECIPES else f"{word or 'NAME'}=VALUE"
        raise ValueError(f"{word!r} is no setting: write {way}." if "=" not in word else f"{word!r} is no NAME=VALUE.")
    return found[1], found[2]


def split_call(text: str) -> tuple[str, list[str]] | None:
    """The name of a factory and of its arguments in a text such as ``tiny(max_steps=5)``; None for any other text."""
    found = re.fullmatch(r"([\w.]+)(?:\((.*)\))?", text.strip())
    if found is None:
        return None
    arguments = [part.partition("=")[0].strip() for part in (found[2] or "").split(",") if "=" in part]
    return found[1], arguments


def check_recipe(text: str) -> None:
    """Check the value of ``--factory``; names with a dot, and any names beside a workspace file, are the user's.

    Raises:
        ValueError: no recipe has the name.
        TypeError: the recipe has no such argument.
    """
    call = split_call(text)
    if call is None:
        raise ValueError(f"--factory {text!r} must be the name of a recipe, such as tiny or 'tiny(dir=runs)'.")
    name, arguments = call
    if name in RECIPES:
        for argument in arguments:
            if argument not in RECIPE_ARGUMENTS:
                raise TypeError(f"{name} has no argument {argument!r}.{nearest(argument, RECIPE_ARGUMENTS)}")
    elif "." not in name and not _has_workspace():
        raise ValueError(f"Unknown recipe {name!r}. Choose one of: {', '.join(RECIPES)}.{did_you_mean(name, RECIPES)}")


def check_level(text: str) -> str | None:
    """Check a value of ``trainer.plugins``; returns the level's name, or None for a plugin of the user's own.

    Raises:
        ValueError: no level has the name.
        TypeError: the level has no such argument.
    """
    call = split_call(text)
    if call is None or "." in call[0] or call[0].lower() in ("none", "null"):
        return None
    name, arguments = call
    if name not in CHART and name not in ALIASES and _has_workspace():
        return None
    try:
        get_level(name)
    except ValueError as error:
        raise ValueError(f"{error}{did_you_mean(name, CHART)}") from None
    for argument in arguments:
        check_option(get_level(name), argument)
    return name


def arguments_of_recipes(part: str) -> set[str]:
    """Names of the arguments of the recipes' ``model``, ``data`` or ``trainer``."""
    return arguments_of(part) | _NOT_LISTED[part]


def _check_argument(path: str, replaced: bool) -> None:
    """Check the second name of a path, unless another setting has ``replaced`` the whole part of the recipe."""
    part, *below = re.split(r"[.\[]", path)
    if replaced or part not in _NOT_LISTED or not below:
        return
    known = arguments_of_recipes(part)
    if below[0] not in known:
        raise TypeError(f"There is no setting {path!r}.{nearest(below[0], sorted(known))}")


def check_terminal(asks: bool) -> None:
    """Check that there is a terminal where nemo_run ``asks`` whether to start the run.

    Raises:
        ValueError: nemo_run would wait for an answer, and there is no terminal.
    """
    if not asks or int(os.environ.get("WORLD_SIZE", 1)) > 1:  # with several processes nemo_run does not ask
        return
    if sys.stdin is None or not sys.stdin.isatty():
        raise ValueError("Add --yes: nemo_run asks whether to start, and there is no terminal to answer in.")


def _has_workspace() -> bool:
    """Whether nemo_run will read a workspace file, which may register factories of the user's own."""
    folder = Path.cwd()
    places = [folder, *folder.parents]
    names = ("workspace_private.py", "workspace.py")
    home = Path(os.environ.get("NEMORUN_HOME", Path.home() / ".nemo_run"))
    return any((place / name).exists() for place in places for name in names) or (home / "workspace.py").exists()


_SETTINGS_HELP = {
    "trainer.plugins=fp16_mixed": "the level; nemo-lowprec levels prints them",
    "trainer.plugins.fp8_margin=1": "an argument of the level, after it",
    "trainer.max_steps=400": "any argument of Lightning's Trainer",
    "trainer.strategy=lowprec_sharded": "or lowprec_ddp, lowprec_megatron",
    "model.lr=1e-4": "an argument of the model",
    "data.micro_batch_size=4": "an argument of the data",
    "ckpt_path=last": "go on from the last checkpoint of the run",
    "monitor=True": "watch what low precision does to each layer; monitor=10: every 10th step",
}
_OPTIONS_HELP = {
    "--factory RECIPE": f"the recipe (default: {DEFAULT_RECIPE}); its arguments are {', '.join(RECIPE_ARGUMENTS)}",
    "--yes": "start without asking",
    "--dryrun": "print the recipe with all its settings, and do nothing",
}
_EXAMPLES = (
    "nemo-lowprec run --yes trainer.plugins=msamp_o2",
    'nemo-lowprec run --yes --factory "llama3_8b(num_gpus_per_node=8)"',
)


def run_help() -> str:
    """The text of ``nemo-lowprec run --help``."""
    about = (
        "Trains a recipe by nemo_run's command line, validates it, and writes checkpoints and logs to "
        "outputs/RECIPE/LEVEL/."
    )
    recipes = {name: summary for name, (_, summary) in RECIPES.items()}
    tables = {"recipes": recipes, "settings (a few)": _SETTINGS_HELP, "options": _OPTIONS_HELP}
    page = help_page("nemo-lowprec run [--yes] [--factory RECIPE] [SETTING=VALUE ...]", about, tables, _EXAMPLES)
    return f"{page}\n\nnemorun lowprec pretrain --help lists all of nemo_run's options."
