"""FP8 GEMMs by cuBLASLt against ``torch._scaled_mm``."""

from threading import Thread

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from nemo_lowprec.compat import cublas
from nemo_lowprec.kernels import fp8_gemm
from nemo_lowprec.kernels.fp8_gemm import gemm

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SHAPES = [(16, 16, 16), (64, 256, 128), (208, 1040, 592), (512, 2048, 11264), (4096, 6144, 1024)]
HALVES = [torch.bfloat16, torch.float16]


def operands(m, n, k, a=E4M3, seed=0):
    draw = torch.Generator("cuda").manual_seed(seed)
    make = [torch.randn(rows, k, device="cuda", generator=draw) for rows in (m, n)]
    scales = [torch.tensor([value], device="cuda") for value in (0.5, 0.03)]
    return make[0].to(a), make[1].to(E4M3), *scales


def by_torch(a, b, scale_a, scale_b, dtype, fast=False, bias=None):
    return torch._scaled_mm(a, b.t(), scale_a, scale_b, bias=bias, out_dtype=dtype, use_fast_accum=fast)


def test_the_library_is_there():
    assert cublas.library() is not None


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
@pytest.mark.parametrize("a", [E4M3, E5M2], ids=str)
def test_result(shape, fast, dtype, a):
    given = operands(*shape, a)
    expected = by_torch(*given, dtype, fast)
    forms = len(fp8_gemm._calls)
    torch.testing.assert_close(gemm(*given, dtype, fast), expected, rtol=1e-5 if dtype == torch.float32 else 0, atol=0)
    assert len(fp8_gemm._calls) > forms or forms == fp8_gemm._KEPT
    buffer = torch.empty(shape[0], 2 * shape[1], dtype=dtype, device="cuda")[:, : shape[1]]
    assert gemm(*given, dtype, fast, out=buffer) is buffer
    torch.testing.assert_close(buffer, expected, rtol=1e-5 if dtype == torch.float32 else 0, atol=0)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_bias(shape, dtype):
    given, bias = operands(*shape), torch.randn(shape[1], dtype=dtype, device="cuda")
    assert torch.equal(gemm(*given, dtype, True, bias), by_torch(*given, dtype, True, bias))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_a_total_is_added_to(shape, dtype):
    given = operands(*shape, E5M2)
    total = torch.randn(shape[:2], dtype=dtype, device="cuda")
    product, start = by_torch(*given, torch.float32), total.float()
    expected = product + start
    assert gemm(*given, dtype, total=total) is total
    assert ((total.float() - expected).abs() <= torch.finfo(dtype).eps * (product.abs() + start.abs())).all()


def test_slices_that_start_anywhere():
    a, b, *scales = operands(128, 96, 64)
    wide = torch.zeros(128 * 64 + 512, dtype=torch.uint8, device="cuda")
    for offset in (16, 48, 128):  # of addresses; torch's allocator gives multiples of 512
        moved = wide[offset : offset + a.numel()].view(E4M3).view(a.shape).copy_(a)
        assert torch.equal(gemm(moved, b, *scales, torch.bfloat16), by_torch(a, b, *scales, torch.bfloat16))


def test_in_a_cuda_graph():
    given = operands(512, 2048, 11264)
    expected = gemm(*given, torch.bfloat16)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = gemm(*given, torch.bfloat16)
    other = operands(512, 2048, 11264, seed=1)
    for into, values in zip(given, other, strict=True):
        into.copy_(values)
    graph.replay()
    assert torch.equal(out, gemm(*other, torch.bfloat16)) and not torch.equal(out, expected)


def test_threads_share_a_form():
    fields = [operands(64, 64, 64, seed=seed) for seed in range(8)]
    fields = [(a, b, scale_a * (seed + 1), scale_b) for seed, (a, b, scale_a, scale_b) in enumerate(fields)]
    expected = [by_torch(*given, torch.float32) for given in fields]
    wrong = []

    def work(given, right):
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(200):
                if not torch.equal(gemm(*given, torch.float32), right):
                    wrong.append(1)

    threads = [Thread(target=work, args=pair) for pair in zip(fields, expected, strict=True)]
    torch.cuda.synchronize()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_dispatch_mode_sees_the_gemm():
    given = operands(64, 32, 128)
    with FlopCounterMode(display=False) as counter:
        gemm(*given, torch.bfloat16)
    assert counter.get_total_flops() == 2 * 64 * 32 * 128


def test_calls_are_dropped_when_there_are_many(monkeypatch):
    monkeypatch.setattr(fp8_gemm, "_calls", {})
    monkeypatch.setattr(fp8_gemm, "_KEPT", 3)
    for rows in range(16, 160, 16):
        given = operands(rows, 32, 64)
        assert torch.equal(gemm(*given, torch.float32), by_torch(*given, torch.float32))
        assert len(fp8_gemm._calls) <= 3
