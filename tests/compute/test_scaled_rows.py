"""Scales per row: what they keep that one scale loses, and the ``torch`` backend's operands and GEMM on a CPU."""

import pytest
import torch

from nemo_lowprec import LowPrecision
from nemo_lowprec.chart.recipe import Recipe
from nemo_lowprec.compute.backends import choose_backend, class_of
from nemo_lowprec.compute.backends.base import QuantizedOperand
from nemo_lowprec.compute.backends.reference import ReferenceBackend
from nemo_lowprec.compute.backends.scaled_mm_rows import ScaledRowsBackend
from nemo_lowprec.compute.backends.te import TEBackend
from nemo_lowprec.compute.operands import OPERANDS, operand_of
from nemo_lowprec.compute.te_layers import te_recipe
from nemo_lowprec.formats import E4M3, E5M2, compute_amax, dequantize_blocks, power_of_two_scale, quantize_blocks
from nemo_lowprec.formats.gemm_block_scaling import WHOLE_ROW

RECIPE = Recipe("rowwise", fp8="e4m3")
BOTH = {"rowwise": True, "columnwise": True, "record": True}


def values(rows, cols, seed=0):
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.exp2(torch.randint(-20, 10, (rows, 1), generator=generator).float())
    return (torch.randn(rows, cols, generator=generator) * sizes).bfloat16()


def operands(backend, rows, ins, outs, recipe=RECIPE):
    return [
        backend.quantize(values(*shape, seed) * 2.0**-8, operand_of(recipe, kind), **BOTH)
        for seed, (kind, shape) in enumerate(zip(OPERANDS, ((rows, ins), (outs, ins), (rows, outs)), strict=True))
    ]


@pytest.mark.parametrize("fmt", [E4M3, E5M2])
def test_each_row_has_the_scale_of_its_own_amax(fmt):
    x = values(48, 200)
    x[3] = 0
    made = quantize_blocks(x, fmt, WHOLE_ROW)
    assert made.scale_inv.shape == (48, 1) and made.data.shape == x.shape
    for i, row in enumerate(x):
        assert made.scale_inv[i, 0].reciprocal() == power_of_two_scale(compute_amax(row), fmt)
    # Rows of any size are kept alike; the step of a mantissa of m bits is 2**-m of a value at most.
    error = (dequantize_blocks(made) - x.float()).norm(dim=1) / x.float().norm(dim=1).clamp(min=1e-30)
    assert error.max() < {E4M3: 0.04, E5M2: 0.08}[fmt] and not error[3]


def test_a_row_that_is_not_finite_spoils_no_other():
    x = values(32, 64).float()
    wanted = dequantize_blocks(quantize_blocks(x, E4M3, WHOLE_ROW))
    x[5, 7], x[6, 0] = float("nan"), float("inf")
    made = quantize_blocks(x, E4M3, WHOLE_ROW)
    others = [i for i in range(32) if i not in (5, 6)]
    assert torch.equal(dequantize_blocks(made)[others], wanted[others])
    assert made.scale_inv[5:7].flatten().tolist() == [1.0, 1.0] and dequantize_blocks(made)[5, 7].isnan()


def test_both_orientations_round_a_value_alike():
    """Scales are powers of two: as long as a value is a normal number in both, dgrad reads the weight of fprop."""
    x = torch.randn(48, 64, generator=torch.Generator().manual_seed(0))
    w = ReferenceBackend().quantize(x, operand_of(RECIPE, "weight"), **BOTH)
    row, col = (dequantize_blocks_of(part) for part in (w.rowwise, w.columnwise))
    normal = (w.rowwise.data.float().abs() >= 2.0**-6) & (w.columnwise.data.t().float().abs() >= 2.0**-6)
    assert normal.float().mean() > 0.9 and torch.equal(row[normal], col.t()[normal])


def dequantize_blocks_of(part):
    return part.data.float() * part.scale_inv


@pytest.mark.parametrize("fp8", ["e4m3", "hybrid"])
@pytest.mark.parametrize("shape", [(16, 16, 16), (144, 272, 400), (128, 640, 256)])
def test_torchs_gemm_multiplies_as_the_reference(shape, fp8):
    """Where cuBLASLt does not multiply: BF16 by torch's kernel for rows, other results without rounding to BF16."""
    recipe = Recipe("rowwise", fp8=fp8)
    rows, ins, outs = shape
    reference, own = ReferenceBackend(), ScaledRowsBackend()
    (x, w, dy), (x8, w8, dy8) = operands(reference, *shape, recipe), operands(own, *shape, recipe)
    bias, total = torch.randn(outs), torch.randn(rows, ins)
    for dtype, rtol in ((torch.float32, 1e-5), (torch.bfloat16, 0.01), (torch.float16, 0.002)):
        for given in (None, bias):
            assert_alike(own.fprop(x8, w8, given, dtype), reference.fprop(x, w, given, dtype), rtol)
        into = total.to(dtype, copy=True)
        made = own.dgrad(dy8, w8, dtype, into)
        assert made is into
        assert_alike(made, reference.dgrad(dy, w, dtype, total.to(dtype)), rtol)
    out = torch.empty(outs, ins)
    assert own.wgrad(dy8, x8, torch.float32, out) is out
    assert_alike(out, reference.wgrad(dy, x, torch.float32), 1e-5)


def assert_alike(have, wanted, rtol):
    assert have.dtype == wanted.dtype and have.shape == wanted.shape
    assert (have.double() - wanted.double()).norm() <= rtol * wanted.double().norm()


@pytest.mark.parametrize("rowwise, columnwise", [(True, True), (True, False), (False, True)])
def test_packed_operands_come_back(rowwise, columnwise):
    backend = ScaledRowsBackend()
    for kind, made in zip(OPERANDS, operands(backend, 144, 272, 400), strict=True):
        part = QuantizedOperand(made.rowwise if rowwise else None, made.columnwise if columnwise else None)
        packing = backend.packing(operand_of(RECIPE, kind))
        tensors = packing.pack(part)
        assert all(tensor.is_contiguous() for tensor in tensors)
        like = packing.like(torch.empty(made.rowwise.data.shape), operand_of(RECIPE, kind), rowwise, columnwise)
        assert [(t.shape, t.dtype) for t in like] == [(t.shape, t.dtype) for t in tensors]
        again = packing.unpack(tensors, rowwise, columnwise)
        for one, two in ((part.rowwise, again.rowwise), (part.columnwise, again.columnwise)):
            assert (one is None) == (two is None)
            assert one is None or (one.data is two.data and one.scale_inv is two.scale_inv and one.layout == two.layout)


def test_the_backend_is_chosen_by_the_scaling():
    assert class_of("torch", RECIPE) is ScaledRowsBackend
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match=r"backend='torch' cannot run here: .*NVIDIA GPU"):
            choose_backend("torch", RECIPE, torch.device("cpu"))


def test_transformer_engine_has_none(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert TEBackend.unavailable(RECIPE) == (
        "Transformer Engine has no rowwise scaling; use backend='torch' or another level"
    )
    with pytest.raises(ValueError, match="no rowwise scaling"):
        te_recipe(RECIPE)


@pytest.mark.parametrize("option", ["fp8_params", "fp8_margin", "fp8_amax_history_len", "interval"])
def test_arguments_of_other_scalings_are_unknown(option):
    with pytest.raises(TypeError, match=option):
        LowPrecision("bf16_with_fp8_rowwise_mixed", **{option: 1})
