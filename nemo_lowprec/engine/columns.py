"""The chosen implementation of each column, for one model."""

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
    """The implementations that ``build`` has chosen for one model.

    Attributes:
        computation: column Computation (GEMM).
        weights: columns Weight and Master weight.
        gradients: column Weight gradient.
        states: column Optimizer states.
        comm: column Comm.
    """

    computation: Computation
    weights: WeightStore
    gradients: Column
    states: OptimizerStates
    comm: Averaging

    def __iter__(self) -> Iterator[Column]:
        # In the order of ``install``; ``remove`` is called in the reverse order.
        return iter((self.computation, self.weights, self.states, self.gradients, self.comm))

    @property
    def amaxes(self) -> Sequence[AmaxState]:
        """The amaxes of the operands of FP8 GEMMs: of converted layers, and of Transformer Engine's own layers."""
        return self.computation.amaxes

    def evaluating(self, optimizer: Optimizer, closure: Callable[[], Any]) -> Callable[[], Any]:
        """``closure``, made to evaluate the loss with the weights of the moment at which the optimizer calls it."""

        def evaluate() -> Any:
            with self.weights.evaluating(optimizer):
                for amaxes in self.amaxes:
                    amaxes.forget_weights()
                return closure()

        return evaluate
