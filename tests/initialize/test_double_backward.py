"""Losses on gradients in a plain loop at the MS-AMP levels, whose weights' gradients are stored in FP8."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn

import nemo_lowprec
from nemo_lowprec.tensors import GradientTensor

LEVELS = ["O1", "O2", "O3"]
AT_LEVELS = pytest.mark.parametrize("level", LEVELS)


class Energy(nn.Module):
    """A scalar of each input [3], with hidden layers that read one tensor together."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.inp = nn.Linear(3, 64)
        self.gate, self.up = nn.Linear(64, 64), nn.Linear(64, 64, bias=False)
        self.norm = nn.LayerNorm(64)
        self.head = nn.Linear(64, 1)

    def forward(self, x):
        h = torch.tanh(self.inp(x))
        return self.head(self.norm(h + torch.sigmoid(self.gate(h)) * self.up(h))).squeeze(-1)


def train(level, half, steps=40):
    """Losses of a loop that fits forces, minus the energy's gradient, to those of a spring."""
    model = Energy()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    if level:
        model, optimizer = nemo_lowprec.initialize(model, optimizer, opt_level=level)
    generator, losses = torch.Generator().manual_seed(2), []
    for _ in range(steps):
        x = torch.randn(32, 3, generator=generator).requires_grad_()
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=half) if half else nullcontext():
            (gradient,) = torch.autograd.grad(model(x).float().sum(), x, create_graph=True)
            loss = (-gradient + x.detach()).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert not level or isinstance(model.gate.weight.grad, GradientTensor)
    return torch.tensor(losses)


@pytest.mark.parametrize("half", [None, torch.bfloat16])
@AT_LEVELS
def test_forces_are_learned_as_in_fp32(level, half):
    losses, want = train(level, half), train(None, None)
    assert losses[0] == pytest.approx(float(want[0]), rel=0.03)
    assert losses[-10:].mean() < 0.3 * losses[0]
    assert abs(losses[-10:].mean() - want[-10:].mean()) < 0.1 * want[0]


def penalized(level):
    """Gradients of a loss on ``p.grad``, which ``backward(create_graph=True)`` has left there, and the optimizer."""
    model = Energy()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if level:
        model, optimizer = nemo_lowprec.initialize(model, optimizer, opt_level=level)
    x = torch.randn(32, 3, generator=torch.Generator().manual_seed(2))
    model(x).square().mean().backward(create_graph=True)
    first = {n: p.grad for n, p in model.named_parameters()}
    assert all(type(g) is torch.Tensor and g.grad_fn is not None for g in first.values())
    model.zero_grad()
    sum(g.square().sum() for g in first.values()).backward()
    return model, optimizer


@AT_LEVELS
def test_a_loss_on_the_gradients_that_backward_leaves(level):
    (model, optimizer), (plain, _) = penalized(level), penalized(None)
    for (name, param), want in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert isinstance(param.grad, GradientTensor) == (param.dim() > 1)
        error = (param.grad.float() - want.grad).norm() / want.grad.norm()
        assert error < 0.2, (name, error)
    before = model.gate.weight.detach().float().clone()
    optimizer.step()
    assert not torch.equal(model.gate.weight.detach().float(), before)


@AT_LEVELS
def test_a_step_on_gradients_that_are_part_of_a_graph(level):
    model = Energy()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = nemo_lowprec.initialize(model, optimizer, opt_level=level)
    before = [p.detach().float().clone() for p in model.parameters()]
    model(torch.ones(2, 3)).square().sum().backward(create_graph=True)
    optimizer.step()
    for param, old in zip(model.parameters(), before, strict=True):
        moved = (param.detach().float() - old).abs().max()
        assert 5e-4 < moved < 2e-2  # FP8 weights are far apart


def test_gradient_release_refuses_gradients_that_are_part_of_a_graph():
    model = Energy()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = nemo_lowprec.initialize(model, optimizer, opt_level="O2", gradient_release=True)
    with pytest.raises(RuntimeError, match="create_graph"):
        model(torch.ones(2, 3)).sum().backward(create_graph=True)
