"""MLPs of two layers: recognised by what they compute, the bits of their modules one by one, and FP8 alone inside."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import CLIPVisionConfig
from transformers.activations import ACT2FN
from transformers.models.clip.modeling_clip import CLIPMLP

from nemo_lowprec.compute import revert_layers
from nemo_lowprec.compute.patterns.mlp import LowPrecisionMLP, MLPs
from tests.attention_models import convert_without
from tests.compute.test_activations import Counting, assert_equal

HALF = torch.bfloat16


class Mlp(nn.Module):
    """timm's ``Mlp``, with its options."""

    def __init__(self, act=nn.GELU, drop=0.0, norm=nn.Identity, bias=True):
        super().__init__()
        self.fc1, self.act, self.drop1 = nn.Linear(32, 64, bias), act(), nn.Dropout(drop)
        self.norm, self.fc2, self.drop2 = norm(), nn.Linear(64, 32, bias), nn.Dropout(drop)

    def forward(self, x):
        return self.drop2(self.fc2(self.norm(self.drop1(self.act(self.fc1(x))))))


class Halved(Mlp):
    def forward(self, x):
        return super().forward(x) * 0.5


class Twice(Mlp):
    """The first layer's result is read twice."""

    def forward(self, x):
        hidden = self.fc1(x)
        return self.fc2(self.act(hidden)) + 0.1 * hidden[..., :32]


class Noisy(Mlp):
    def forward(self, x):
        return super().forward(F.dropout(x, 0.1, self.training))


MODULES = {
    "timm": Mlp,
    "timm, no bias": lambda: Mlp(bias=False),
    "silu": lambda: Mlp(nn.SiLU),
    "dropout": lambda: Mlp(drop=0.25),
    "sequential": lambda: nn.Sequential(nn.Linear(32, 64), nn.GELU("tanh"), nn.Linear(64, 32)),
    "transformers": lambda: nn.Sequential(nn.Linear(32, 64), ACT2FN["gelu"], nn.Dropout(0.0), nn.Linear(64, 32)),
    "clip": lambda: CLIPMLP(CLIPVisionConfig(hidden_size=32, intermediate_size=64, num_attention_heads=2)),
}
OTHERS = {
    "norm": lambda: Mlp(norm=lambda: nn.LayerNorm(64)),
    "halved": Halved,
    "twice": Twice,
    "noisy": Noisy,
    "tanh": lambda: Mlp(nn.Tanh),
}


class Run:
    """A model of two blocks with residuals in a loop of its own."""

    def __init__(self, make, fused, change=lambda model: None):
        torch.manual_seed(0)
        self.model = nn.ModuleList([make(), make()])
        change(self.model)
        self.result, self.histories = convert_without(None if fused else MLPs, self.model, HALF)
        self.backend = Counting()
        for module in self.model.modules():
            if hasattr(module, "gemm_plan"):
                module.gemm_plan.backend = self.backend
            if hasattr(module, "activation_backend"):
                module.activation_backend = self.backend
        self.seen, self.optimizer = [], torch.optim.SGD(self.model.parameters(), lr=0.02)

    def step(self, seed=0):
        torch.manual_seed(seed)
        x = (torch.randn(4, 8, 32) * 2).requires_grad_()
        with torch.autocast("cpu", HALF):
            hidden = x
            for block in self.model:
                hidden = hidden + block(hidden)
        hidden.float().pow(2).mean().backward()
        self.seen += [hidden.detach(), x.grad, *(p.grad.clone() for p in self.model.parameters())]
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.histories.update()


def runs_of(make, change=lambda model: None, steps=4):
    runs = [Run(make, fused, change) for fused in (True, False)]
    for run in runs:
        for seed in range(steps):
            run.step(seed)
    assert_equal(runs[0].seen, runs[1].seen)
    return runs


@pytest.mark.parametrize("name", MODULES)
def test_an_mlp_trains_to_the_same_bits(name):
    fused, plain = runs_of(MODULES[name])
    assert fused.result.fused == dict.fromkeys(("0", "1"), "MLP") and not plain.result.fused
    assert all(isinstance(block, LowPrecisionMLP) for block in fused.model)
    assert (fused.backend.forward, fused.backend.backward) == (plain.backend.forward, plain.backend.backward)
    handed = fused.backend.forward + fused.backend.backward
    assert fused.backend.absent == (0 if name == "dropout" else handed) and handed
    assert not plain.backend.absent


@pytest.mark.parametrize("name", OTHERS)
def test_look_alikes_are_left_alone(name):
    fused, _ = runs_of(OTHERS[name])
    assert not fused.result.fused and not any(isinstance(m, LowPrecisionMLP) for m in fused.model)


def eval_of_dropout(model):
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.eval()


@pytest.mark.parametrize("seen", ["the layer", "its gradient", "dropout", "an activation"])
def test_who_looks_inside_finds_the_values(seen):
    found = []

    def change(model):
        found.clear()
        block = model[0]
        if seen == "the layer":
            block.fc2.register_forward_pre_hook(lambda _, args: found.append(args[0].isfinite().all()))
        elif seen == "its gradient":
            block.fc1.register_full_backward_hook(lambda _, __, grads: found.append(grads[0].isfinite().all()))
        elif seen == "dropout":
            block.drop1.register_forward_hook(lambda _, args, out: found.append(out.isfinite().all()))
        else:
            block.act.register_forward_hook(lambda _, args, out: found.append(out.isfinite().all()))

    fused, _ = runs_of(Mlp, change)
    assert found and all(found)
    assert fused.backend.absent  # of the other block


def test_dropout_that_is_turned_on_later_drops():
    run = Run(Mlp, True)
    run.step()
    before = run.backend.absent
    run.model[0].drop1.p = run.model[1].drop1.p = 0.5
    run.step(1)
    assert run.backend.absent == before
    run.model.eval()
    with torch.no_grad():
        x = torch.randn(4, 8, 32)
        assert torch.equal(run.model[0](x), run.model[0](x))


def test_reverting_copies_and_pickles():
    run = Run(Mlp, True)
    run.step()
    twin = copy.deepcopy(run.model)
    again = pickle.loads(pickle.dumps(run.model))
    x = torch.randn(4, 8, 32).to(HALF)
    for one in (twin, again):
        assert type(one[0]) is type(run.model[0])
        one[0](x).float().sum().backward()
        assert one[0].fc1.weight.grad.isfinite().all()
        revert_layers(one)
        assert type(one[0]) is Mlp and type(one[0].act) is nn.GELU


def test_an_mlp_is_named_in_skip():
    torch.manual_seed(0)
    model = nn.ModuleList([Mlp(), Mlp()])
    result, _ = convert_without(None, model, HALF, skip=["1"])
    assert list(result.fused) == ["0"] and type(model[1]) is Mlp
