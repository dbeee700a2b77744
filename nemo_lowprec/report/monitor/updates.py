"""The errors of rounding in the updates of parameters, in their weights and in their optimizer states.

The numbers are those of a sample of each parameter (``sampled.py``), before and after one step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from nemo_lowprec.optim.low_bit import LowBitStates
from nemo_lowprec.optim.reference import Update, step_by_reference
from nemo_lowprec.report.monitor.sampled import Sampler
from nemo_lowprec.tensors.dtensor import local_shard
from nemo_lowprec.weights import master_of

# Columns of the sums, FP64. ``unchanged`` of ``updated`` elements have kept their value; the others are squares.
SUMS = (
    "updated", "unchanged", "weight_signal", "weight_noise", "first_signal", "first_noise", "second_signal",
    "second_noise",
)  # fmt: skip
_MASTER = "master_weight"  # in the state of an optimizer that keeps masters itself


class UpdateErrors:
    """Adds up the errors of one step.

    Args:
        params: all parameters of the optimizers, a row each; None for a parameter that another process has.
        device: of the parameters.

    Attributes:
        sums: FP64 [rows, len(SUMS)].
    """

    def __init__(self, params: Sequence[Tensor | None], device: torch.device) -> None:
        self._row = {id(param): i for i, param in enumerate(params) if param is not None}
        self._rows: dict[tuple[int, ...], Tensor] = {}
        self.sums = torch.zeros(len(params), len(SUMS), dtype=torch.float64, device=device)
        self._device = device
        self._samplers: dict[tuple[torch.Size, ...], Sampler] = {}
        self._open: list[_Step] = []

    def clear(self) -> None:
        """Forget the sums and a step that was not finished."""
        self.sums.zero_()
        self._open = []

    @torch.no_grad()
    def before(self, optimizer: Optimizer, grad_scale: Tensor | None) -> None:
        """Read the parameters that ``optimizer`` is about to update.

        Args:
            grad_scale: by what the gradients are still to be divided, FP32 scalar; None for nothing.
        """
        for group in optimizer.param_groups:
            params = [p for p in group["params"] if p.grad is not None and p in optimizer.state and id(p) in self._row]
            if params:
                self._open.append(_Step(optimizer, group, params, self._sampler(params), grad_scale))

    def _sampler(self, params: list[Any]) -> Sampler:
        shapes = tuple(local_shard(p).shape for p in params)
        if shapes not in self._samplers:
            self._samplers[shapes] = Sampler(shapes, self._device)
        return self._samplers[shapes]

    @torch.no_grad()
    def after(self) -> None:
        """Read the parameters again, which are updated, and add the errors up."""
        for step in self._open:
            rows = tuple(self._row[id(param)] for param in step.params)
            if rows not in self._rows:
                self._rows[rows] = torch.tensor(rows, dtype=torch.int64).to(self._device)
            self.sums.index_add_(0, self._rows[rows], step.end())
        self._open = []


class _Step:
    """One step of the parameters of a group that have a gradient, and had one in an earlier step."""

    def __init__(
        self,
        optimizer: Optimizer,
        group: dict[str, Any],
        params: list[Any],
        sampler: Sampler,
        grad_scale: Tensor | None,
    ) -> None:
        self.params, self._sampler, self._state = params, sampler, optimizer.state
        self._gradients = self._read([p.grad for p in params], "gradients")
        self._before = self._read(self._updated(), "updated")
        self._exact: list[Tensor | None] = [None, None]
        if isinstance(optimizer, LowBitStates):
            self._names = optimizer.moments(group)
            self._exact = self._moments_by_reference(optimizer, group, grad_scale)

    def _read(self, tensors: Sequence[Any], role: str) -> Tensor:
        return self._sampler.read([None if t is None else local_shard(t) for t in tensors], role)

    def _updated(self) -> list[Any]:
        """The tensors to which the optimizer adds its updates: masters, or weights without a master."""
        found = []
        for param in self.params:
            master = master_of(param)
            master = self._state[param].get(_MASTER) if master is None else master
            found.append(param if master is None else master)
        return found

    def _moments(self, index: int) -> Tensor:
        name = self._names[index]
        return self._read([self._state[param].get(name) for param in self.params], name)

    def _moments_by_reference(
        self, optimizer: LowBitStates, group: dict[str, Any], grad_scale: Tensor | None
    ) -> list[Tensor | None]:
        """The moments after the step before they are rounded; None for moments that the rule does not have."""
        exact = [self._moments(i) if i < len(self._names) else None for i in range(2)]
        inputs = replace(optimizer._inputs(group, grad_scale), stochastic=False)
        # The count of steps is in no moment but the first step's.
        count = torch.ones((), dtype=torch.float32)
        update = Update(self._before.clone(), self._gradients, count, exact[0], exact[1], None, 0)
        step_by_reference([update], inputs)
        return exact

    def end(self) -> Tensor:
        """The sums of the step, FP64 [parameters, len(SUMS)]."""
        targets = self._updated()
        after = self._read(targets, "updated")
        updated = self._gradients != 0
        columns = [updated.sum(1), (updated & (after == self._before)).sum(1)]
        apart = any(target is not param for target, param in zip(targets, self.params, strict=True))
        pairs = [(after, self._read(self.params, "weights") if apart else after)]
        for index, exact in enumerate(self._exact):
            pairs.append((after, after) if exact is None else (exact, self._moments(index)))
        for values, stored in pairs:  # the same tensor twice where nothing is rounded
            columns += [values.square().sum(1), (values - stored).square().sum(1)]
        return torch.stack([column.double() for column in columns], dim=1)
