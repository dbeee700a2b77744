"""Linear layers with half weights and FP32 gradients; what a GPU makes of them is in tests/gpu."""

import pytest
import torch
from torch import nn

from nemo_lowprec.compute.half_linear import HalfLinear

HALVES = pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])


def layer(half, bias=True, fp32_grad=True):
    torch.manual_seed(0)
    made = nn.Linear(24, 40, bias=bias, dtype=half)
    made.__class__ = HalfLinear
    for param in made.parameters() if fp32_grad else ():
        param.grad_dtype = torch.float32
    return made


def is_fused(out):
    names, left = set(), [out.grad_fn]
    while left:
        node = left.pop()
        names.add(type(node).__name__)
        left += [n for n, _ in node.next_functions if n is not None and "Accumulate" not in type(n).__name__]
    return "_HalfLinearFunctionBackward" in names


@HALVES
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(7, 24), (2, 3, 24), (24,), (0, 24)])
def test_a_layer_computes_as_torch_does(half, bias, shape):
    mine, other = layer(half, bias), layer(half, bias, fp32_grad=False)
    other.__class__ = nn.Linear
    x = torch.randn(shape, dtype=half)
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    out, want = mine(ours), other(theirs)
    assert is_fused(out) and torch.equal(out, want)
    weights = torch.randn(want.shape)
    (out.float() * weights).sum().backward()
    (want.float() * weights).sum().backward()
    assert torch.equal(ours.grad, theirs.grad)
    for a, b in zip(mine.parameters(), other.parameters(), strict=True):
        assert a.grad.dtype == torch.float32
        torch.testing.assert_close(a.grad.to(half), b.grad)


@HALVES
def test_under_autocast_other_dtypes_come_in_and_half_goes_out(half):
    x = torch.randn(5, 24, requires_grad=True)
    with torch.autocast("cpu", half):
        out = layer(half)(x)
    assert is_fused(out) and out.dtype == half
    out.float().sum().backward()
    assert x.grad.dtype == torch.float32
    with torch.autocast("cpu", torch.float16 if half == torch.bfloat16 else torch.bfloat16):
        assert not is_fused(layer(half)(x))  # the loop's own choice


def test_what_torch_does_itself():
    x = torch.randn(5, 24, dtype=torch.bfloat16, requires_grad=True)
    assert not is_fused(layer(torch.bfloat16, fp32_grad=False)(x))
    frozen = layer(torch.bfloat16).requires_grad_(False)
    assert not is_fused(frozen(x))
    with torch.no_grad():
        assert layer(torch.bfloat16)(x).grad_fn is None
    made = layer(torch.bfloat16)
    per_sample = torch.func.vmap(torch.func.grad(lambda row: made(row).float().sum()))(x.detach())
    assert per_sample.shape == x.shape


def test_a_second_derivative():
    made = layer(torch.bfloat16, bias=False)
    x = torch.randn(5, 24, dtype=torch.bfloat16, requires_grad=True)
    (first,) = torch.autograd.grad(made(x).float().square().sum(), x, create_graph=True)
    first.float().square().sum().backward()
    other = nn.Linear(24, 40, bias=False, dtype=torch.bfloat16)
    other.weight.data.copy_(made.weight.data)
    again = x.detach().clone().requires_grad_()
    (want,) = torch.autograd.grad(other(again).float().square().sum(), again, create_graph=True)
    want.float().square().sum().backward()
    torch.testing.assert_close(made.weight.grad.bfloat16(), other.weight.grad)
    torch.testing.assert_close(x.grad, again.grad)
