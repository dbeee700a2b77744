"""Delayed scaling: scales computed from the amaxes of the last steps, for all tensors of a model at once.

One table holds the scales and histories of every GEMM operand of a model, one column an operand, so that the
update at the end of a step is a handful of launches whatever the number of layers. An operand sees its own column
through a ``AmaxSlot``.

Differences to Transformer Engine's recipe, each on purpose:

* The update happens once an optimizer step, not once a forward: micro-batches and the recomputation of activation
  checkpointing contribute to one amax, and evaluation contributes nothing.
* An operand without a history is scaled from the tensor at hand (TE starts at scale 1, which rounds gradients of
  1e-6 to zero; TE issue 982).
* A non-finite amax enters the history as 0, so that one overflow does not freeze the scale for a whole window.
* Weights have no history: see ``compute.weight_scales``.
"""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any, Literal

import torch
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
        recorded: whether a cold operand was seen since its amaxes were last looked at.
        restarted: whether the next update empties the history.
    """

    __slots__ = ("amax", "cold", "fmt", "margin", "recorded", "restarted", "scale")

    def __init__(self, fmt: FloatFormat, margin: int) -> None:
        self.fmt = fmt
        self.margin = margin
        self.cold = True
        self.recorded = False
        self.restarted = False
        self.scale: Tensor
        self.amax: Tensor

    def restart(self) -> None:
        """Scale by the tensor at hand until a new history has begun: the old one is another model's."""
        self.cold = self.restarted = True

    def record(self, amax: Tensor) -> None:
        """Fold the amax of one tensor into this step's maximum."""
        torch.maximum(self.amax, amax.reshape(1), out=self.amax)
        self.recorded = True

    def current_scale(self, amax: Tensor) -> Tensor:
        """Scale [1] for the tensor at hand: the delayed one, or from ``amax`` itself while there is no history."""
        return compute_scale(amax.reshape(1), self.fmt.max, self.margin) if self.cold else self.scale


def _send(slot: AmaxSlot) -> Any:
    # As numbers: two slots are views of one table, whose memory Python cannot hand to a process it spawns twice.
    state = (slot.scale.tolist(), slot.amax.tolist(), slot.scale.device, slot.cold, slot.recorded)
    return _receive, (slot.fmt, slot.margin, *state)


def _receive(
    fmt: FloatFormat, margin: int, scale: list[float], amax: list[float], device: Any, cold: bool, recorded: bool
) -> AmaxSlot:
    slot = AmaxSlot(fmt, margin)
    slot.scale, slot.amax = torch.tensor(scale, device=device), torch.tensor(amax, device=device)
    slot.cold, slot.recorded = cold, recorded
    return slot


ForkingPickler.register(AmaxSlot, _send)


class DelayedScaling:
    """Amax histories and scales of named operands.

    Args:
        history_len: steps that an amax is remembered, at least 1.
        algo: ``max`` over the history, or the ``most_recent`` amax.
        margin: scales are divided by 2**margin.
        interval: scales are recomputed every ``interval`` updates; amaxes are recorded at every one.

    Attributes:
        reduce_amax: makes amaxes the maxima over the processes that train together, in place; None for one process.
    """

    def __init__(
        self, history_len: int = 1024, algo: Literal["max", "most_recent"] = "max", margin: int = 0, interval: int = 1
    ) -> None:
        self.history_len = history_len
        self.algo = algo
        self.margin = margin
        self.interval = interval
        self.reduce_amax: Callable[[Tensor], None] | None = None
        self.updates = 0
        self.slots: dict[str, AmaxSlot] = {}
        self._reduced: Tensor | None = None
        self._shared: dict[int, tuple[AmaxSlot, AmaxSlot]] = {}
        self._shared_index: tuple[Tensor, Tensor] | None = None
        self._allocate(torch.device("cpu"))

    def add(self, name: str, fmt: FloatFormat) -> AmaxSlot:
        """Give the operand ``name`` a column (its own earlier one if it has it already)."""
        if name not in self.slots:
            state = self.state_dict()
            self.slots[name] = AmaxSlot(fmt, self.margin)
            self._allocate(self.scale.device)
            self.load_state_dict(state)
        return self.slots[name]

    def add_all(self, operands: dict[str, FloatFormat]) -> None:
        """Give many operands their columns at once."""
        state = self.state_dict()
        for name, fmt in operands.items():
            self.slots.setdefault(name, AmaxSlot(fmt, self.margin))
        self._allocate(self.scale.device)
        self.load_state_dict(state)

    def share(self, follower: AmaxSlot, leader: AmaxSlot) -> None:
        """From now on whatever ``leader`` records counts for ``follower`` too: they are given the same tensor."""
        if id(follower) not in self._shared and follower is not leader:
            self._shared[id(follower)] = (follower, leader)
            self._shared_index = None
        follower.recorded = True

    def _fold_shared(self) -> None:
        if not self._shared:
            return
        if self._shared_index is None:
            position = {id(slot): i for i, slot in enumerate(self.slots.values())}
            pairs = [(position[id(f)], position[id(slot)]) for f, slot in self._shared.values()]
            followers, leaders = torch.tensor(pairs, device=self.amax.device).unbind(1)
            self._shared_index = followers, leaders
        followers, leaders = self._shared_index
        self.amax[followers] = torch.maximum(self.amax[followers], self.amax[leaders])

    def to(self, device: torch.device) -> None:
        """Move the table; slots follow."""
        if device != self.scale.device:
            state = self.state_dict()
            self._allocate(device)
            self.load_state_dict(state)

    def _allocate(self, device: torch.device) -> None:
        n = len(self.slots)
        self._shared_index = None
        self.scale = torch.ones(n, device=device)
        self.amax = torch.zeros(n, device=device)
        self.history = torch.zeros(self.history_len, n, device=device)
        self._fp_max = torch.tensor([s.fmt.max for s in self.slots.values()], device=device)
        for i, slot in enumerate(self.slots.values()):
            slot.scale, slot.amax = self.scale[i : i + 1], self.amax[i : i + 1]
            slot.cold = True

    @torch.no_grad()
    def update(self) -> None:
        """End a step: enter this step's amaxes into the history and, every ``interval`` steps, renew the scales."""
        if not self.slots:
            return
        if self._reduced is None and not self.reduce(self.amax.new_empty(0)):
            self._fold_shared()
        found, self._reduced = self.amax if self._reduced is None else self._reduced, None
        amax = torch.where(torch.isfinite(found), found, torch.zeros_like(found))
        self._empty_restarted()
        self.history[self.updates % self.history_len] = amax
        self.updates += 1
        if found is self.amax:
            self.amax.zero_()
        if self.updates % self.interval:
            return
        window = self.history.amax(0) if self.algo == "max" else amax
        self.scale.copy_(compute_scale(window, self._fp_max, self.margin, previous=self.scale))
        if any(slot.cold and slot.recorded for slot in self.slots.values()):
            # The only read-back to the host, gone once every operand has been seen that there is: frozen layers have
            # no gradients, and a weight that is stored in FP8 has a scale of its own.
            for slot, seen in zip(self.slots.values(), (window > 0).tolist(), strict=True):
                slot.cold, slot.recorded = slot.cold and not seen, False

    def _empty_restarted(self) -> None:
        restarted = [i for i, slot in enumerate(self.slots.values()) if slot.restarted]
        if restarted:
            self.history[:, restarted] = 0
            for slot in self.slots.values():
                slot.restarted = False

    @torch.no_grad()
    def rescale(self, kind: str, factor: float) -> None:
        """Expect the operands whose names end in ``kind`` to be ``factor`` times as large: the loss scale changed."""
        chosen = [name.endswith(f".{kind}") for name in self.slots]
        factors = torch.where(torch.tensor(chosen, device=self.scale.device), factor, 1.0)
        self.history *= factors
        self.scale /= factors

    def nonfinite(self) -> Tensor:
        """Whether any amax of this process since the last update is not finite: a bool scalar on the device."""
        return (~torch.isfinite(self.amax)).any()

    @torch.no_grad()
    def reduce(self, flags: Tensor) -> bool:
        """Make this step's amaxes those of all processes, for the next update; one all-reduce carries ``flags``, too.

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
        """Make the amaxes recorded so far in an unfinished step those of all processes, before they are saved."""
        self._fold_shared()
        if self.reduce_amax is not None:
            self.reduce_amax(self.amax)

    def discard(self) -> None:
        """Forget this step's amaxes: the step was skipped."""
        self._reduced = None
        self.amax.zero_()

    def state_dict(self) -> dict[str, Any]:
        """By operand: history oldest first, scale, the value it scales the amax to, and whether it is in use yet."""
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
        """Take over the columns that ``state`` knows; operands that it does not know start afresh.

        A history of another length is cut to its newest entries or padded with zeros before them. The scale of
        another format or margin is brought to this one's.
        """
        self.updates = int(state["updates"])
        oldest = self.updates % self.history_len
        columns = torch.zeros(self.history.shape)
        scale, amax = torch.ones(len(self.slots)), torch.zeros(len(self.slots))
        for i, (name, slot) in enumerate(self.slots.items()):
            saved = state["operands"].get(name)
            if saved is None:
                slot.cold = True
                continue
            slot.restarted = False
            recent = saved["amax_history"][-self.history_len :].cpu()
            column = torch.zeros(self.history_len)
            column[self.history_len - len(recent) :] = recent
            columns[:, i] = torch.roll(column, oldest, 0)
            scale[i] = saved["scale"] * (slot.fmt.max / 2.0**slot.margin / saved["target"])
            amax[i], slot.cold = saved["amax"], bool(saved["cold"])
            slot.recorded = slot.cold  # perhaps: the next update looks
        self._reduced = None
        self.history.copy_(columns)
        self.scale.copy_(scale)
        self.amax.copy_(amax)
