"""Accelerate's FP8 settings as a level of the chart and the level's arguments."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from nemo_lowprec.compat.transformer_engine import ignored_arguments

_TE: dict[str, Any] = {  # Accelerate's names, and what Transformer Engine computes with where a setting is left out
    "margin": 0,
    "interval": 1,
    "fp8_format": "HYBRID",
    "amax_history_len": 1024,
    "amax_compute_algo": "max",  # Accelerate's default is most_recent, but Accelerate passes no defaults on
    "override_linear_precision": (False, False, False),
    "use_autocast_during_eval": False,
    "use_mxfp8_block_scaling": False,
}
_MSAMP: dict[str, Any] = {"opt_level": "O2"}
_DEFAULTS = {"TE": _TE, "MSAMP": _MSAMP}
_BACKENDS = {"TERecipeKwargs": "TE", "MSAMPRecipeKwargs": "MSAMP", "AORecipeKwargs": "AO"}
_ALIASES = {  # of ``accelerate config`` and of the launcher's options
    "format": "fp8_format",
    "amax_history_length": "amax_history_len",
    "amax_compute_algorithm": "amax_compute_algo",
    "optimization_level": "opt_level",
}
_ARGUMENTS = {
    "margin": "fp8_margin",
    "interval": "interval",
    "amax_history_len": "fp8_amax_history_len",
    "amax_compute_algo": "fp8_amax_compute_algo",
}
_FORMATS = {"HYBRID": "hybrid", "E4M3": "e4m3"}


def level_of(settings: Any) -> tuple[str, dict[str, Any]]:
    """The level that Accelerate's FP8 settings describe, and its arguments.

    Backend ``TE`` is ``te_fp8``: FP32 weights, GEMMs in FP8 with delayed scaling. ``MSAMP`` is ``msamp_o1``,
    ``msamp_o2`` or ``msamp_o3``, which Accelerate itself does not have. A setting that is left out has the value that
    Transformer Engine gets under Accelerate. A warning names each setting that has no effect there and has one here.

    Args:
        settings: ``TERecipeKwargs``, ``MSAMPRecipeKwargs`` or ``FP8RecipeKwargs``; a mapping as the ``fp8_config`` of a
            file of ``accelerate config``; or the path of such a file.

    Returns:
        (level, arguments of the level), for ``prepare(..., level=level, **arguments)``.

    Raises:
        ValueError: the backend ``AO`` or another one, a file without ``fp8_config``, a setting of the other backend, or
            a value that the level does not take.
        TypeError: an unknown setting.
    """
    found = _settings(settings)
    backend = str(found.pop("backend", None)).rpartition(".")[2].upper()
    if backend == "AO":
        raise ValueError(
            "Settings of torchao (backend AO) are not read. Name the level: bf16_with_fp8_current_scaling_mixed scales "
            "as torchao's recipe 'tensorwise' does, bf16_with_fp8_rowwise_mixed as 'rowwise'."
        )
    if backend not in _DEFAULTS:
        raise ValueError(f"The FP8 backend is {backend}, and must be one of: {', '.join(_DEFAULTS)}.")
    known = _DEFAULTS[backend]
    for name in found:
        if name not in _TE and name not in _MSAMP:
            raise TypeError(f"The FP8 settings have an unknown {name!r}. {backend} takes: {', '.join(known)}.")
        if name not in known:
            raise ValueError(f"{name}={found[name]!r} has no effect with the FP8 backend {backend}. Leave it out.")
    chosen = {**known, **found}
    return _of_te(chosen) if backend == "TE" else _of_msamp(chosen)


def _settings(given: Any) -> dict[str, Any]:
    """The settings by Accelerate's names, those of a recipe object without the defaults."""
    if isinstance(given, str | PathLike):
        given = _read(Path(given))
    if isinstance(given, Mapping):
        plain = {name if name == "fp8_format" else name.removeprefix("fp8_"): value for name, value in given.items()}
        return {_ALIASES.get(name, name): value for name, value in plain.items()}
    name = type(given).__name__
    if type(given).__module__.partition(".")[0] != "accelerate" or name not in {*_BACKENDS, "FP8RecipeKwargs"}:
        raise ValueError(
            f"FP8 settings must be a recipe of Accelerate such as TERecipeKwargs, an fp8_config or the path of a file "
            f"of accelerate config, not {name}."
        )
    backend = _BACKENDS.get(name) or given.backend
    if backend == "AO":
        return {"backend": backend}
    defaults = {**_TE, **_MSAMP, "amax_compute_algo": "most_recent"}
    chosen = {n: v for n, v in vars(given).items() if v not in (None, defaults.get(n, v))}
    return {"backend": backend, **chosen}


def _read(path: Path) -> Mapping[str, Any]:
    import yaml

    config = yaml.safe_load(path.read_text())
    found = config.get("fp8_config") if isinstance(config, Mapping) else None
    if not isinstance(found, Mapping) or not found:
        raise ValueError(f"{path} has no fp8_config. Name a level, or write one by accelerate config.")
    return found


def _of_te(chosen: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    if chosen["use_mxfp8_block_scaling"]:
        raise ValueError(
            "use_mxfp8_block_scaling=True has no level with FP32 weights. Leave it out, and name the level "
            "bf16_with_mxfp8_mixed."
        )
    fp8 = _FORMATS.get(str(chosen["fp8_format"]).upper())
    if fp8 is None:
        raise ValueError(
            f"fp8_format={chosen['fp8_format']!r} must be HYBRID or E4M3: weights in E5M2 are for evaluation alone."
        )
    arguments = {ours: chosen[name] for name, ours in _ARGUMENTS.items()}
    arguments["override_linear_precision"] = _three(chosen["override_linear_precision"])
    said = ignored_arguments(arguments)
    if chosen["amax_compute_algo"] == "most_recent":
        said.append(
            "amax_compute_algo='most_recent' has an effect here. Accelerate does not pass it on, and Transformer "
            "Engine computes with its own default, 'max': leave it out to train as there."
        )
    if not chosen["use_autocast_during_eval"]:
        said.append(
            "use_autocast_during_eval=False, Accelerate's default, has no effect: converted layers compute in FP8 in "
            "evaluation, too. Set use_autocast_during_eval=True to agree."
        )
    for sentence in said:
        warnings.warn(sentence, stacklevel=3)
    return "te_fp8", {"fp8": fp8, **arguments}


def _three(given: Any) -> Any:
    """(fprop, dgrad, wgrad) of a tuple, a list, False for none, or a string as ``(true, false, false)``."""
    if given is False:
        return (False, False, False)
    if not isinstance(given, str):
        return tuple(given) if isinstance(given, list) else given  # which the level checks
    words = [word.strip().lower() for word in given.strip("()[] ").split(",")]
    return tuple({"true": True, "false": False}.get(word, word) for word in words)


def _of_msamp(chosen: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    from nemo_lowprec.msamp import OPT_LEVELS

    level = OPT_LEVELS.get(chosen["opt_level"])
    if level is None:
        raise ValueError(f"opt_level={chosen['opt_level']!r} must be one of: {', '.join(OPT_LEVELS)}.")
    return level, {}
