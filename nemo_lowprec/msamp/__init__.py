"""MS-AMP's names for a training loop without Lightning: ``from nemo_lowprec import msamp`` replaces ``import msamp``.

A script that calls ``msamp.initialize`` needs no other change. A name of MS-AMP's that has no counterpart raises
ImportError where the script imports the name, with the way out; ``refused.py`` lists all of them.

Source: Azure/MS-AMP 0.4.0 (names and arguments).
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from nemo_lowprec.lazy import lazily
from nemo_lowprec.msamp.refused import WAYS_OUT, refuse

__all__ = ["OPT_LEVELS", "LBAdam", "LBAdamW", "clip_grad_norm_", "initialize", "nn", "opt_levels", "optim"]

OPT_LEVELS = {"O1": "msamp_o1", "O2": "msamp_o2", "O3": "msamp_o3"}
opt_levels = list(OPT_LEVELS)

_find, _ = lazily(__name__, {"LBAdam": "optim", "LBAdamW": "optim", "clip_grad_norm_": "nn", "initialize": "entry"})


def __getattr__(name: str) -> Any:
    if name in WAYS_OUT:
        refuse(name)
    return import_module(f"{__name__}.{name}") if name in ("nn", "optim") else _find(name)


def __dir__() -> list[str]:
    return sorted(__all__)
