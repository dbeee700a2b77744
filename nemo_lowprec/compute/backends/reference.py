"""The reference backend: plain torch on any device. It defines the numerics; other backends are tested against it.

Operands are rounded to the recipe's format and multiplied in FP32; half-precision GEMMs round operands and results
to half and accumulate in FP32, as tensor cores do. (On CPUs without half-precision instructions this is also
10 to 100 times faster than torch's own half GEMMs.)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nemo_lowprec.chart.recipe import Recipe
from nemo_lowprec.compute.backends.base import Backend, Orientation, Packing, QuantizedOperand
from nemo_lowprec.compute.backends.packing import Blocks, SharedData
from nemo_lowprec.compute.operands import Operand
from nemo_lowprec.formats import (
    BlockScaledMatrix,
    cast,
    compute_amax,
    decode,
    dequantize_blocks,
    quantize_blocks,
)
from nemo_lowprec.tensors import Fp8Weight


class ReferenceBackend(Backend):
    """Quantizes with ``formats`` to ``QuantizedOperand``, multiplies in FP32."""

    name = "reference"
    joins = True
    row_multiple = 16  # so that the Hadamard blocks of NVFP4's wgrad are whole; zero rows change nothing

    @classmethod
    def unavailable(cls, recipe: Recipe | None) -> str | None:
        return None

    def quantize(self, values: Tensor, operand: Operand, *, rowwise: bool, columnwise: bool, record: bool) -> Any:
        if operand.layout is None:
            part = self._per_tensor(values, operand, record)
            return self._orient(part, rowwise, columnwise)
        return QuantizedOperand(
            self._blocks(values, operand, columnwise=False) if rowwise else None,
            self._blocks(values.t(), operand, columnwise=True) if columnwise else None,
        )

    def _per_tensor(self, values: Tensor, operand: Operand, record: bool) -> Orientation:
        scale = operand.scale(compute_amax(values), record)
        return Orientation(cast(values.float() * scale, operand.fmt), scale.reciprocal(), None)

    def _blocks(self, values: Tensor, operand: Operand, columnwise: bool) -> Orientation:
        assert operand.layout is not None
        generator = None
        if operand.scaling == "nvfp4":
            if columnwise and operand.kind != "weight":
                values = _hadamard(values.float())
            if operand.kind == "grad_output":
                generators = torch.cuda.default_generators if values.is_cuda else (torch.default_generator,)
                generator = generators[values.device.index or 0]
        quantized = quantize_blocks(values, operand.fmt, operand.layout, generator)
        return Orientation(quantized.data, quantized.scale_inv, operand.layout)

    @staticmethod
    def _orient(part: Orientation, rowwise: bool, columnwise: bool) -> QuantizedOperand:
        transposed = Orientation(part.data.t(), part.scale_inv, None)
        return QuantizedOperand(part if rowwise else None, transposed if columnwise else None)

    def from_storage(self, weight: Fp8Weight, *, rowwise: bool, columnwise: bool) -> QuantizedOperand:
        return self._orient(Orientation(weight.data_fp8, weight.scale_inv, None), rowwise, columnwise)

    def fprop(self, x: Any, weight: Any, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
        out = multiply(x.rowwise, weight.rowwise)
        return (out if bias is None else out + bias.float()).to(out_dtype)

    def dgrad(self, grad_output: Any, weight: Any, out_dtype: torch.dtype, total: Tensor | None = None) -> Tensor:
        dx = multiply(grad_output.rowwise, weight.columnwise)
        return (dx if total is None else dx + total.float()).to(out_dtype)

    def wgrad(self, grad_output: Any, x: Any, out_dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
        dw = multiply(grad_output.columnwise, x.columnwise).to(out_dtype)
        return dw if out is None else out.copy_(dw)

    def packing(self, operand: Operand) -> Packing | None:
        return SharedData() if operand.layout is None else Blocks(operand.layout)

    def matmul(self, a: Tensor, b: Tensor, out_dtype: torch.dtype) -> Tensor:
        return torch.mm(a.float(), b.float()).to(out_dtype)


def multiply(a: Orientation | None, b: Orientation | None) -> Tensor:
    """FP32 [m, n] = a [m, k] @ b [n, k].T."""
    assert a is not None and b is not None, "the operand was not quantized in the orientation that this GEMM needs"
    if a.layout is None and b.layout is None:
        return torch.mm(decode(a.data), decode(b.data).t()) * (a.scale_inv * b.scale_inv)
    return torch.mm(_values(a), _values(b).t())


def _values(part: Orientation) -> Tensor:
    if part.layout is None:
        return decode(part.data) * part.scale_inv
    return dequantize_blocks(BlockScaledMatrix(part.data, part.scale_inv, part.layout))


def _hadamard(values: Tensor) -> Tensor:
    """Rotate groups of 16 along the last dimension, which spreads outliers. In wgrad both rotations cancel."""
    matrix = torch.ones(1, 1, device=values.device, dtype=torch.float32)
    for _ in range(4):
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return (values.reshape(-1, 16) @ (matrix / 4)).reshape(values.shape)
