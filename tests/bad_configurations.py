"""Values for every field of every face, most of them bad, and what a face says of them.

A face takes (field, value) and either refuses the value in one sentence or makes every object of the run with it.
``MEANT`` is told by the field's default alone, not by the checks: what is accepted must be of the default's kind.
"""

from __future__ import annotations

import copy
import inspect
import math
import os
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import fiddle as fdl
from hydra import compose, initialize_config_dir
from hypothesis import strategies as st
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from transformers import CONFIG_MAPPING, PreTrainedConfig

from nemo_lowprec import strategies
from nemo_lowprec.checks import check_trainer
from nemo_lowprec.conf.check import check_config
from nemo_lowprec.conf.choices import CONF_DIR, register_levels
from nemo_lowprec.conf.job import build
from nemo_lowprec.data import TextDataModule
from nemo_lowprec.models import CausalLM
from nemo_lowprec.models.architecture import check_architecture
from nemo_lowprec.plugins import LEVELS
from nemo_lowprec.recipes import llama3_8b, tiny
from nemo_lowprec.train import check_ckpt_path

__all__ = ["FACES", "SENTENCE", "Wrong", "examples", "outcome"]

BASES = {
    "default": [],
    "gpt2_tiny": ["model=gpt2_tiny", "data=megatron", "data.train_prefix=a", "data.validation_prefix=b",
                  "data.vocab_size=100", "logger=csv", "strategy=lowprec_ddp"],
    "text": ["data=text", "data.source=t", "data.data_dir=p", "strategy=lowprec_sharded", "logger=tensorboard"],
    **{f"precision={name}": [f"precision={name}"] for name in LEVELS},
}  # fmt: skip
# Of several kinds, or of no kind that the default tells.
_ANY_KIND = {"devices", "gpus", "logger", "profiler", "val_check_interval", "max_time", "strategy", "plugins", "skip"}
_UNSIGNED = {
    "max_steps",
    "max_epochs",
    "num_sanity_val_steps",
    "save_top_k",
    "fp8_margin",
}  # -1 and more mean something

SPECIAL: list[Any] = [
    None, True, False, 0, 1, -1, 3, 2**31, 2**32, 2**63, 10**30, -(2**63), 0.5, 1.5, -0.5, 1e-45, 1e39, 1e300,
    math.inf, -math.inf, math.nan, "", " ", "abc", "None", "nan", "1", "best", "last", "/", "..", "~", "a" * 300,
    "http://127.0.0.1:9/x.ckpt", "s3x://bucket/x.ckpt", "💥", "a\0b", [], [1], ["a"], [[]], [None], {}, {"a": 1},
    {"_target_": "nowhere.at.all"}, {"_target_": 3},
]  # fmt: skip
VALUES = st.one_of(
    st.sampled_from(SPECIAL),
    st.integers(-(2**65), 2**65),
    st.floats(),
    st.text(max_size=8).filter(lambda text: "${" not in text and text != "???"),
    st.lists(st.one_of(st.integers(-9, 9), st.text("ab", max_size=2)), max_size=3),
)
SENTENCE = (ValueError, TypeError, MisconfigurationException)


class Wrong(AssertionError):
    """A face let a value through that means nothing, or did not refuse it in one sentence."""


# Hydra


@lru_cache
def _composed(base: str) -> DictConfig:
    register_levels()
    with initialize_config_dir(str(CONF_DIR), version_base="1.3"):
        return compose("config", overrides=["output_dir=out", "trainer.accelerator=cpu", *BASES[base]])


def _leaves(node: Any, path: str = "") -> dict[str, Any]:
    if not isinstance(node, dict):
        return {path: node}
    return {p: v for name, value in node.items() for p, v in _leaves(value, f"{path}.{name}".lstrip(".")).items()}


def _defaults(function: Callable[..., Any]) -> dict[str, Any]:
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}


def _hydra_fields() -> dict[str, tuple[str, Any]]:
    fields = {}
    for base in BASES:
        cfg = OmegaConf.to_container(_composed(base), resolve=True)
        fields |= {f"{base}|{path}": value for path, value in _leaves(cfg).items() if not path.startswith("hydra")}
    cfg = _leaves(OmegaConf.to_container(_composed("default"), resolve=True))
    for group, function in (("trainer", Trainer), ("checkpoint", ModelCheckpoint)):
        more = {f"{group}.{name}": value for name, value in _defaults(function).items()}
        fields |= {f"default|{path}": value for path, value in more.items() if path not in cfg}
    for base, kind in (("default", "llama"), ("gpt2_tiny", "gpt2")):
        made = CONFIG_MAPPING[kind]()
        own = set(vars(made)) & set(CONFIG_MAPPING[kind].__annotations__) - set(PreTrainedConfig.__annotations__)
        fields |= {f"{base}|model.config.{name}": getattr(made, name) for name in sorted(own)}
    groups = ["precision", "model", "data", "trainer", "checkpoint", "model.config"]
    unknown = {f"default|{path}": inspect.Parameter.empty for path in ["nobody", *(f"{g}.nobody" for g in groups)]}
    return fields | {f"default|{group}": {} for group in groups} | unknown


def _hydra(field: str, value: Any) -> None:
    base, _, path = field.partition("|")
    cfg = copy.deepcopy(_composed(base))
    OmegaConf.set_struct(cfg, False)
    # As a quoted string of the command line: an interpolation is none.
    OmegaConf.update(cfg, path, value, merge=False, force_add=True)
    check_config(cfg)
    parts = build(cfg)
    check_trainer(parts["trainer"])
    check_architecture(parts["model"]._model_type, {**parts["model"]._fields, "vocab_size": 128})


# nemo_run: the same classes behind configs of it


def _recipe_fields() -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for name, recipe in (("tiny", tiny), ("llama3_8b", llama3_8b)):
        made = recipe.pretrain_recipe()
        for part in ("model", "data", "trainer"):
            config = getattr(made, part)
            given = _defaults(fdl.get_callable(config)) | fdl.ordered_arguments(config)
            fields |= {f"{name}|{part}.{argument}": value for argument, value in given.items() if argument != "self"}
    return fields


def _recipe(field: str, value: Any) -> None:
    name, _, path = field.partition("|")
    recipe = {"tiny": tiny, "llama3_8b": llama3_8b}[name].pretrain_recipe()
    recipe.trainer.accelerator, recipe.trainer.devices, recipe.trainer.strategy = "cpu", 1, "auto"
    part, _, argument = path.partition(".")
    setattr(getattr(recipe, part), argument, value)
    from nemo_lowprec.recipes.context import own_words

    with own_words():
        parts = {name: fdl.build(getattr(recipe, name)) for name in ("model", "data", "trainer")}
    check_trainer(parts["trainer"])
    check_architecture(parts["model"]._model_type, {**parts["model"]._fields, "vocab_size": 128})


# Python

_MAKERS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "CausalLM": (CausalLM, {"preset": "llama_tiny"}),
    "TextDataModule": (TextDataModule, {}),
    "lowprec_ddp": (strategies.LowPrecisionDDPStrategy, {}),
    "lowprec_sharded": (strategies.LowPrecisionShardedStrategy, {}),
    **{name: (level, {}) for name, level in LEVELS.items()},
}


def _constructor_fields() -> dict[str, Any]:
    return {
        f"{name}|{argument}": value
        for name, (maker, given) in _MAKERS.items()
        for argument, value in {**_defaults(maker), **given, "nobody": inspect.Parameter.empty}.items()
    } | {"ckpt_path|ckpt_path": None}


def _constructor(field: str, value: Any) -> None:
    name, _, argument = field.partition("|")
    if name == "ckpt_path":
        check_ckpt_path(value)
        return
    maker, given = _MAKERS[name]
    made = maker(**{**given, argument: value})
    if isinstance(made, CausalLM):
        check_architecture(made._model_type, {**made._fields, "vocab_size": 128})


FACES: dict[str, tuple[Callable[[str, Any], None], dict[str, Any]]] = {
    "hydra": (_hydra, _hydra_fields()),
    "nemo_run": (_recipe, _recipe_fields()),
    "python": (_constructor, _constructor_fields()),
}


def examples(face: str) -> st.SearchStrategy[tuple[str, Any]]:
    """Pairs of a field of ``face`` and a value."""
    return st.tuples(st.sampled_from(sorted(FACES[face][1])), VALUES)


def outcome(face: str, field: str, value: Any) -> str:
    """``refused`` or ``accepted``.

    Raises:
        Wrong: it is accepted and means nothing, or is refused with another exception, or in more than a sentence.
    """
    set_to, fields = FACES[face]
    there = f"{face}: {field}={value!r}"
    try:
        set_to(field, value)
    except (*SENTENCE, OmegaConfBaseException) as error:
        _check_sentence(there, error)
        return "refused"
    except Exception as error:
        raise Wrong(f"{there}: {type(error).__name__}: {error}") from error
    if not _is_meant(field.split("|")[1].split(".")[-1], fields[field], value):
        raise Wrong(f"{there} was accepted; the default is {fields[field]!r}")
    return "accepted"


def _check_sentence(there: str, error: Exception) -> None:
    from nemo_lowprec.conf.command_line import one_sentence

    text = one_sentence(error) if isinstance(error, OmegaConfBaseException) else str(error)
    if not text.strip():
        raise Wrong(f"{there}: {type(error).__name__} without a word") from error
    if "Traceback" in text or text.count("\n") > 3:
        raise Wrong(f"{there}: no sentence: {text}") from error


def _is_meant(name: str, default: Any, value: Any) -> bool:
    """Whether a value is of the kind of a default and, as a number, finite and not negative."""
    if default is inspect.Parameter.empty:
        return False  # there is no such field
    if name in _ANY_KIND or default is None or value is None:
        return not (isinstance(value, float) and not math.isfinite(value)) or isinstance(default, str)
    if isinstance(default, bool):
        return isinstance(value, bool) or name == "deterministic" or (name == "fast_dev_run" and isinstance(value, int))
    if name.endswith("_token_id") and isinstance(value, list):
        return bool(value)
    if isinstance(default, int | float):
        if isinstance(value, bool) or not isinstance(value, int | float):
            return False
        if isinstance(default, int) and not isinstance(value, int) and name not in ("overfit_batches",):
            return name.startswith("limit_") or (isinstance(value, float) and name.endswith(("val", "_scale")))
        return math.isfinite(value) and (value >= 0 or (name in _UNSIGNED and value >= -1))
    if isinstance(default, str):
        return isinstance(value, str) and "\0" not in value
    return not isinstance(value, int | float)


def long_run() -> int:
    """Examples of each face: of ``NEMO_LOWPREC_BAD_CONFIGURATIONS``, where it is set."""
    return int(os.environ.get("NEMO_LOWPREC_BAD_CONFIGURATIONS", 0))
