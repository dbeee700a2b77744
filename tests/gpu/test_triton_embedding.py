"""The kernel for the gradient of an embedding's table against the reference."""

import pytest
import torch
from support import kernels_or_skip

from nemo_lowprec.compute.embedding import table_gradient
from nemo_lowprec.kernels.loader import embedding_kernels

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

# (tokens, rows of the table, features): single tokens, one token alone, runs that end in, at and behind chunks' ends
SHAPES = [(8192, 32000, 4096), (4096, 3, 768), (1000, 1, 40), (37, 5, 33), (1, 10, 16), (64, 1000, 1), (513, 64, 1025)]


@pytest.mark.parametrize("padding", [None, 0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_kernel_gives_the_sums(shape, source, dtype, padding):
    kernels = kernels_or_skip(embedding_kernels())
    count, rows, features = shape
    generator = torch.Generator("cuda").manual_seed(0)
    # Multiples of 2**-6 below 4: sums are exact in any order, as long as FP32 holds them.
    grad = torch.randint(-255, 256, (count, features), device="cuda", generator=generator).float().div(64).to(source)
    tokens = torch.randint(rows, (count,), device="cuda", generator=generator)
    want = table_gradient(grad, tokens, rows, padding, dtype)
    out = torch.full((rows, features), float("nan"), dtype=dtype, device="cuda")
    assert torch.equal(kernels.table_gradient(grad, tokens, rows, padding, dtype, out), want)
    assert torch.equal(kernels.table_gradient(grad, tokens.int(), rows, padding, dtype), want)


def test_no_tokens_and_values_that_are_not_finite():
    kernels = kernels_or_skip(embedding_kernels())
    empty, none = torch.empty(0, 8, device="cuda"), torch.empty(0, dtype=torch.int64, device="cuda")
    assert kernels.table_gradient(empty, none, 5, None, torch.float32).count_nonzero() == 0
    grad = torch.ones(20, 8, device="cuda")
    grad[3, 2], grad[17, 5] = float("nan"), float("inf")
    tokens = torch.arange(20, device="cuda") // 10
    found = kernels.table_gradient(grad, tokens, 3, None, torch.float32)
    assert (
        found[0, 2].isnan() and found[1, 5].isinf() and found.isfinite().sum() == 22 and found[2].count_nonzero() == 0
    )


def test_equal_inputs_give_equal_bits():
    kernels = kernels_or_skip(embedding_kernels())
    grad = torch.randn(5000, 512, device="cuda")
    tokens = torch.randint(7, (5000,), device="cuda")
    found = [kernels.table_gradient(grad, tokens, 7, None, torch.float32) for _ in range(3)]
    assert torch.equal(found[0], found[1]) and torch.equal(found[1], found[2])
