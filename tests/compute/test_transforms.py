"""Transforms of torch.func and batched gradients run converted layers in half precision; so does torch.jit.trace."""

import copy
import io
import warnings

import pytest
import torch
import torch.nn.functional as F
from support import CASES, level_of, plugin
from torch import nn
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, stack_module_state, vmap

from nemo_lowprec.tensors import QuantizedTensor

SIMILAR = {"fp16": 0.999, "bf16": 0.999, "fp8": 0.98, "mxfp8": 0.98, "nvfp4": 0.9}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.inp = nn.Linear(32, 64)
        self.norm, self.rms = nn.LayerNorm(64), nn.RMSNorm(64)
        self.q, self.k = nn.Linear(64, 64), nn.Linear(64, 64, bias=False)
        self.head = nn.Linear(64, 16)

    def forward(self, x):
        h = self.norm(torch.tanh(self.inp(x)).float())  # torch's FP16 norm has no batched gradient on a CPU
        return self.head(self.rms(h + torch.tanh(self.q(h)) * self.k(h)))


def converted(case):
    """(model, the level's autocast)."""
    engine, model = plugin(case).engine, Net()
    engine.convert(model, torch.device("cpu"))
    engine.settle()
    return model, torch.autocast("cpu", dtype=engine.half)


def loss_of(model):
    return lambda params, x, y: F.cross_entropy(functional_call(model, params, (x,)).float(), y)


def detached(model):
    return {n: p.detach() for n, p in model.named_parameters()}


def vjps(model, x):
    x = x.clone().requires_grad_()
    return x, model(x).float().sum(0)


def saved_and_loaded(traced):
    file = io.BytesIO()
    torch.jit.save(traced, file)
    file.seek(0)
    return torch.jit.load(file)


TRANSFORMS = {
    "grad": lambda m, x, y: grad(loss_of(m))(detached(m), x, y)["q.weight"],
    "per sample": lambda m, x, y: vmap(grad(loss_of(m)), (None, 0, 0))(detached(m), x[:, None], y[:, None])["k.weight"],
    "jacrev": lambda m, x, y: jacrev(lambda z: m(z).float())(x[:2]),
    "jacfwd": lambda m, x, y: jacfwd(lambda z: m(z).float())(x[:2]),
    "hessian": lambda m, x, y: hessian(lambda z: m(z).float().square().sum())(x[:1]),
    "ensemble": lambda m, x, y: vmap(lambda p: functional_call(m, p, (x,)))(stack_module_state([m, m])[0]),
    "batched gradients": lambda m, x, y: (
        lambda x, out: torch.autograd.grad(out, (x, m.k.weight), torch.eye(16), is_grads_batched=True)[1]
    )(*vjps(m, x)),
    "vmap of autograd.grad": lambda m, x, y: (
        lambda x, out: vmap(lambda v: torch.autograd.grad(out, x, v, retain_graph=True)[0])(torch.eye(16))
    )(*vjps(m, x)),
    "jacobian": lambda m, x, y: torch.autograd.functional.jacobian(
        lambda z: m(z).float().sum(0), x, vectorize=True, create_graph=True
    ),
    "trace": lambda m, x, y: torch.jit.trace(m, (x,), check_trace=False)(x),
    # Weights in low-bit storage are those of a deep copy, in FP32.
    "saved trace": lambda m, x, y: saved_and_loaded(torch.jit.trace(copy.deepcopy(m), (x,), check_trace=False))(x),
}


@pytest.fixture(scope="module")
def batch():
    generator = torch.Generator().manual_seed(3)
    return torch.randn(6, 32, generator=generator), torch.randint(0, 16, (6,), generator=generator)


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("case", CASES)
def test_what_a_transform_returns_is_that_of_the_plain_model(case, name, batch):
    model, autocast = converted(case)
    with autocast:
        got = TRANSFORMS[name](model, *batch)
    want = TRANSFORMS[name](Net(), *batch)
    got, want = got.detach().float(), want.detach()
    assert got.shape == want.shape
    assert F.cosine_similarity(got.flatten(), want.flatten(), dim=0) > SIMILAR[level_of(case).compute]
    assert float(got.norm()) == pytest.approx(float(want.norm()), rel=0.1)


@pytest.mark.parametrize("case", CASES)
def test_a_trace_of_low_bit_weights_tells_how_to_save_it(case, batch):
    model, autocast = converted(case)
    with autocast, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        torch.jit.trace(model, (batch[0],), check_trace=False)
    low_bit = any(isinstance(p, QuantizedTensor) for p in model.parameters())
    assert low_bit == ("msamp" in case or "fp8_params" in case)
    assert low_bit == any("copy.deepcopy(model)" in str(w.message) for w in told)
