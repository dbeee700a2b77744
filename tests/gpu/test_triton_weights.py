"""Many weights quantized in one launch, bit for bit as one at a time."""

import pytest
import torch

from nemo_lowprec.formats import E4M3
from nemo_lowprec.formats.gemm_block_scaling import scales_shape

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

SHAPES = [(16, 16), (64, 128), (80, 48), (256, 1040), (1024, 64), (33, 7), (130, 200)]


def jobs(dtype, rowwise, columnwise):
    kernels = pytest.importorskip("nemo_lowprec.kernels.triton_weights")
    found = []
    for i, (rows, cols) in enumerate(SHAPES):
        torch.manual_seed(i)
        weight = (torch.randn(rows, cols, device="cuda") * 3).to(dtype)
        weight.view(-1)[i] = [float("nan"), float("inf"), -float("inf"), 0.0][i % 4]
        scale = torch.full((1,), 2.0 ** (i - 2) * 1.1, device="cuda")
        # Filled with values that a kernel which writes nothing would leave.
        row = torch.full((rows, cols), 99.0, device="cuda").to(E4M3.dtype) if rowwise else None
        col = torch.full((cols, rows), 99.0, device="cuda").to(E4M3.dtype) if columnwise else None
        found.append((weight, scale, torch.zeros(1, device="cuda"), row, col))
    return kernels.WeightCast(), found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("rowwise", "columnwise"), [(True, True), (True, False), (False, True)])
def test_all_weights_are_quantized_as_one_at_a_time(dtype, rowwise, columnwise):
    from nemo_lowprec.kernels import triton_cast

    caster, found = jobs(dtype, rowwise, columnwise)
    for _ in range(2):  # the second time from tables that are there
        caster.cast(found)
        for weight, scale, scale_inv, row, col in found:
            want_row, want_col, want_inv = triton_cast.quantize(weight, scale, E4M3, rowwise, columnwise)
            assert torch.equal(scale_inv, want_inv)
            for got, want in ((row, want_row), (col, want_col)):
                assert (got is None) == (want is None)
                assert got is None or torch.equal(got.view(torch.uint8), want.view(torch.uint8))
            weight.mul_(0.5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_squares_are_quantized_as_one_at_a_time(dtype):
    from nemo_lowprec.kernels import triton_tiles

    caster, found = jobs(dtype, True, True)
    made = []
    for weight, _, _, row, col in found:
        if not (weight.shape[0] % 16 or weight.shape[1] % 16):
            scales = [torch.full(scales_shape(True, *shape), 99.0, device="cuda") for shape in (row.shape, col.shape)]
            made.append((weight, *scales, row, col))
    assert len(made) > 3
    for _ in range(2):
        caster.cast(made)
        for weight, row_scale, col_scale, row, col in made:
            want_row, want_row_scale, want_col, want_col_scale = triton_tiles.quantize(weight, E4M3, True, True, True)
            for got, want in ((row, want_row), (col, want_col)):
                assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))
            for got, want, cols in (
                (row_scale, want_row_scale, row.shape[1]),
                (col_scale, want_col_scale, col.shape[1]),
            ):
                assert torch.equal(got[:, : -(-cols // 128)], want[:, : -(-cols // 128)])
            weight.mul_(0.5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("even", [False, True])
def test_rows_are_quantized_as_one_at_a_time(dtype, even):
    from nemo_lowprec.kernels import triton_rows

    caster, found = jobs(dtype, True, True)
    made = []
    for weight, _, _, row, col in found:
        if not even or not (weight.shape[0] % 16 or weight.shape[1] % 16):
            made.append((weight, *(torch.full((side, 1), 99.0, device="cuda") for side in weight.shape), row, col))
    assert len(made) > 3
    for _ in range(2):
        caster.cast(made)
        for weight, row_scale, col_scale, row, col in made:
            wanted = triton_rows.quantize(weight, E4M3, True, True)
            for got, want in zip((row, row_scale, col, col_scale), wanted, strict=True):
                assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))
            weight.mul_(0.5)


def test_weights_in_fp8_are_transposed():
    caster, found = jobs(torch.bfloat16, True, True)
    fp8 = [(w.to(E4M3.dtype), None, inv, None, col) for w, _, inv, _, col in found]
    caster.cast(fp8)
    for weight, _, scale_inv, _, col in fp8:
        assert torch.equal(col.view(torch.uint8), weight.view(torch.uint8).t())
        assert scale_inv.item() == 0  # belongs to the weight


def test_weights_at_odd_addresses():
    from nemo_lowprec.kernels import triton_cast

    caster, _ = jobs(torch.bfloat16, True, True)
    weight = torch.randn(64 * 128 + 1, device="cuda", dtype=torch.bfloat16)[1:].view(64, 128)
    scale, inv = torch.full((1,), 3.0, device="cuda"), torch.zeros(1, device="cuda")
    row = torch.empty(64, 128, device="cuda", dtype=E4M3.dtype)
    col = torch.empty(128, 64, device="cuda", dtype=E4M3.dtype)
    caster.cast([(weight, scale, inv, row, col)])
    want = triton_cast.quantize(weight, scale, E4M3, True, True)
    assert torch.equal(row.view(torch.uint8), want[0].view(torch.uint8))
    assert torch.equal(col.view(torch.uint8), want[1].view(torch.uint8))
