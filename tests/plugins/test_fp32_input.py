"""Norms and other layers that no level converts take FP32 input in training and in evaluation, at every level."""

import pytest
import torch
from support import CASES, Net, loader, plugin, train, trainer
from torch import nn

LAYERS = {
    "LayerNorm": lambda: nn.LayerNorm(32),
    "LayerNorm without bias": lambda: nn.LayerNorm(32, bias=False),
    "RMSNorm": lambda: nn.RMSNorm(32),
    "GroupNorm": lambda: nn.GroupNorm(4, 32),
    "InstanceNorm": lambda: nn.InstanceNorm1d(8, affine=True),
    "InstanceNorm with statistics": lambda: nn.InstanceNorm1d(8, affine=True, track_running_stats=True),
    "BatchNorm": lambda: nn.BatchNorm1d(32),
    "BatchNorm without statistics": lambda: nn.BatchNorm1d(32, track_running_stats=False),
    "Conv1d": lambda: nn.Conv1d(8, 8, 3, padding=1),
    "Bilinear": lambda: nn.Bilinear(32, 32, 32),
    "EmbeddingBag": lambda: nn.EmbeddingBag(8, 32, mode="sum"),
    "PReLU": lambda: nn.PReLU(32),
}


class First(nn.Module):
    """A layer that reads the data themselves, 8 channels of 4 where it wants channels."""

    def __init__(self, name):
        super().__init__()
        torch.manual_seed(1)
        self.first = LAYERS[name]()

    def forward(self, x):
        if isinstance(self.first, nn.EmbeddingBag):
            return self.first(torch.arange(8).repeat(len(x), 1), per_sample_weights=x[:, :8])
        if isinstance(self.first, nn.Bilinear):
            return self.first(x, x)
        if isinstance(self.first, nn.InstanceNorm1d | nn.Conv1d):
            return self.first(x.view(-1, 8, 4)).flatten(1)
        return self.first(x)


class Model(Net):
    def __init__(self, name):
        super().__init__()
        self.first = First(name)
        self.seen = []

    def forward(self, x):
        h = self.first(x)
        if not self.training:
            self.seen.append(h.detach().float())
        return super().forward(h)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("case", CASES)
def test_fit_and_validation(case, name):
    model, plain = Model(name), Model(name).eval()
    trainer(plugin(case)).validate(model, loader(), verbose=False)
    got = model.seen[0]
    want = plain.first(loader().dataset.x[:4])
    torch.testing.assert_close(got, want.detach(), rtol=0.02, atol=0.05)
    before = {n: p.detach().clone() for n, p in model.first.named_parameters()}
    train(model, case, max_steps=1)
    assert all(not torch.equal(p, before[n]) for n, p in model.first.named_parameters())
