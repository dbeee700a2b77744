"""Layers whose weight is computed in every forward pass train at every level: the older hooks and parametrizations."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from support import CASES, Net, Samples, loader, plugin, train
from torch import nn
from torch.nn.utils import parametrizations, parametrize

import nemo_lowprec


def old_weight_norm(layer):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return nn.utils.weight_norm(layer)


KINDS = {
    "spectral_norm": parametrizations.spectral_norm,
    "weight_norm": parametrizations.weight_norm,
    "old spectral_norm": nn.utils.spectral_norm,
    "old weight_norm": old_weight_norm,
}


class Computed(Net):
    def __init__(self, kind):
        super().__init__(optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2))
        self.first = KINDS[kind](nn.Linear(32, 32))
        self.conv = KINDS[kind](nn.Conv1d(4, 4, 3, padding=1))

    def forward(self, x):
        return super().forward(self.conv(self.first(x).view(-1, 4, 8)).flatten(1))


def updates(model, start):
    moved = {n: p.detach().float() - start[n] for n, p in model.named_parameters() if n.startswith(("first", "conv"))}
    assert all(m.abs().max() > 1e-3 for m in moved.values()), moved
    return torch.cat([m.flatten() for m in moved.values()])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", CASES)
def test_fit_and_validation(case, kind):
    models = [Computed(kind) for _ in range(2)]
    start = {n: p.detach().clone() for n, p in models[0].named_parameters()}
    for model, precision in zip(models, (plugin(case), None), strict=True):
        train(model, precision, data=(loader(), loader()), max_steps=4, max_epochs=-1, val_check_interval=2)
    assert models[0].losses == pytest.approx(models[1].losses, rel=0.03)
    assert F.cosine_similarity(*(updates(m, start) for m in models), dim=0) > 0.7


class Counting(nn.Module):
    """A parametrization with a state, as spectral_norm has one: counts how often the weight is computed."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def forward(self, weight):
        self.count += 1
        return weight * 1.0


class Everywhere(Net):
    """Computed weights of layers of all kinds, each in a layer that takes [batch, 32]."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.table, self.attention = nn.Embedding(4, 32), nn.MultiheadAttention(32, 4)
        self.layers = nn.ModuleList([nn.Linear(32, 32), nn.LayerNorm(32), nn.RMSNorm(32)])
        self.counts = {}
        names = [(self.table, "weight"), (self.attention, "in_proj_weight"), *((m, "weight") for m in self.layers)]
        for module, name in names:
            self.counts[type(module).__name__] = counting = Counting()
            parametrize.register_parametrization(module, name, counting)
            counting.count = 0

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        x = x + self.table.weight.sum(0)
        return super().forward(self.attention(x, x, x)[0])


def counts_of(case):
    model = Everywhere()
    train(model, case, data=(loader(), loader()), max_steps=4)
    return {name: counting.count for name, counting in model.counts.items()}


@pytest.mark.parametrize("case", CASES)
def test_nothing_but_the_model_computes_a_weight(case):
    assert counts_of(case) == counts_of(None)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_a_plain_loop(level, kind):
    model, samples = Computed(kind), Samples()
    start = {n: p.detach().clone() for n, p in model.named_parameters()}
    model, optimizer = nemo_lowprec.initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-2), opt_level=level)
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(samples.x), samples.y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    updates(model, start)
    assert losses[-1] < losses[0]
