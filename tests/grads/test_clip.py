"""clip_grad_norm_ of ours: torch's on FP32 copies, for plain and stored gradients alike."""

import pytest
import torch
from low_bit import make_params, randn, set_grads, values
from torch import nn

import nemo_lowprec
from nemo_lowprec.grads import clip_grad_norm_
from nemo_lowprec.tensors import GradientTensor

INF, NAN = float("inf"), float("nan")
ORDERS = pytest.mark.parametrize("order", [2.0, 1.0, 3.0, INF])
KINDS = pytest.mark.parametrize("kind", ["plain", "fp8", "mixed"])


def make(kind, size=1.0):
    """Parameters with gradients (the last has none), and twins with FP32 ones of the same values."""
    params = [p for p in make_params() if p.numel()]
    set_grads(params, 0, "fp8" if kind == "fp8" else torch.float32, size=size)
    if kind == "mixed":
        for param in params[::2]:
            param.grad = GradientTensor.from_float(param.grad)
    params.append(nn.Parameter(torch.ones(3)))
    twins = [nn.Parameter(p.detach().clone()) for p in params]
    for p, twin in zip(params, twins, strict=True):
        twin.grad = None if p.grad is None else values(p.grad)
    return params, twins


@KINDS
@ORDERS
@pytest.mark.parametrize("max_norm", [0.5, 1e6])
def test_as_torch_on_fp32_copies(kind, order, max_norm):
    params, twins = make(kind)
    before = [p.grad for p in params]
    norm = clip_grad_norm_(params, max_norm, order)
    want = nn.utils.clip_grad_norm_(twins, max_norm, order)
    torch.testing.assert_close(norm, want, rtol=1e-6, atol=0)
    assert norm.dtype == torch.float32 and norm.shape == ()
    for p, twin, grad in zip(params, twins, before, strict=True):
        assert p.grad is grad
        if grad is not None:
            torch.testing.assert_close(values(grad), twin.grad, rtol=1e-6, atol=0)


@KINDS
def test_stored_gradients_are_not_rounded_again(kind):
    params, _ = make(kind)
    stored = [p.grad for p in params if isinstance(p.grad, GradientTensor)]
    before = [(g.data_blocks.view(torch.uint8).clone(), g.exponent.clone()) for g in stored]
    clip_grad_norm_(params, 1e-3)
    for grad, (data, exponent) in zip(stored, before, strict=True):
        assert torch.equal(grad.data_blocks.view(torch.uint8), data) and torch.equal(grad.exponent, exponent)
        assert grad.factor < 1


@KINDS
@pytest.mark.parametrize("max_norm", [0, 0.0, -1.0])
def test_without_a_positive_limit_only_the_norm(kind, max_norm):
    params, twins = make(kind)
    norm = clip_grad_norm_(params, max_norm)
    assert float(norm) == pytest.approx(float(nn.utils.get_total_norm([t.grad for t in twins[:-1]])), rel=1e-6)
    for p, twin in zip(params, twins, strict=True):
        assert p.grad is None or torch.equal(values(p.grad), twin.grad)


@KINDS
@pytest.mark.parametrize("bad", [NAN, INF])
def test_what_is_not_finite_raises_where_asked_and_clips_nothing(kind, bad):
    params, _ = make(kind)
    spoilt = values(params[0].grad)
    spoilt[1, 2] = bad
    params[0].grad = GradientTensor.from_float(spoilt) if isinstance(params[0].grad, GradientTensor) else spoilt
    before = [values(p.grad) for p in params[:-1]]
    with pytest.raises(RuntimeError, match=r"norm of order 2.0 is (nan|inf), so the gradients were not clipped"):
        clip_grad_norm_(params, 1.0, error_if_nonfinite=True)
    for p, old in zip(params, before, strict=False):
        torch.testing.assert_close(values(p.grad), old, equal_nan=True, rtol=0, atol=0)
    assert not clip_grad_norm_(params, 1.0).isfinite()
    params, twins = make(kind)
    assert torch.equal(clip_grad_norm_(params, 1.0, error_if_nonfinite=True), clip_grad_norm_(twins, -1.0))


def test_one_tensor_generators_and_nothing_at_all():
    params, _ = make("fp8")
    alone = clip_grad_norm_(params[0], -1.0)
    assert torch.equal(alone, clip_grad_norm_((p for p in params[:1]), -1.0))
    assert clip_grad_norm_([nn.Parameter(torch.ones(2))], 1.0) == 0 == clip_grad_norm_([], 1.0)


def test_gradients_of_half_precision():
    params = make_params(torch.float16, [(4, 128), (130,)])
    set_grads(params, 0, torch.float16)
    want = nn.utils.get_total_norm([p.grad.float() for p in params])
    norm = clip_grad_norm_(params, 0.01)
    torch.testing.assert_close(norm, want, rtol=1e-3, atol=0)
    assert float(clip_grad_norm_(params, -1)) == pytest.approx(0.01, rel=1e-2) and params[0].grad.dtype == torch.float16


def test_small_gradients_keep_their_values():
    """E4M3 without a factor would lose these."""
    param = nn.Parameter(torch.ones(4, 128))
    param.grad = GradientTensor.from_float(randn((4, 128), 0) * 1e-20)
    read = values(param.grad)
    clip_grad_norm_(param, 1e-25)
    assert param.grad.dequantize().count_nonzero() == read.count_nonzero() > 0


def test_it_is_the_packages():
    assert nemo_lowprec.clip_grad_norm_ is clip_grad_norm_


def test_the_norm_of_sparse_gradients_is_that_of_their_sum():
    table = torch.nn.Embedding(8, 4, sparse=True)
    table(torch.tensor([1, 1, 5])).square().sum().backward()
    dense = table.weight.grad.to_dense().norm()
    assert clip_grad_norm_(table.weight, 0.0) == pytest.approx(float(dense))
