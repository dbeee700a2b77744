"""cuBLASLt from Python: it is found where torch has it, and proposes algorithms for an FP8 GEMM."""

import ctypes

import pytest
import torch

from nemo_lowprec.compat import cublas

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@pytest.mark.skipif(torch.version.cuda is not None, reason="torch has CUDA here")
def test_there_is_none_without_cuda():
    assert cublas.library() is None and cublas.current_stream is None


def test_a_status_that_is_not_success_is_an_error():
    cublas.check(0)
    with pytest.raises(RuntimeError, match="cuBLASLt has failed with status 15"):
        cublas.check(15)


def test_a_candidate_is_laid_out_as_in_the_header():
    assert ctypes.sizeof(cublas.Candidate) == 96
    assert cublas.Candidate.workspace.offset == 64


@pytest.mark.gpu
@needs_gpu
def test_proposals_for_a_gemm():
    torch.cuda.init()
    assert cublas.library().cublasLtGetVersion() >= 120000
    described, handle = cublas.description(), cublas.handle(torch.cuda.current_device())
    assert cublas.handle(torch.cuda.current_device()) == handle
    cublas.set_attribute(described, cublas.TRANSA, ctypes.c_int32(1))
    cublas.set_attribute(described, cublas.FAST_ACCUM, ctypes.c_int8(1))
    cublas.set_attribute(described, cublas.EPILOGUE, ctypes.c_int32(cublas.EPILOGUE_BIAS))
    cublas.set_attribute(described, cublas.BIAS_TYPE, ctypes.c_int32(cublas.DATA_TYPES[torch.bfloat16]))
    for pointer in (cublas.A_SCALE, cublas.B_SCALE, cublas.BIAS):
        cublas.set_attribute(described, pointer, ctypes.c_uint64(256))
    fp8 = [cublas.layout(torch.float8_e4m3fn, 1024, rows, 1024) for rows in (4096, 2048)]
    out = cublas.layout(torch.bfloat16, 4096, 2048, 4096)
    found = cublas.candidates(handle, described, (*fp8, out, out), 1 << 20, 16, 8)
    assert 1 <= len(found) <= 8
    for one in found:
        assert one.state == 0 and one.workspace <= 1 << 20 and one.option(cublas.CUSTOM_OPTION) >= 0
    cublas.destroy(described, (*fp8, out))
    assert cublas.current_stream(0) == torch.cuda.current_stream(0).cuda_stream


@pytest.mark.gpu
@needs_gpu
@pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0), reason="needs Hopper")
def test_scales_of_blocks_and_rows():
    assert cublas.SCALE_OF_TENSOR == 0  # what a description has
    torch.cuda.init()
    handle = cublas.handle(torch.cuda.current_device())
    fp8 = [cublas.layout(torch.float8_e4m3fn, 1024, rows, 1024) for rows in (4096, 2048)]
    out = cublas.layout(torch.bfloat16, 4096, 2048, 4096)
    counts = []
    for of_a, of_b in (
        (cublas.SCALE_OF_1X128, cublas.SCALE_OF_1X128), (cublas.SCALE_OF_128X128, cublas.SCALE_OF_1X128),
        (cublas.SCALE_OF_ROW, cublas.SCALE_OF_ROW),
    ):  # fmt: skip
        described = cublas.description()
        cublas.set_attribute(described, cublas.TRANSA, ctypes.c_int32(1))
        cublas.set_attribute(described, cublas.A_SCALE_MODE, ctypes.c_int32(of_a))
        cublas.set_attribute(described, cublas.B_SCALE_MODE, ctypes.c_int32(of_b))
        for pointer in (cublas.A_SCALE, cublas.B_SCALE):
            cublas.set_attribute(described, pointer, ctypes.c_uint64(256))
        counts.append(len(cublas.candidates(handle, described, (*fp8, out, out), 1 << 20, 16, 8)))
        cublas.destroy(described, ())
    assert all(counts)
