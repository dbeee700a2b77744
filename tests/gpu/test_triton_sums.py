"""The kernel that adds partial sums up."""

import pytest
import torch
from support import kernels_or_skip

from nemo_lowprec.kernels.loader import sum_kernels

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


@pytest.mark.parametrize("shape", [(1, 197, 4096), (2, 264, 1024), (1, 1, 16), (2, 5, 33), (1, 0, 48)], ids=str)
def test_sums_in_fp64_rounded_once(shape):
    kernels = kernels_or_skip(sum_kernels())
    parts = torch.randn(shape, device="cuda")
    found = kernels.add_up(parts, [(torch.float32, torch.float32)] * shape[0])
    for got, want in zip(found, parts.double().sum(1), strict=True):
        torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=2e-7 * max(1, shape[1]))
    again = kernels.add_up(parts, [(torch.float32, torch.float32)] * shape[0])
    assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))


def test_every_rounding():
    kernels = kernels_or_skip(sum_kernels())
    parts = torch.randn(2, 9, 64, device="cuda")
    want = parts.double().sum(1).float().bfloat16()
    first, second = kernels.add_up(
        parts, [(torch.float16, torch.float32), (torch.float32, torch.bfloat16)], torch.bfloat16
    )
    assert first.dtype == torch.float32 and second.dtype == torch.bfloat16
    torch.testing.assert_close(first, want[0].half().float(), rtol=2**-7, atol=1e-6)
    torch.testing.assert_close(second, want[1], rtol=2**-7, atol=1e-6)
