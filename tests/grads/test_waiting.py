"""Gradients of small matrices are stored in FP8 together: the same gradients as one by one."""

import pytest
import torch
from low_bit import randn
from torch import nn
from torch.utils.checkpoint import checkpoint

from nemo_lowprec.grads import Fp8Gradients, waiting
from nemo_lowprec.tensors import GradientTensor

DEVICES = [
    "cpu",
    pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]),
]
SIZE = 256  # elements of 128 and more are quantized in one launch on a GPU


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(SIZE, SIZE, bias=i % 2 == 0) for i in range(4))
        self.odd = nn.Linear(SIZE, 40)

    def forward(self, x):
        for layer in (*self.layers, self.layers[0]):  # the first twice
            x = torch.tanh(layer(x))
        return self.odd(x)


def made(device, dtype=torch.float32):
    torch.manual_seed(0)
    model = Net().to(device, dtype)
    for param in model.parameters():
        param.grad_dtype = None  # a stored gradient reads as FP32
    gradients = Fp8Gradients()
    gradients.cover(model.parameters())
    return model, gradients


def backward(model, seed=0):
    weight = next(model.parameters())
    model(randn((16, SIZE), seed).to(weight)).square().mean().backward()


def parts(model):
    return [
        [part.float().cpu() for part in p.grad.parts()]
        for p in model.parameters()
        if p.dim() > 1 and p.grad is not None
    ]


def assert_equal(one, two):
    for mine, others in zip(one, two, strict=True):
        for a, b in zip(mine, others, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("limit", [waiting.LIMIT, 1, 3 * SIZE * SIZE])
def test_the_bits_are_those_of_gradients_that_do_not_wait(device, dtype, limit, monkeypatch):
    monkeypatch.setattr(waiting, "LIMIT", limit)
    found = []
    for small in (waiting.SMALL, 0):
        monkeypatch.setattr(waiting, "SMALL", small)
        model, _ = made(device, dtype)
        for seed in range(3):  # added to each other
            backward(model, seed)
        assert all(isinstance(p.grad, GradientTensor) for p in model.parameters() if p.dim() > 1)
        found.append(parts(model))
    assert_equal(*found)


def kinds_at(model, seen):
    """Note in ``seen``, when backward reaches the first layer, whether the gradient of the last is stored."""

    def note(*_):
        seen.append(type(model.odd.weight.grad))

    model.layers[0].register_full_backward_hook(note)


@pytest.mark.parametrize(("limit", "kind"), [(waiting.LIMIT, torch.Tensor), (1, GradientTensor)])
def test_so_many_wait_and_no_more(limit, kind, monkeypatch):
    monkeypatch.setattr(waiting, "LIMIT", limit)
    model, _ = made("cpu")
    kinds_at(model, seen := [])
    backward(model)
    assert seen[0] is kind and isinstance(model.odd.weight.grad, GradientTensor)


def test_a_large_gradient_does_not_wait(monkeypatch):
    monkeypatch.setattr(waiting, "SMALL", 40 * SIZE * 4 - 1)
    model, _ = made("cpu")
    kinds_at(model, seen := [])
    backward(model)
    assert seen[0] is GradientTensor


def test_another_hook_reads_what_is_stored():
    model, _ = made("cpu")
    seen = []
    model.odd.weight.register_post_accumulate_grad_hook(lambda param: seen.append(type(param.grad)))
    backward(model)
    assert seen == [GradientTensor]


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise RuntimeError("as asked")


@pytest.mark.parametrize("zeroed", [True, False])
def test_after_a_pass_that_failed(zeroed):
    model, gradients = made("cpu")
    with pytest.raises(RuntimeError, match="as asked"):
        model.odd(Failing.apply(randn((16, SIZE), 0).requires_grad_())).sum().backward()
    assert type(model.odd.weight.grad) is torch.Tensor  # it was waiting
    if zeroed:
        model.zero_grad()
    gradients.before_backward()
    assert zeroed or isinstance(model.odd.weight.grad, GradientTensor)
    backward(model)
    if zeroed:
        other, _ = made("cpu")
        backward(other)
        assert_equal(parts(model), parts(other))


def test_a_pass_inside_of_another():
    found = []
    for small in (waiting.SMALL, 0):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(waiting, "SMALL", small)
            model, _ = made("cpu")
            first, *others = model.layers
            x = checkpoint(nn.Sequential(*others), first(randn((16, SIZE), 0)), use_reentrant=True)
            model.odd(x).square().mean().backward()
            found.append(parts(model))
    assert_equal(*found)


def test_nothing_waits_once_the_hooks_are_removed():
    model, gradients = made("cpu")
    backward(model)
    gradients.remove()
    model.zero_grad()
    backward(model)
    assert all(type(p.grad) is torch.Tensor for p in model.parameters())


def addresses(model):
    return [p.grad.data_blocks.data_ptr() for p in model.parameters() if p.dim() > 1 and p.grad is not None]


def passes(model, *seeds):
    for seed in seeds:
        model.zero_grad()
        backward(model, seed)
    return parts(model)


@pytest.mark.parametrize("device", DEVICES)
def test_memory_that_nobody_holds_is_written_again(device):
    model, _ = made(device)
    passes(model, 0)
    first = addresses(model)
    model.odd.weight.grad.mul_(0.5)  # as clipping does
    found = passes(model, 1)
    assert addresses(model) == first
    assert_equal(found, passes(made(device)[0], 1))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("hold", [lambda g: g, lambda g: g.detach(), lambda g: g.data_blocks.view(torch.uint8)])
def test_what_somebody_holds_keeps_its_values(device, hold):
    model, _ = made(device)
    passes(model, 0)
    held = hold(model.odd.weight.grad)
    read = (lambda t: t.clone()) if held.dtype == torch.uint8 else (lambda t: t.dequantize())
    before = read(held)
    passes(model, 1)
    assert torch.equal(read(held), before)
    del held
    first = addresses(model)
    passes(model, 2)
    assert addresses(model) == first


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("hold", [lambda g: g, lambda g: g.detach()])
def test_a_gradient_that_is_not_finite_stays_noted(device, hold):
    model, _ = made(device)
    bias = model.odd.bias.detach().clone()
    with torch.no_grad():
        model.odd.bias.fill_(float("inf"))
    passes(model, 0)
    held = [hold(p.grad) for p in model.parameters() if p.dim() > 1 and p.grad is not None]
    assert all(grad.nonfinite == 1 for grad in held)
    with torch.no_grad():
        model.odd.bias.copy_(bias)
    passes(model, 1)
    assert all(grad.nonfinite == 1 for grad in held)
    assert all(p.grad.nonfinite == 0 for p in model.parameters() if p.dim() > 1)


def test_so_much_memory_is_kept_and_no_more(monkeypatch):
    model, gradients = made("cpu")
    passes(model, 0)
    assert gradients._waiting._kept == sum(p.grad.stored_bytes() for p in model.parameters() if p.dim() > 1)
    monkeypatch.setattr(waiting, "KEPT", 1)
    model.layers[0].weight.requires_grad_(False)  # others wait together
    passes(model, 0, 1)
    assert len(gradients._waiting._stored) == 1


def test_frozen_and_trained_in_turns():
    model, _ = made("cpu")
    found = []
    for frozen in (True, False, True, False):
        model.layers[1].weight.requires_grad_(not frozen)
        passes(model, 3)
        found.append(model.odd.weight.grad.dequantize())
    assert all(torch.equal(one, found[0]) for one in found)
