"""Triton's compiled kernels, launched again without Triton's own search."""

import pytest
import torch

from nemo_lowprec.compat import triton as compat

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


@triton.jit
def _scaled(x_ptr, out_ptr, n, factor, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + i, tl.load(x_ptr + i, mask=i < n) * factor, mask=i < n)


def test_a_compiled_kernel_runs_on_other_tensors_and_on_the_current_stream():
    x, out = torch.randn(1024, device="cuda"), torch.zeros(1024, device="cuda")
    compiled = _scaled[(4,)](x, out, 1024, 2.0, BLOCK=256)
    assert torch.equal(out, x * 2)
    launch = compat.launch_of(compiled, (256,))

    values = torch.randn(512, device="cuda")
    source, other = torch.zeros(512, device="cuda"), torch.zeros(512, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(20_000_000)  # a launch on the default stream would read what is not there yet
        source.copy_(values)
        launch(2, source, other, 512, 3.0)
    assert not side.query()  # it is still under way
    side.synchronize()
    assert torch.equal(other, values * 3)

    launch(1, values, other, 256, 5.0)  # on the default stream again, with fewer programs
    assert torch.equal(other[:256], values[:256] * 5) and torch.equal(other[256:], values[256:] * 3)


def test_the_current_device():
    for index in range(torch.cuda.device_count()):
        with torch.cuda.device(index):
            assert compat.current_device() == index
