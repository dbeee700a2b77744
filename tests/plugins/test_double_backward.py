"""Losses on gradients (penalties, forces): their own gradients are FP32's, within the tolerance of the level."""

import pytest
import torch
import torch.nn.functional as F
from support import CASES, FP16_HALF, Net, Samples, level_of, plugin, train
from torch import nn

# Relative error against the FP32 model, as of first derivatives.
BOUND = {"fp16": 0.01, "bf16": 0.03, "fp8": 0.2, "mxfp8": 0.2, "nvfp4": 0.7}


class Critic(Net):
    """Readers of a shared input, norms of both kinds, with and without biases; trained on a loss on its gradients.

    Args:
        loss_on: ``input`` for a penalty on the norm of the input's gradient (WGAN-GP), ``forces`` for targets of the
            input's gradient, ``weights`` for the norm of all parameters' gradients.
        manual: whether optimization is manual.
    """

    def __init__(self, loss_on="input", manual=False):
        super().__init__(optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3))
        self.q, self.k = nn.Linear(128, 128), nn.Linear(128, 128, bias=False)
        self.rms = nn.RMSNorm(128)
        self.loss_on = loss_on
        self.automatic_optimization = not manual

    def middle(self, x):
        x = self.norm(x)
        return self.rms(x + F.gelu(self.mid(torch.sigmoid(self.q(x)) * self.k(x))))

    def loss(self, batch):
        x = batch["x"].clone().requires_grad_()
        out = self(x).float()
        energy = out.square().mean(1)
        if self.loss_on == "weights":
            grads = torch.autograd.grad(energy.mean(), list(self.parameters()), create_graph=True)
            return energy.mean() + sum(g.float().square().sum() for g in grads)
        (grad,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
        if self.loss_on == "forces":
            return F.mse_loss(-grad, batch["x"].flip(0) * 0.1)
        penalty = (grad.norm(dim=1) - 1).square().mean()
        return F.cross_entropy(out, batch["y"]) + 10 * penalty

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if self.automatic_optimization:
            return loss
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return None


def relative_errors(got, want):
    """By parameter; those without a gradient in neither are left out."""
    assert got.keys() == want.keys()
    return {n: float((got[n].float() - want[n]).norm() / want[n].norm()) for n in want if want[n].norm() > 1e-6}


@pytest.mark.parametrize(
    ("loss_on", "manual"), [("input", False), ("input", True), ("forces", False), ("weights", False)]
)
@pytest.mark.parametrize("case", [*CASES, *FP16_HALF])
def test_the_gradient_of_a_loss_on_gradients(case, loss_on, manual):
    plain = Critic(loss_on)
    samples = Samples()
    plain.loss({"x": samples.x[:4], "y": samples.y[:4]}).backward()
    want = {n: p.grad for n, p in plain.named_parameters() if p.grad is not None}
    # With the usual 1024 torch's own FP16 autocast overflows, too: second derivatives are larger.
    options = {"loss_scale": 16.0} if level_of(case).has_loss_scale else {}
    observed = train(Critic(loss_on, manual), plugin(case, **options), max_steps=2)
    errors = relative_errors(observed.grads[0], want)
    assert len(errors) >= 10
    assert max(errors.values()) < BOUND[level_of(case).compute], errors
