"""The tables of the pages for those who come from elsewhere: settings and names, and what becomes of each."""

from __future__ import annotations

import warnings
from typing import Any

from benchmarks.rst import block, rst_table
from nemo_lowprec.chart import ALIASES, CHART, NOT_SERVED
from nemo_lowprec.loops.fp8_settings import level_of
from nemo_lowprec.msamp.refused import WAYS_OUT

__all__ = ["accelerate_settings", "aliases", "msamp_refused"]

_TE: tuple[dict[str, Any], ...] = (
    {"margin": 1},
    {"interval": 4},
    {"fp8_format": "E4M3"},
    {"fp8_format": "E5M2"},
    {"amax_history_len": 16},
    {"amax_compute_algo": "most_recent"},
    {"override_linear_precision": (False, False, True)},
    {"use_mxfp8_block_scaling": True},
    {"opt_level": "O1"},
)
_OTHERS: tuple[dict[str, Any], ...] = (
    *({"backend": "MSAMP", "opt_level": name} for name in ("O1", "O2", "O3")),
    {"backend": "AO"},
)


def accelerate_settings() -> str:
    """Each setting of Accelerate's FP8, with a value, and what ``level_of`` makes of it."""
    quiet = {"use_autocast_during_eval": True}
    level, defaults = level_of({"backend": "TE", **quiet})
    rows = [("``backend: TE``", f"``{level}``, as Transformer Engine under Accelerate: {_call(defaults)}")]
    for setting in (*_TE, {"use_autocast_during_eval": False}):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                _, found = level_of({"backend": "TE", **quiet, **setting})
                changed = _call({name: value for name, value in found.items() if value != defaults[name]})
                cells = [changed, *(f"A warning: {_literal(str(warning.message))}" for warning in caught)]
            except (TypeError, ValueError) as error:
                cells = [f"Refused: {_literal(str(error))}"]
        rows.append((_setting(setting), ". ".join(filter(None, cells))))
    for setting in _OTHERS:
        try:
            cell = f"``{level_of(setting)[0]}``"
        except ValueError as error:
            cell = f"Refused: {_literal(str(error))}"
        rows.append((_setting(setting), cell))
    return block(
        f"A row for each of {len(rows)} settings: the level, or the argument, that it becomes.", _table("Setting", rows)
    )


def msamp_refused() -> str:
    """MS-AMP's names without a counterpart."""
    names: dict[str, list[str]] = {}
    for name, way in WAYS_OUT.items():
        names.setdefault(way, []).append(f"``msamp.{name}``")
    rows = [(", ".join(of), _literal(way)) for way, of in names.items()]
    said = f"Of MS-AMP's names and modules {len(WAYS_OUT)} are refused, each with the way out."
    return block(said, rst_table(("Refused", "Way out"), rows))


def aliases() -> str:
    """Megatron-Bridge's names of recipes that are none of the chart's."""
    rows = [(f"``{name}``", f"``{alias.level}``: {_call(alias.options)}") for name, alias in ALIASES.items()]
    rows += [(f"``{name}``", f"Refused; the nearest level is ``{level}``") for name, level in NOT_SERVED.items()]
    more = f"{len(ALIASES)} more, and {len(NOT_SERVED)} recipes are refused"
    said = f"Beside the {len(CHART)} names of the chart there are {more}."
    return block(said, _table("Recipe", rows))


def _table(first: str, rows: list[tuple[str, str]]) -> str:
    return rst_table((first, "Becomes"), rows)


def _setting(values: dict[str, Any]) -> str:
    return f"``{', '.join(f'{name}: {value}' for name, value in values.items())}``"


def _call(arguments: Any) -> str:
    return ", ".join(f"``{name}={value!r}``" for name, value in arguments.items())


def _literal(sentence: str) -> str:
    """A sentence without what reStructuredText would read as markup."""
    return sentence.replace("*", r"\*").replace("_(", r"\_(")
