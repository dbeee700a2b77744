"""Operands with 1x128 and 128x128 blocks: quantized bit for bit as the definition, multiplied as it says."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from nemo_lowprec.chart.recipe import Recipe
from nemo_lowprec.compute.backends import choose_backend
from nemo_lowprec.compute.backends.scaled_mm_blocks import ScaledBlocksBackend
from nemo_lowprec.compute.operands import OPERANDS, operand_of
from nemo_lowprec.formats import E4M3, BlockScaledMatrix, dequantize_blocks, quantize_blocks
from nemo_lowprec.formats.gemm_block_scaling import ROW_128, SQUARE_128
from nemo_lowprec.kernels.loader import tile_kernels

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
RECIPE = Recipe("blockwise", fp8="e4m3")


@pytest.fixture
def backend():
    if reason := ScaledBlocksBackend.unavailable(RECIPE):
        pytest.skip(reason)
    made = choose_backend("torch", RECIPE, torch.device("cuda"))
    assert isinstance(made, ScaledBlocksBackend)
    return made


def values(rows, cols, dtype=torch.bfloat16, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(rows, cols, device="cuda", generator=generator)
    return (x * torch.exp2(torch.randint(-20, 10, x.shape, device="cuda", generator=generator).float())).to(dtype)


def assert_is_the_definition(x, square, rowwise=True, columnwise=True):
    layout = SQUARE_128 if square else ROW_128
    row, row_scale, col, col_scale = tile_kernels().quantize(x, E4M3, square, rowwise, columnwise)
    assert (row is None, col is None) == (not rowwise, not columnwise)
    for data, scale, source in ((row, row_scale, x), (col, col_scale, x.t())):
        if data is None:
            continue
        wanted = quantize_blocks(source, E4M3, layout)
        cols = -(-source.shape[1] // 128)
        assert torch.equal(scale[:, :cols] if square else scale.t(), wanted.scale_inv)
        assert torch.equal(data.view(torch.uint8), wanted.data.contiguous().view(torch.uint8))


@pytest.mark.parametrize("square", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(16, 16), (128, 128), (144, 272), (1008, 640), (256, 4096), (2064, 16)])
def test_quantization_is_the_definition(shape, dtype, square):
    for _ in range(2):  # compiled, and launched again
        assert_is_the_definition(values(*shape, dtype), square)
    assert_is_the_definition(values(*shape, dtype), square, columnwise=False)
    assert_is_the_definition(values(*shape, dtype), square, rowwise=False)


@pytest.mark.parametrize("square", [False, True])
def test_numbers_at_the_edges(square):
    x = torch.randn(256, 256, device="cuda")
    x[0] = 0
    x[1, 3], x[2, 200], x[3, 7] = float("inf"), float("nan"), -float("inf")
    x[4] *= 1e-44
    x[5] *= 1e38
    assert_is_the_definition(x, square)
    assert_is_the_definition(x.t(), square)
    assert_is_the_definition(x.bfloat16()[:, :128], square)


def test_nothing_is_quantized_without_elements():
    row, row_scale, col, col_scale = tile_kernels().quantize(values(0, 32), E4M3, False, True, True)
    assert (row.shape, row_scale.shape, col.shape, col_scale.shape) == ((0, 32), (1, 0), (32, 0), (0, 32))


def gemms(backend, rows, ins, outs, out_dtype, wgrad_dtype, bias=True):
    """(result, what the operands' values give in FP64) of the three GEMMs of a layer."""
    operands = {kind: operand_of(RECIPE, kind) for kind in OPERANDS}
    both = {"rowwise": True, "columnwise": True, "record": True}
    small = 2.0**-8  # products fit into FP16
    x = backend.quantize(values(rows, ins, seed=1) * small, operands["input"], **both)
    w = backend.quantize(values(outs, ins, seed=2) * small, operands["weight"], **both)
    dy = backend.quantize(values(rows, outs, seed=3) * small, operands["grad_output"], **both)
    b = values(1, outs, out_dtype, seed=4)[0] if bias else None
    total = values(rows, ins, out_dtype, seed=5)
    into = torch.empty(outs, ins, device="cuda", dtype=wgrad_dtype)
    out, dx, dw = (
        backend.fprop(x, w, b, out_dtype), backend.dgrad(dy, w, out_dtype, total.clone()),
        backend.wgrad(dy, x, wgrad_dtype, into),
    )  # fmt: skip
    assert dw is into

    def exact(part):
        return dequantize_blocks(BlockScaledMatrix(part.data, part.scale_inv, part.layout)).double()

    wanted = exact(x.rowwise) @ exact(w.rowwise).t() + (0 if b is None else b.double())
    yield out, wanted
    yield dx, exact(dy.rowwise) @ exact(w.columnwise).t() + total.double()
    yield dw, exact(dy.columnwise) @ exact(x.columnwise).t()


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("wgrad_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(128, 128, 128), (64, 256, 384), (16, 16, 16), (144, 272, 400), (4096, 1024, 1536)])
def test_gemms_multiply_the_values_of_their_operands(backend, shape, out_dtype, wgrad_dtype):
    for bias in (False, True):
        for have, wanted in gemms(backend, *shape, out_dtype, wgrad_dtype, bias):
            error = (have.double() - wanted).norm() / wanted.norm()
            assert error < 0.004, (tuple(have.shape), float(error))


def test_gemms_in_a_dispatch_mode_are_torchs(backend):
    plain = [have for have, _ in gemms(backend, 128, 256, 128, torch.bfloat16, torch.float32)]
    with FlopCounterMode(display=False) as counter:
        counted = [have for have, _ in gemms(backend, 128, 256, 128, torch.bfloat16, torch.float32)]
    assert counter.get_total_flops() > 0
    for one, two in zip(plain, counted, strict=True):
        assert (one - two).norm() < 0.004 * two.norm()
