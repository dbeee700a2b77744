"""Unscaling gradients and finding overflows."""

import pytest
import torch
from torch import nn

from nemo_lowprec.grads import find_nonfinite, unscale_
from nemo_lowprec.tensors import GradientTensor

CPU = torch.device("cpu")


def param(grad, dtype=torch.float32):
    p = nn.Parameter(torch.zeros(grad.shape, dtype=dtype))
    p.grad_dtype = None
    p.grad = grad
    return p


def test_divides_by_the_scale_in_place():
    p = param(torch.tensor([8.0, -4.0]))
    grad = p.grad
    assert not unscale_([p], 4.0, CPU)
    assert p.grad is grad and grad.tolist() == [2.0, -1.0]


def test_fp16_gradients_become_fp32_so_that_small_ones_survive():
    p = param(torch.tensor([6e-8, 1.0], dtype=torch.float16), torch.float16)
    assert not unscale_([p], 2.0**16, CPU)
    assert p.grad.dtype == torch.float32
    assert p.grad.tolist() == [2.0**-24 / 2**16, 1 / 2**16]  # 0 in FP16


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bad", [float("inf"), -float("inf"), float("nan")])
@pytest.mark.parametrize("position", [0, 2])
def test_finds_an_overflow_in_any_gradient(dtype, bad, position):
    params = [param(torch.ones(3, dtype=dtype), dtype) for _ in range(3)]
    params[position].grad[1] = bad
    assert unscale_(params, 2.0, CPU)


def test_all_overflowing_and_large_finite_gradients():
    assert unscale_([param(torch.full((4,), float("inf")))], 2.0, CPU)
    assert not unscale_([param(torch.full((4,), 65504.0, dtype=torch.float16), torch.float16)], 2.0, CPU)


def test_non_contiguous_gradients():
    p = nn.Parameter(torch.zeros(3, 4))
    p.grad = torch.arange(12.0).view(4, 3).t()
    want = p.grad / 4
    assert not unscale_([p], 4.0, CPU)
    assert torch.equal(p.grad, want)
    p.grad[2, 1] = float("inf")
    assert unscale_([p], 4.0, CPU)


def test_parameters_without_gradients_and_none_at_all():
    p = nn.Parameter(torch.zeros(2))
    assert not unscale_([p], 4.0, CPU) and p.grad is None
    assert not unscale_([], 4.0, CPU)


def test_gradients_of_several_dtypes_and_shapes_together():
    params = [
        param(torch.tensor(8.0)),
        param(torch.empty(0)),
        param(torch.full((2, 2), 8.0, dtype=torch.float16), torch.float16),
        param(torch.full((2,), 8.0, dtype=torch.float64), torch.float64),
        param(torch.full((2,), 8.0, dtype=torch.bfloat16), torch.bfloat16),
    ]
    assert not unscale_(params, 8.0, CPU)
    assert all(bool((p.grad == 1).all()) for p in params)
    # FP16 aside, an optimizer without masters expects the parameter's own dtype.
    want = [torch.float32, torch.float32, torch.float32, torch.float64, torch.bfloat16]
    assert [p.grad.dtype for p in params] == want


def test_an_fp16_parameter_whose_gradient_must_be_fp16_is_unscaled_in_fp32_too():
    p = nn.Parameter(torch.zeros(1, dtype=torch.float16))
    p.sum().backward()
    assert not unscale_([p], 2.0**20, CPU)
    assert p.grad.dtype == torch.float32 and p.grad.item() == 2.0**-20


def test_takes_a_generator():
    params = [param(torch.ones(2)) for _ in range(2)]
    unscale_((p for p in params), 2.0, CPU)
    assert all(p.grad.tolist() == [0.5, 0.5] for p in params)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_sparse_gradients(dtype):
    embedding = nn.Embedding(4, 2, sparse=True, dtype=dtype)
    (embedding(torch.tensor([1, 3, 1])).float() * 40000.0).sum().backward()  # of a row twice: beyond FP16
    assert not unscale_(embedding.parameters(), 2.0**10, CPU)
    grad = embedding.weight.grad
    assert grad.is_sparse and grad.dtype == torch.float32
    row = 40000.0 if dtype != torch.bfloat16 else float(torch.tensor(40000.0).bfloat16())
    want = torch.zeros(4, 2)
    want[1], want[3] = 2 * row / 2**10, row / 2**10
    torch.testing.assert_close(grad.to_dense(), want)
    unscaled = grad._values().clone()
    (embedding(torch.tensor([2])) * float("inf")).sum().backward()
    assert unscale_(embedding.parameters(), 1.0, CPU)
    assert unscaled.isfinite().all()


def test_a_sparse_gradient_of_no_rows():
    embedding = nn.Embedding(4, 2, sparse=True)
    embedding(torch.zeros(0, dtype=torch.long)).sum().backward()
    assert not unscale_(embedding.parameters(), 2.0, CPU)


KINDS = {
    **{str(dtype): lambda x, dtype=dtype: x.to(dtype) for dtype in (torch.float32, torch.float16, torch.bfloat16)},
    "double": torch.Tensor.double,
    "fp8": GradientTensor.from_float,
    "sparse": lambda x: x.to_sparse(1),
    "strided": lambda x: x.t().contiguous().t(),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [float("inf"), -float("inf"), float("nan")])
def test_looking_finds_what_is_not_finite_and_changes_nothing(kind, bad):
    values = torch.randn(3, 4)
    for value in (values[1, 2].item(), bad):
        values[1, 2] = value
        params = [nn.Parameter(torch.zeros(3, 4)) for _ in range(4)]
        for p, grad in zip(params, (torch.ones(3, 4), KINDS[kind](values), torch.ones(3, 4)), strict=False):
            p.grad_dtype = None
            p.grad = grad
        before = [p.grad.clone() if p.grad is not None else None for p in params]
        found = find_nonfinite(params, CPU)
        assert found.dtype == torch.float32 and found.dim() == 0 and found.item() == (value == bad or value != value)
        for p, grad in zip(params, before, strict=True):
            assert p.grad is None if grad is None else p.grad.dtype == grad.dtype
            assert grad is None or torch.equal(_dense(p.grad).nan_to_num(7), _dense(grad).nan_to_num(7))


def _dense(grad):
    return grad.dequantize() if isinstance(grad, GradientTensor) else grad.to_dense() if grad.is_sparse else grad


def test_looking_takes_the_largest_for_finite_and_finds_a_factor_that_is_not():
    p = param(torch.full((8,), torch.finfo(torch.float32).max))
    assert not find_nonfinite([p], CPU) and not find_nonfinite([], CPU)
    p.grad = GradientTensor.from_float(torch.ones(8))
    other = param(GradientTensor.from_float(torch.ones(8)))
    assert not find_nonfinite([p, other], CPU)
    p.grad.mul_(float("nan"))
    assert find_nonfinite([p, other], CPU)


def test_looking_at_an_empty_gradient():
    assert not find_nonfinite([param(torch.ones(0, 4)), param(torch.ones(3))], CPU)
