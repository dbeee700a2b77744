"""Delayed scaling: scales computed from the amaxes of the last steps, for all tensors of a model at once.

One table holds the scales and histories of every GEMM operand of a model, one column an operand. So the update at the
end of a step takes the same few launches for any number of layers. An ``AmaxSlot`` is a view of one operand's column.

Intended differences from Transformer Engine's recipe:

* The update happens once an optimizer step, not once a forward: micro-batches and the recomputation of activation
  checkpointing contribute to one amax, and evaluation contributes nothing.
* An operand without a history is scaled from the tensor at hand (TE starts at scale 1, which rounds gradients of
  1e-6 to zero; TE issue 982).
* A non-finite amax enters the history as 0, so that one overflow does not freeze the scale for a whole window.
* Weights have no history: see ``compute.weight_scales``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from nemo_lowprec.formats.floats import FloatFormat
from nemo_lowprec.formats.scale import compute_scale


class AmaxSlot:
    """One operand's column of a ``DelayedScaling`` table.

    Attributes:
        fmt: format of the stored operand.
        scale: shape [1], FP32, view into the table.
        amax: shape [1], FP32, view into the table: the running maximum since the last update.
        cold: True while no usable amax has entered the history; the operand is then scaled by its own amax.
        recorded: whether ``record`` was called since the host last read which cold operands have an amax.
        restarted: whether the next update empties the history.
        captured: lets CUDA graphs of ``torch.compile`` go that have captured the operand as cold, or as not cold; None
            where there are none. A replay records amaxes without ``record``.
    """

    __slots__ = ("amax", "captured", "cold", "fmt", "margin", "recorded", "restarted", "scale")

    def __init__(self, fmt: FloatFormat, margin: int) -> None:
        self.fmt = fmt
        self.margin = margin
        self.cold = True
        self.recorded = False
        self.restarted = False
        self.captured: Callable[[], None] | None = None
        self.scale: Tensor
        self.amax: Tensor

    def restart(self) -> None:
        """Scale by the tensor at hand until a new history has begun: the old history is of other weights."""
        self.cold = self.restarted = True
        self.release()

    def release(self) -> None:
        """Let the CUDA graphs go that have captured the operand as it was."""
        release, self.captured = self.captured, None
        if release is not None:
            release()

    def record(self, amax: Tensor) -> None:
        """Fold the amax of one tensor into this step's maximum."""
        torch.maximum(self.amax, amax.reshape(1), out=self.amax)
        self.recorded = True

    def current_scale(self, amax: Tensor) -> Tensor:
        """The scale, FP32 [1], for a tensor with ``amax``: the delayed scale, or ``amax``'s own without a history."""
        return compute_scale(amax.reshape(1), self.fmt.max, self.margin) if self.cold else self.scale


def _send(slot: AmaxSlot) -> Any:
    # As numbers: slots are views of one table, and Python cannot send one memory twice to a process that it spawns.
    state = (slot.scale.tolist(), slot.amax.tolist(), slot.scale.device, slot.cold, slot.recorded)
    return _receive, (slot.fmt, slot.margin, *state)


def _receive(
    fmt: FloatFormat, margin: int, scale: list[float], amax: list[float], device: Any, cold: bool, recorded: bool
) -> AmaxSlot:
    slot = AmaxSlot(fmt, margin)
    slot.scale, slot.amax = (
        torch.tensor(scale, device=device, dtype=torch.float32),
        torch.tensor(amax, device=device, dtype=torch.float32),
    )
    slot.cold, slot.recorded = cold, recorded
    return slot


ForkingPickler.register(AmaxSlot, _send)


class DelayedScaling:
    """Amax histories and scales of named operands.

    Args:
        history_len: number of steps in the history, at least 1.
        algo: ``max`` over the history, or the ``most_recent`` amax.
        margin: scales are divided by 2**margin.
        interval: scales are recomputed every ``interval`` updates; amaxes enter the history at every update.

    Attributes:
        reduce_amax: makes amaxes the maxima over the processes that train together, in place; None for one process.
        steps: how many steps have ended: amaxes that were recorded before belong to an earlier step.
    """

    def __init__(
        self, history_len: int = 1024, algo: Literal["max", "most_recent"] = "max", margin: int = 0, interval: int = 1
    ) -> None:
        self.history_len = history_len
        self.algo = algo
        self.margin = margin
        self.interval = interval
        self.reduce_amax: Callable[[Tensor], None] | None = None
        self.updates = self.steps = 0
        self.slots: dict[str, AmaxSlot] = {}
        self._reduced: Tensor | None = None
        self._shared: dict[int, tuple[AmaxSlot, AmaxSlot]] = {}
        self._before: tuple[int, list[tuple[bool, bool]]] | None = None  # the last update that may be taken back
        self._shared_index: Tensor | None = None  # by column: the column of its leader, or the column itself
        self._allocate(torch.device("cpu"))

    def add_all(self, operands: dict[str, FloatFormat]) -> None:
        """Give each operand a column; an operand that has a column keeps it."""
        state = self.state_dict()
        for name, fmt in operands.items():
            self.slots.setdefault(name, AmaxSlot(fmt, self.margin))
        self._allocate(self.scale.device)
        self.load_state_dict(state)

    def share(self, follower: AmaxSlot, leader: AmaxSlot) -> None:
        """Count the amaxes that ``leader`` records for ``follower``, too: both operands are the same tensor."""
        if id(follower) not in self._shared and follower is not leader:
            self._shared[id(follower)] = (follower, leader)
            self._shared_index = None
        follower.recorded = True

    @torch.no_grad()
    def join(self, leader: AmaxSlot, others: Sequence[AmaxSlot]) -> None:
        """``leader`` records the amaxes of the operands of ``others``, too, from now on, and has their histories."""
        position = {id(slot): i for i, slot in enumerate(self.slots.values())}
        first, every = position[id(leader)], [position[id(slot)] for slot in (leader, *others)]
        self.history[:, first] = self.history[:, every].amax(1)
        self.amax[first] = self.amax[every].amax()
        self.scale[first] = self.scale[every].amin()
        if any(slot.cold for slot in others) and not leader.cold:
            leader.cold = True
            leader.release()
        for slot in others:
            self.share(slot, leader)

    def _fold_shared(self) -> None:
        if not self._shared:
            return
        if self._shared_index is None:
            position = {id(slot): i for i, slot in enumerate(self.slots.values())}
            leaders = list(range(len(self.slots)))
            for follower, leader in self._shared.values():
                leaders[position[id(follower)]] = position[id(leader)]
            self._shared_index = torch.tensor(leaders, device=self.amax.device, dtype=torch.int64)
        torch.maximum(self.amax, self.amax[self._shared_index], out=self.amax)

    def to(self, device: torch.device) -> None:
        """Move the table, and the slots' views of the table, to ``device``."""
        if device != self.scale.device:
            state = self.state_dict()
            self._allocate(device)
            self.load_state_dict(state)

    def _allocate(self, device: torch.device) -> None:
        n = len(self.slots)
        self._shared_index = self._before = None
        self.scale = torch.ones(n, device=device, dtype=torch.float32)
        self.amax = torch.zeros(n, device=device, dtype=torch.float32)
        self.history = torch.zeros(self.history_len, n, device=device, dtype=torch.float32)
        self._fp_max = torch.tensor([s.fmt.max for s in self.slots.values()], device=device, dtype=torch.float32)
        for i, slot in enumerate(self.slots.values()):
            slot.scale, slot.amax = self.scale[i : i + 1], self.amax[i : i + 1]
            slot.cold = True

    @torch.no_grad()
    def update(self, skipped: Tensor | None = None) -> None:
        """End a step: enter this step's amaxes into the history and, every ``interval`` steps, renew the scales.

        Args:
            skipped: FP32 scalar on the device of a step that the device may skip, not 0 where the device does. The
                history and the scales then stay; ``take_back`` has to follow once the host knows.
        """
        self.steps += 1
        if not self.slots:
            return
        if self._reduced is None and self.reduce_amax is not None:
            self.reduce(self.amax.new_empty(0))
        elif self._reduced is None:
            self._fold_shared()
        found, self._reduced = self.amax if self._reduced is None else self._reduced, None
        amax = torch.nan_to_num(found, nan=0.0, posinf=0.0, neginf=0.0)
        self._empty_restarted()
        row, skips = self.history[self.updates % self.history_len], None if skipped is None else skipped > 0
        begins = any(slot.cold and slot.recorded for slot in self.slots.values())
        cold = [(slot.cold, slot.recorded) for slot in self.slots.values()] if begins else []
        self._before = None if skips is None else (self.updates, cold)
        row.copy_(amax if skips is None else torch.where(skips, row, amax))
        self.updates += 1
        if found is self.amax:
            self.amax.zero_()
        if self.updates % self.interval:
            return
        window = self.history.amax(0) if self.algo == "max" else amax
        scale = compute_scale(window, self._fp_max, self.margin, previous=self.scale)
        self.scale.copy_(scale if skips is None else torch.where(skips, self.scale, scale))
        if begins:
            # The only read-back to the host, until every operand that records amaxes has a history: frozen layers
            # have no gradients, and weights that are stored in FP8 have scales of their own.
            for slot, seen in zip(self.slots.values(), (window > 0).tolist(), strict=True):
                if slot.cold and seen:
                    slot.release()
                slot.cold, slot.recorded = slot.cold and not seen, slot.cold and slot.captured is not None

    @torch.no_grad()
    def take_back(self) -> None:
        """The step of the last ``update``, which has had ``skipped``, was skipped: count the update no more."""
        if self._before is None:  # there are no operands, or others since
            return
        (self.updates, cold), self._before = self._before, None
        for slot, before in zip(self.slots.values(), cold, strict=False):  # a history that began with the update
            slot.cold, slot.recorded = before

    def _empty_restarted(self) -> None:
        restarted = [i for i, slot in enumerate(self.slots.values()) if slot.restarted]
        if restarted:
            self.history[:, restarted] = 0
            for slot in self.slots.values():
                slot.restarted = False

    @torch.no_grad()
    def rescale(self, kind: str, factor: float) -> None:
        """Adapt histories and scales of the operands named ``*.kind`` to values ``factor`` times as large."""
        chosen = [name.endswith(f".{kind}") for name in self.slots]
        factors = torch.where(torch.tensor(chosen, device=self.scale.device, dtype=torch.bool), factor, 1.0)
        self.history *= factors
        self.scale /= factors

    def nonfinite(self) -> Tensor:
        """Whether any amax of this process since the last update is not finite: a bool scalar on the device."""
        return ~(self.amax < math.inf).all()

    @torch.no_grad()
    def reduce(self, flags: Tensor) -> bool:
        """Replace this step's amaxes by their maxima over all processes, in one all-reduce together with ``flags``.

        Amaxes that are recorded afterwards belong to the next step, on every process alike.

        Args:
            flags: FP32 [n] of 0 and 1; made the maxima over the processes, in place.

        Returns:
            Whether there are several processes; ``flags`` and amaxes are unchanged otherwise.
        """
        if self.reduce_amax is None:
            return False
        self._fold_shared()
        together = torch.cat([flags, self.amax])
        self.reduce_amax(together)
        flags.copy_(together[: len(flags)])
        amax = together[len(flags) :]
        self._reduced = amax if self._reduced is None else torch.maximum(self._reduced, amax)
        self.amax.zero_()
        return True

    @torch.no_grad()
    def equalize(self) -> None:
        """Replace the amaxes of an unfinished step by their maxima over all processes, for a checkpoint."""
        self._fold_shared()
        if self.reduce_amax is not None:
            self.reduce_amax(self.amax)

    def discard(self) -> None:
        """Forget this step's amaxes: the step was skipped."""
        self.steps += 1
        self._reduced = None
        self.amax.zero_()

    def state_dict(self) -> dict[str, Any]:
        """By operand, on the CPU.

        ``amax_history``: FP32 [history_len], oldest first; ``scale`` and ``amax``: FP32 scalars; ``cold``: bool;
        ``target``: the value to which the scale brings the amax.
        """
        self._empty_restarted()
        oldest = self.updates % self.history_len
        history = torch.roll(self.history, -oldest, 0).cpu()
        recorded = self.amax if self._reduced is None else torch.maximum(self.amax, self._reduced)
        scale, amax = self.scale.cpu(), recorded.cpu()
        return {
            "updates": self.updates,
            "operands": {
                name: {
                    "amax_history": history[:, i].clone(),
                    "scale": scale[i].clone(),
                    "amax": amax[i].clone(),
                    "cold": slot.cold,
                    "target": slot.fmt.max / 2.0**slot.margin,
                }
                for i, (name, slot) in enumerate(self.slots.items())
            },
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the columns of the operands in ``state``; operands that ``state`` lacks start afresh.

        A history of another length is cut to its newest entries, or padded with zeros before the oldest. A scale of
        another format or margin is converted.
        """
        self.updates = int(state["updates"])
        oldest = self.updates % self.history_len
        columns = torch.zeros(self.history.shape, dtype=torch.float32)
        scale, amax = (
            torch.ones(len(self.slots), dtype=torch.float32),
            torch.zeros(len(self.slots), dtype=torch.float32),
        )
        for i, (name, slot) in enumerate(self.slots.items()):
            saved = state["operands"].get(name)
            if saved is None:
                slot.cold = True
                continue
            slot.restarted = False
            recent = saved["amax_history"][-self.history_len :].cpu()
            column = F.pad(recent, (self.history_len - len(recent), 0))
            columns[:, i] = torch.roll(column, oldest, 0)
            scale[i] = saved["scale"] * (slot.fmt.max / 2.0**slot.margin / saved["target"])
            amax[i], slot.cold = saved["amax"], bool(saved["cold"])
            slot.recorded = slot.cold  # whether an amax was recorded is not saved: the next update reads the history
        self._reduced = self._before = None
        self.history.copy_(columns)
        self.scale.copy_(scale)
        self.amax.copy_(amax)
