"""The ``torch`` backend's operands with 1x128 and 128x128 blocks, without a GPU: layout, packing, torch's own GEMM."""

import pytest
import torch

from nemo_lowprec.chart.recipe import Recipe
from nemo_lowprec.compute.backends import choose_backend
from nemo_lowprec.compute.backends.base import Orientation, QuantizedOperand
from nemo_lowprec.compute.backends.reference import ReferenceBackend
from nemo_lowprec.compute.backends.scaled_mm_blocks import ScaledBlocksBackend
from nemo_lowprec.compute.operands import OPERANDS, operand_of
from nemo_lowprec.formats import BlockScaledMatrix, dequantize_blocks
from nemo_lowprec.formats.gemm_block_scaling import CUBLAS_ROW_128, CUBLAS_SQUARE_128, SQUARE_128, scales_shape

RECIPE = Recipe("blockwise", fp8="e4m3")
BOTH = {"rowwise": True, "columnwise": True, "record": True}


def laid_out(part):
    """A reference operand's orientation with the scales as cuBLASLt reads them."""
    square = part.layout == SQUARE_128
    scales = torch.full(scales_shape(square, *part.data.shape), float("nan"))
    if square:
        scales[:, : part.scale_inv.shape[1]] = part.scale_inv
    else:
        scales.copy_(part.scale_inv.t())
    return Orientation(part.data.contiguous(), scales, CUBLAS_SQUARE_128 if square else CUBLAS_ROW_128)


def operands(rows, ins, outs):
    """(of the reference, laid out as cuBLASLt reads them) of a layer's input, weight and output gradient."""
    generator = torch.Generator().manual_seed(0)
    for kind, shape in zip(OPERANDS, ((rows, ins), (outs, ins), (rows, outs)), strict=True):
        made = ReferenceBackend().quantize(torch.randn(shape, generator=generator), operand_of(RECIPE, kind), **BOTH)
        yield made, QuantizedOperand(laid_out(made.rowwise), laid_out(made.columnwise))


@pytest.mark.parametrize("shape", [(16, 16, 16), (144, 272, 400), (128, 640, 256)])
def test_without_cublas_the_values_are_multiplied(shape):
    assert OPERANDS == ("input", "weight", "grad_output")
    (x, x8), (w, w8), (dy, dy8) = operands(*shape)
    rows, ins, outs = shape
    reference, own = ReferenceBackend(), ScaledBlocksBackend()
    for bias, dtype in ((None, torch.float32), (torch.ones(outs), torch.float32), (torch.ones(outs), torch.bfloat16)):
        torch.testing.assert_close(own.fprop(x8, w8, bias, dtype), reference.fprop(x, w, bias, dtype), rtol=0, atol=0)
    total = torch.ones(rows, ins)
    wanted = reference.dgrad(dy, w, torch.float32, total)
    assert torch.equal(own.dgrad(dy8, w8, torch.float32, total), wanted) and torch.equal(total, wanted)
    out = torch.empty(outs, ins)
    assert own.wgrad(dy8, x8, torch.float32, out) is out
    assert torch.equal(out, reference.wgrad(dy, x, torch.float32))


@pytest.mark.parametrize("rowwise, columnwise", [(True, True), (True, False), (False, True)])
def test_packed_operands_come_back(rowwise, columnwise):
    backend = ScaledBlocksBackend()
    for kind, (_, made) in zip(OPERANDS, operands(144, 272, 400), strict=True):
        part = QuantizedOperand(made.rowwise if rowwise else None, made.columnwise if columnwise else None)
        packing = backend.packing(operand_of(RECIPE, kind))
        tensors = packing.pack(part)
        like = packing.like(torch.empty(made.rowwise.data.shape), operand_of(RECIPE, kind), rowwise, columnwise)
        assert [(t.shape, t.dtype) for t in like] == [(t.shape, t.dtype) for t in tensors]
        again = packing.unpack(tensors, rowwise, columnwise)
        for one, two in ((part.rowwise, again.rowwise), (part.columnwise, again.columnwise)):
            assert (one is None) == (two is None)
            assert one is None or (one.data is two.data and one.scale_inv is two.scale_inv and one.layout == two.layout)
        if columnwise:
            assert packing.columnwise(tensors, rowwise) == packing.pack(QuantizedOperand(None, made.columnwise))


def test_scales_are_laid_out_as_cublas_reads_them():
    assert scales_shape(False, 48, 272) == (3, 48)
    assert scales_shape(True, 272, 640) == (3, 8) and scales_shape(True, 16, 512) == (1, 4)
    for wanted, made in operands(144, 272, 400):
        for one, two in ((wanted.rowwise, made.rowwise), (wanted.columnwise, made.columnwise)):
            values = [
                dequantize_blocks(BlockScaledMatrix(part.data, part.scale_inv, part.layout)) for part in (one, two)
            ]
            assert torch.equal(*values)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_it_needs_a_gpu():
    with pytest.raises(ValueError, match=r"backend='torch' cannot run here: .*NVIDIA GPU"):
        choose_backend("torch", RECIPE, torch.device("cpu"))
