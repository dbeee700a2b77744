"""One implementation of each column at work on one model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer

from nemo_lowprec.column import Column
from nemo_lowprec.comm import Averaging
from nemo_lowprec.compute import AmaxState, Computation
from nemo_lowprec.optim import OptimizerStates
from nemo_lowprec.weights import WeightStore


@dataclass
class Columns:
    """One implementation of each column; ``build`` chooses them, and nothing else reads the row.

    Attributes:
        computation: GEMMs.
        weights: Weight and Master weight.
        gradients: Weight gradient.
        states: Optimizer states.
        comm: Comm.
    """

    computation: Computation
    weights: WeightStore
    gradients: Column
    states: OptimizerStates
    comm: Averaging

    def __iter__(self) -> Iterator[Column]:
        # In the order in which they are installed; ``remove`` goes the other way.
        return iter((self.computation, self.weights, self.states, self.gradients, self.comm))

    @property
    def amaxes(self) -> Sequence[AmaxState]:
        """Of the operands of FP8 GEMMs."""
        return self.computation.amaxes

    @property
    def releases(self) -> bool:
        """Whether parameters step in backward, before anything is known about the gradients of all."""
        return self.states.releases

    def evaluating(self, optimizer: Optimizer, closure: Callable[[], Any]) -> Callable[[], Any]:
        """``closure`` for the middle of a step, where it sees the weights of that moment each time."""

        def evaluate() -> Any:
            with self.weights.evaluating(optimizer):
                for one in self.amaxes:
                    one.forget_weights()
                return closure()

        return evaluate
