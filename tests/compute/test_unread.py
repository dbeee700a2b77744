"""Linear layers whose weights are read by the module that holds them: the tables say so, and others are converted."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from alike import Alike, fit
from support import CASES, level_of
from torch import nn
from torch_modules import AttentionPool

from nemo_lowprec.compute.unread import doubtful, unread


class Branches(nn.Module):
    """Calls ``layer`` and reads its weight, as Jamba does, which calls it on one of two ways."""

    def __init__(self, calls):
        super().__init__()
        self.layer, self.other = nn.Linear(32, 32), nn.Linear(32, 32)
        self.calls = calls

    def forward(self, x):
        h = torch.tanh(self.layer(x)) if self.calls else torch.tanh(x @ self.layer.weight.t() + self.layer.bias)
        return self.other(h)


class Aside(nn.Module):
    """Reads what a weight is, and not its values, as T5 does."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(32, 32)

    def forward(self, x):
        return self.layer(x.to(self.layer.weight.dtype)) * self.layer.weight.shape[0] ** -0.5


class ByName(nn.Module):
    """Finds its layers by name."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x):
        for name in ("first", "second"):
            x = getattr(self, name)(x)
        return x + self.first.weight.sum()


class Tied(nn.Linear):
    """A layer that reads its own weight."""

    def forward(self, x):
        return F.linear(x, self.weight, self.bias)


class Inherits(AttentionPool):
    def forward(self, x):
        return self.c_proj(super().forward(x))


def names(found, model):
    return {name: found[id(module)] for name, module in model.named_modules() if id(module) in found}


def test_layers_that_are_never_called_are_found_in_the_source():
    reason = "AttentionPool reads its weight without calling it"
    pool = AttentionPool()
    assert names(unread(pool), pool) == dict.fromkeys(["q_proj", "k_proj", "v_proj", "c_proj"], reason)
    for model in (Branches(True), Aside(), ByName(), Tied(32, 32)):
        assert not unread(model)
    inherits = Inherits()
    assert set(names(unread(inherits), inherits)) == {"q_proj", "k_proj", "v_proj"}


def test_layers_that_may_be_called_wait_for_the_first_step():
    model = Branches(True)
    assert names(doubtful(model), model) == {"layer": "Branches"}
    assert not doubtful(Aside()) and not doubtful(Tied(32, 32))
    model = Inherits()
    assert "c_proj" in names(doubtful(model), model)


@pytest.mark.parametrize("calls", [True, False])
@pytest.mark.parametrize("case", [case for case in CASES if level_of(case).has_fp8])
def test_the_first_step_says_which_layers_nobody_has_called(case, calls):
    x = torch.randn(8, 32, generator=torch.Generator().manual_seed(3))
    model = Alike(lambda: Branches(calls), lambda m, batch: m(batch).float().square().mean(), 1e-3)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        fit(model, case, x)
    said = [str(each.message) for each in found if "without calling" in str(each.message)]
    level = level_of(case).name
    if calls:
        assert not said and not model.conversion.left and "model.layer" in model.called
        return
    assert model.called == {"model.other"}
    assert model.conversion.left == {"model.layer": "Branches reads its weight without calling it"}
    assert said == [
        f"{level}: 1 of the converted layers compute in half precision, as Branches reads their weights without "
        "calling them: model.layer."
    ]
    assert [group.names for group in model.groups if group.fate.kind == "left"] == [["model.layer"]]
