"""The ``torch`` backend for a scale per row of the contracted matrices (rowwise scaling)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nemo_lowprec.chart.recipe import Recipe
from nemo_lowprec.compute.backends.base import Orientation, Packing, QuantizedOperand
from nemo_lowprec.compute.backends.packing import TwoCopiesInBlocks
from nemo_lowprec.compute.backends.reference import ReferenceBackend
from nemo_lowprec.compute.backends.scaled_mm import ScaledMMBackend
from nemo_lowprec.compute.backends.scaled_mm_blocks import ScaledBlocksBackend
from nemo_lowprec.compute.operands import Operand
from nemo_lowprec.formats.gemm_block_scaling import WHOLE_ROW
from nemo_lowprec.kernels.fp8_gemm import OUTER, gemm_of_rows
from nemo_lowprec.kernels.loader import row_kernels


class ScaledRowsBackend(ScaledBlocksBackend):
    """Quantizes by the kernels of ``triton_rows``; multiplies by cuBLASLt, or by torch's kernel where it cannot."""

    scales_of_weight = scales_of_wgrad = OUTER

    @classmethod
    def unavailable(cls, recipe: Recipe | None) -> str | None:
        return ScaledMMBackend.unavailable(None)

    def quantize(self, values: Tensor, operand: Operand, *, rowwise: bool, columnwise: bool, record: bool) -> Any:
        kernels = row_kernels() if values.is_cuda else None
        if kernels is None:
            made = ReferenceBackend.quantize(
                self, values, operand, rowwise=rowwise, columnwise=columnwise, record=record
            )
            return QuantizedOperand(_contiguous(made.rowwise), _contiguous(made.columnwise))
        row, row_scale, col, col_scale = kernels.quantize(values, operand.fmt, rowwise, columnwise)
        return QuantizedOperand(
            Orientation(row, row_scale, WHOLE_ROW) if rowwise else None,
            Orientation(col, col_scale, WHOLE_ROW) if columnwise else None,
        )

    def _multiply(
        self, a: Orientation, b: Orientation, out_dtype: torch.dtype, fast_accum: bool, bias: Tensor | None = None,
        out: Tensor | None = None, total: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        return gemm_of_rows(a.data, b.data, a.scale_inv, b.scale_inv, out_dtype, fast_accum, bias, out, total)

    def packing(self, operand: Operand) -> Packing | None:
        return TwoCopiesInBlocks(WHOLE_ROW)


def _contiguous(part: Orientation | None) -> Orientation | None:
    # The FP8 GEMM contracts the contiguous dimension of both operands.
    return None if part is None else part._replace(data=part.data.contiguous(), scale_inv=part.scale_inv.contiguous())
