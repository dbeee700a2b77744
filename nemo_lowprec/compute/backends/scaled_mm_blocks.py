"""The ``torch`` backend for scales of 1x128 and 128x128 blocks, on Hopper GPUs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nemo_lowprec.chart.recipe import Recipe
from nemo_lowprec.compute.backends.base import Orientation, Packing, QuantizedOperand
from nemo_lowprec.compute.backends.packing import TwoCopiesInBlocks
from nemo_lowprec.compute.backends.reference import ReferenceBackend, multiply
from nemo_lowprec.compute.backends.scaled_mm import ScaledMMBackend
from nemo_lowprec.compute.operands import Operand
from nemo_lowprec.formats.gemm_block_scaling import (
    CUBLAS_ROW_128,
    CUBLAS_SQUARE_128,
    ROW_128,
    SQUARE_128,
    BlockLayout,
)
from nemo_lowprec.kernels.fp8_gemm import ROWS, ROWS_AND_SQUARES, gemm_of_blocks, is_supported
from nemo_lowprec.kernels.loader import tile_kernels

_LAYOUTS = {ROW_128: CUBLAS_ROW_128, SQUARE_128: CUBLAS_SQUARE_128}


class ScaledBlocksBackend(ScaledMMBackend):
    """Quantizes by the kernel of ``triton_tiles`` and multiplies by cuBLASLt."""

    joins = False
    scales_of_weight, scales_of_wgrad = ROWS_AND_SQUARES, ROWS

    @classmethod
    def unavailable(cls, recipe: Recipe | None) -> str | None:
        if reason := super().unavailable(None):
            return reason
        if torch.cuda.get_device_capability() != (9, 0):
            return "backend='torch' multiplies blocks on Hopper GPUs only (compute capability 9.0)"
        if tuple(map(int, (torch.version.cuda or "0.0").split(".")[:2])) < (12, 9):
            return "backend='torch' multiplies blocks by a torch that is built for CUDA 12.9 or later"
        there = is_supported() and tile_kernels() is not None
        return None if there else "backend='torch' multiplies blocks with Triton and a C compiler only"

    def quantize(self, values: Tensor, operand: Operand, *, rowwise: bool, columnwise: bool, record: bool) -> Any:
        assert operand.layout is not None
        layout = _LAYOUTS[operand.layout]
        row, row_scale, col, col_scale = tile_kernels().quantize(  # type: ignore[union-attr]
            values, operand.fmt, layout == CUBLAS_SQUARE_128, rowwise, columnwise
        )
        return QuantizedOperand(_part(row, row_scale, layout), _part(col, col_scale, layout))

    def quantize_grad(
        self, values: Tensor, operand: Operand, *, rowwise: bool, columnwise: bool, record: bool, sums: bool
    ) -> tuple[Any, Tensor | None]:
        return ReferenceBackend.quantize_grad(
            self, values, operand, rowwise=rowwise, columnwise=columnwise, record=record, sums=sums
        )

    def fprop(self, x: Any, weight: Any, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
        in_gemm = bias is not None and out_dtype != torch.float32  # the epilogue adds half biases only
        half = bias.to(out_dtype) if in_gemm and bias is not None else None
        out = self._multiply(x.rowwise, weight.rowwise, out_dtype, True, half)
        return out if bias is None or in_gemm else out + bias.float()

    def dgrad(self, grad_output: Any, weight: Any, out_dtype: torch.dtype, total: Tensor | None = None) -> Tensor:
        return self._multiply(grad_output.rowwise, weight.columnwise, out_dtype, self.fast_accum, total=total)

    def wgrad(self, grad_output: Any, x: Any, out_dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
        return self._multiply(grad_output.columnwise, x.columnwise, out_dtype, self.fast_accum, out=out)

    def _multiply(
        self, a: Orientation, b: Orientation, out_dtype: torch.dtype, fast_accum: bool, bias: Tensor | None = None,
        out: Tensor | None = None, total: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """``gemm`` of two operands; ``fast_accum`` has no effect on blocks, whose products are added up in FP32."""
        scales = ROWS_AND_SQUARES if b.layout == CUBLAS_SQUARE_128 else ROWS
        made = gemm_of_blocks(a.data, b.data, a.scale_inv, b.scale_inv, scales, out_dtype, bias, out, total)
        if made is not None:
            return made
        found = multiply(a, b)
        found = found if bias is None else found + bias.float()
        if total is not None:
            return total.add_(found)
        return found.to(out_dtype) if out is None else out.copy_(found)

    def packing(self, operand: Operand) -> Packing | None:
        assert operand.layout is not None
        return TwoCopiesInBlocks(_LAYOUTS[operand.layout])


def _part(data: Tensor | None, scale_inv: Tensor | None, layout: BlockLayout) -> Orientation | None:
    return None if data is None or scale_inv is None else Orientation(data, scale_inv, layout)
