"""Parameters that modules read by themselves: which of them compiled graphs read, and that no write to one is lost."""

import copy
import io
import os
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from nemo_lowprec import prepare
from nemo_lowprec.compute import revert_layers
from nemo_lowprec.compute.written import may_write

pytestmark = pytest.mark.usefixtures("fresh_compiler")

LEVELS = ["bf16_with_fp8_mixed", "msamp_o2"]


class Scaled(nn.Module):
    """Has a parameter that forward reads."""

    def __init__(self):
        super().__init__()
        self.gamma = nn.Parameter(torch.linspace(0.5, 1.5, 32))

    def forward(self, x):
        return x * self.gamma


class Gained(nn.Module):
    """Has a parameter without dimensions that forward reads."""

    def __init__(self):
        super().__init__()
        self.gamma = nn.Parameter(torch.tensor(1.5))

    def forward(self, x):
        return x * self.gamma


class Clamped(Scaled):
    """Has a parameter that forward writes."""

    def forward(self, x):
        self.gamma.data.clamp_(max=1.0)
        return x * self.gamma


class Table(nn.Embedding):
    """An embedding that writes the rows it looks up."""

    def __init__(self):
        torch.manual_seed(0)
        super().__init__(8, 32, max_norm=0.5)

    def forward(self, x):
        return super().forward(torch.arange(4, device=x.device)) + x


def prepared(module, level="msamp_o2"):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), module, nn.Linear(32, 32))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return prepare(model, optimizer, level, backend="reference")


def trained(module, level, compiled, steps=3):
    model, optimizer = prepared(module, level)
    if compiled:
        model[1].compile(backend="aot_eager")
    losses = []
    for i in range(steps):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(torch.randn(4, 32, generator=torch.Generator().manual_seed(i))).float().pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize(
    ("make", "level"),
    [*((make, level) for make in (Scaled, Gained, Table) for level in LEVELS), (Clamped, "msamp_o2")],
)
def test_what_forward_writes_is_kept(make, level):
    (losses, weights), (others, compiled) = trained(make(), level, False), trained(make(), level, True)
    assert losses == others
    assert all(torch.equal(one, two) for one, two in zip(weights, compiled, strict=True))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("make", [Scaled, Gained])
def test_a_parameter_that_is_only_read_is_in_the_graph(make, level):
    model, _ = prepared(make(), level)
    graph = torch.compile(model[1], backend="aot_eager", fullgraph=True)
    x = torch.randn(4, 32)
    assert torch.equal(graph(x), model[1](x))


@pytest.mark.parametrize("again", [copy.deepcopy, "saved"])
def test_copies_read_their_own_parameters(again):
    model, _ = prepared(Scaled())
    if again == "saved":
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        other = torch.load(file, weights_only=False)
    else:
        other = again(model)
    assert isinstance(other[1], Scaled)
    with torch.no_grad():
        model[1].gamma.zero_()
    x = torch.ones(2, 32)
    assert torch.equal(torch.compile(other[1], backend="aot_eager", fullgraph=True)(x), x * other[1].gamma)
    assert model[1](x).abs().max() == 0 < other[1](x).abs().max()


def test_modules_behave_as_their_own_class():
    model, _ = prepared(Scaled())
    module = model[1]
    assert isinstance(module, Scaled) and repr(module) == "Scaled()"
    del module.gamma
    assert not hasattr(module, "gamma")
    module.gamma = nn.Parameter(torch.ones(32))
    assert torch.equal(module(torch.ones(32)), torch.ones(32))
    revert_layers(model)
    assert type(module) is Scaled and "gamma" in dict(module.named_parameters())


def test_a_parametrized_parameter_goes_on_being_computed():
    model, _ = prepared(Scaled())
    torch.nn.utils.parametrize.register_parametrization(model[1], "gamma", nn.Softplus(), unsafe=True)
    x = torch.ones(32)
    assert torch.equal(model[1](x), x * nn.functional.softplus(model[1].parametrizations.gamma.original))


def _renormalize(weight):
    weight.data.clamp_(0)


def _double(weight):
    weight = weight * 2
    return weight if weight.sum() > 8 else _double(weight)


_IMPORTS = """import os
import torch
import torch.nn.functional as F
from torch import nn


def _renormalize(w):
    w.data.clamp_(0)


def _double(w):
    return w if w.sum() > 8 else _double(w.view(-1))


"""


class Methods:
    """Methods by what they do with ``self.w``."""

    def reads(self, x):
        x = x + self.w
        x += self.w.view(-1)[None].expand(2, -1)
        x.clamp_(0)
        self.other = x
        from math import dist

        dist(self.w, x)
        return F.linear(x.mul_(self.w), self.w) + len(self.w) + self.layer(self.w) + _double(self.w)

    def replaces(self):
        self.w = nn.Parameter(torch.ones(2))

    def reset_parameters(self):
        nn.init.zeros_(self.w)

    def writes(self):
        self.w.clamp_(0)

    def set_size(self):
        self.w.data.clamp_(0)

    def writes_data(self):
        self.w.data[0] = 1

    def writes_a_view(self):
        rows = self.w[:2].view(-1)
        for row in rows:
            row.mul_(2)

    def writes_in_a_list(self):
        return [row.mul_(2) for row in self.w.unbind()]

    def writes_by_a_function(self):
        nn.init.zeros_(self.w)

    def writes_as_a_result(self, x):
        torch.add(x, 1, out=self.w)

    def writes_by_a_function_of_its_own(self):
        _renormalize(self.w)

    def writes_by_a_method(self):
        self.helper(self.w)

    def writes_by_another_package(self):
        os.helper(self.w.view(-1))

    def writes_by_an_imported_package(self):
        import os

        os.helper(self.w)

    def adds(self):
        part = self.w if self.training else self.w[:1]
        part += 1

    def keeps(self):
        self.kept = self.w


@pytest.mark.parametrize("name", [name for name in vars(Methods) if not name.startswith("__")])
def test_code_that_writes_a_parameter_is_found(name, tmp_path, monkeypatch):
    import inspect
    import textwrap

    method = textwrap.indent(textwrap.dedent(inspect.getsource(getattr(Methods, name))), "    ")
    (tmp_path / f"module_that_{name}.py").write_text(f"{_IMPORTS}class M(nn.Module):\n    helper = print\n{method}")
    monkeypatch.syspath_prepend(tmp_path)
    cls = __import__(f"module_that_{name}").M
    assert may_write(cls, "w") == (name not in ("reads", "replaces", "reset_parameters", "set_size"))


def test_code_without_a_source_may_write():
    space = {"nn": nn}
    exec("class M(nn.Module):\n    def forward(self, x):\n        return x + self.w", space)
    assert may_write(space["M"], "w") and not may_write(nn.Conv2d, "weight")


def test_modules_are_traced_by_jit():
    model, _ = prepared(Scaled())
    x = torch.randn(4, 32)
    with torch.no_grad():
        traced = torch.jit.trace(model[1], x)
    torch.testing.assert_close(traced(x), model[1](x))


def test_classes_are_found_again_and_parameters_replaced():
    model, _ = prepared(Scaled())
    x = torch.randn(4, 32)
    again = pickle.loads(pickle.dumps(type(model[1])))
    assert again is type(model[1])
    assert torch.equal(torch.func.functional_call(model[1], {"gamma": torch.ones(32)}, (x,)), x)
