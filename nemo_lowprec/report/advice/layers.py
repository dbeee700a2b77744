"""From errors of operands to layers that are better kept in half precision.

The errors may come from one pass of a batch (``operands.py``) or from whatever else has measured them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from nemo_lowprec.formats.errors import Errors
from nemo_lowprec.report.advice.operands import Rounded, by_scaling
from nemo_lowprec.report.bounds import beyond, crossed


@dataclass(frozen=True)
class KeptBack:
    """A layer whose operands cross a bound under one way of scaling.

    Attributes:
        layer: its name.
        scaling: of ``way_of``.
        reason: each operand with its metrics beyond a bound: "input: SQNR 12.3 dB".
        beyond: how far its worst operand lies beyond a bound (``bounds.beyond``).
    """

    layer: str
    scaling: str
    reason: str
    beyond: float


def kept_back(errors: Mapping[Rounded, Errors], scaling: str) -> list[KeptBack]:
    """The layers to keep back under ``scaling``, in their order."""
    layers: dict[str, dict[str, Errors]] = {}
    for key, found in by_scaling(errors, scaling).items():
        layers.setdefault(key.layer, {})[key.kind] = found
    kept = []
    for layer, operands in layers.items():
        reasons = {kind: ", ".join(crossed(found)) for kind, found in operands.items()}
        said = "; ".join(f"{kind.replace('_', ' ')}: {reason}" for kind, reason in reasons.items() if reason)
        if said:
            kept.append(KeptBack(layer, scaling, said, max(map(beyond, operands.values()))))
    return kept


def lowest(errors: Mapping[Rounded, Errors], scaling: str) -> dict[str, float]:
    """By operand the lowest SQNR of any layer under ``scaling``, dB."""
    found: dict[str, float] = {}
    for key, one in by_scaling(errors, scaling).items():
        if one.sqnr is not None:
            found[key.kind] = min(one.sqnr, found.get(key.kind, one.sqnr))
    return found
