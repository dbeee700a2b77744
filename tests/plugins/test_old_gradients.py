"""Gradients of the last step are zeroed before a forward pass that would overwrite them, where nobody can tell."""

import pytest
import torch
from lightning.pytorch.callbacks import Callback

from nemo_lowprec.compute.computation import Computation
from tests.support import CASES, Net, loader, plugin, trainer


class Seeing(Net):
    def __init__(self):
        super().__init__()
        self.seen = []

    def training_step(self, batch, index):
        self.seen.append(any(p.grad is not None for p in self.parameters()))
        return super().training_step(batch, index)


class OwnZeroing(Seeing):
    def optimizer_zero_grad(self, epoch, index, optimizer):
        optimizer.zero_grad()


class Reading(Seeing):
    def on_before_zero_grad(self, optimizer):
        pass


class ByHand(Seeing):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, index):
        loss = super().training_step(batch, index)
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()


class Reader(Callback):
    def on_before_zero_grad(self, trainer, module, optimizer):
        pass


def fit(monkeypatch, case, overwrites, kind=Seeing, *callbacks, accumulate=1):
    monkeypatch.setattr(Computation, "overwrites_gradients", overwrites)  # as with graphs, which a CPU has not
    module = kind()
    trainer(plugin(case), *callbacks, max_steps=3, accumulate_grad_batches=accumulate).fit(module, loader(2, 12))
    return module


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_they_are_zeroed_before_the_forward_pass(monkeypatch, case, accumulate):
    kept, zeroed = (fit(monkeypatch, case, overwrites, accumulate=accumulate) for overwrites in (False, True))
    assert kept.seen == [False] + [True] * (3 * accumulate - 1)
    assert zeroed.seen == ([False] + [True] * (accumulate - 1)) * 3
    assert zeroed.losses == kept.losses
    for a, b in zip(kept.parameters(), zeroed.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("kind, callbacks", [(OwnZeroing, ()), (Reading, ()), (ByHand, ()), (Seeing, (Reader(),))])
def test_they_stay_where_somebody_may_read_them(monkeypatch, kind, callbacks):
    assert fit(monkeypatch, "bf16_mixed", True, kind, *callbacks).seen == [False, True, True]
