"""Amax histories of a checkpoint: of converted layers, and of Transformer Engine's own layers.

With delayed scaling an operand's scale is (largest number of the format / amax of the history) / 2^margin.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from nemo_lowprec.formats import E4M3, E5M2

# Transformer Engine's operands of one GEMM, forward and backward; a module of two GEMMs has them twice.
_TE_OPERANDS = {"fwd": ("input", "weight", "output"), "bwd": ("grad_output", "grad_input")}


@dataclass(frozen=True)
class AmaxHistory:
    """The amaxes of one operand of a layer's GEMMs.

    Attributes:
        layer: its name in the model; with ``#2`` for the second GEMM of a module of Transformer Engine.
        operand: ``input``, ``grad_output``; of Transformer Engine's layers also ``weight``.
        amaxes: one a step, the oldest first, without steps before the history began. 0.0 for a step in which the
            operand had no amax, or one that was not finite.
        scale: of the next step, by which values are multiplied before they are cast.
        target: the value to which the scale brings the amax; None where the checkpoint does not say.
    """

    layer: str
    operand: str
    amaxes: tuple[float, ...]
    scale: float
    target: float | None = None


def histories_of(state: Mapping[str, Any]) -> list[AmaxHistory]:
    """The histories in the state of a Precision plugin, in the model's order; empty without delayed scaling."""
    return [*_own(state.get("fp8", {})), *_of_te(state.get("te", {}))]


def _own(table: Mapping[str, Any]) -> Iterator[AmaxHistory]:
    """Histories as ``DelayedScaling.state_dict`` saves them; none before the first step."""
    if not table.get("updates"):
        return
    for name, saved in table["operands"].items():
        layer, _, operand = name.rpartition(".")
        history: Tensor = saved["amax_history"]
        begun = len(history) - min(int(table["updates"]), len(history))
        yield AmaxHistory(layer, operand, tuple(history[begun:].tolist()), float(saved["scale"]), saved["target"])


def _of_te(modules: Mapping[str, Any]) -> Iterator[AmaxHistory]:
    """Histories as ``te_layers.te_state_dict`` saves them. Row 0 is the present step, the newest rows come last."""
    for module, saved in modules.items():
        for direction, operands in _TE_OPERANDS.items():
            history: Tensor = saved[f"amax_history_{direction}"].roll(-1, 0)
            used = history.any(1).nonzero()
            if not len(used):
                continue
            end = len(history) if history[-1].any() else len(history) - 1  # no present step has begun
            for index, scale in enumerate(saved[f"scale_{direction}"].tolist()):
                gemm, kind = divmod(index, len(operands))
                amaxes = history[int(used[0]) : end, index]
                if amaxes.any():  # outputs and input gradients are not quantized
                    layer = module if not gemm else f"{module}#{gemm + 1}"
                    yield AmaxHistory(layer, operands[kind], tuple(amaxes.tolist()), scale)


def options_of(state: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of the level that histories show: ``fp8_amax_history_len``, and of converted layers the formats."""
    table, modules = state.get("fp8", {}).get("operands", {}), state.get("te", {})
    lengths = [len(saved["amax_history"]) for saved in table.values()]
    lengths += [len(saved["amax_history_fwd"]) for saved in modules.values()]
    found: dict[str, Any] = {"fp8_amax_history_len": lengths[0]} if lengths else {}
    targets = {name.rpartition(".")[2]: saved["target"] for name, saved in table.items()}
    if "input" in targets:
        scale = E4M3.max / targets["input"]
        found["fp8_margin"] = round(math.log2(scale))
        if "grad_output" in targets:
            found["fp8"] = "hybrid" if targets["grad_output"] * scale == E5M2.max else "e4m3"
    return found
