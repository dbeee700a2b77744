"""``FusedGemms`` for scales of blocks: 1x128 of rows, 128x128 of weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from nemo_lowprec.compute.experts.fused import FusedGemms
from nemo_lowprec.compute.experts.gate import Gate
from nemo_lowprec.compute.gemm_plan import GemmPlan
from nemo_lowprec.kernels.loader import grouped_block_kernels

BLOCK = 128


def fits(weights: Sequence[Tensor]) -> bool:
    """Whether no 128x128 elements belong to two experts, where the experts' matrices lie below each other."""
    return all(weight.shape[1] % BLOCK == 0 for weight in weights)


class FusedBlockGemms(FusedGemms):
    """``LoopGemms`` by the kernels of ``triton_grouped_blocks``; torch computes the gates."""

    def gather(
        self, values: Tensor, plan: GemmPlan, kind: str, *, rowwise: bool, columnwise: bool, record: bool
    ) -> Any:
        routing = self.routing
        self._announce(plan, kind, values)
        return grouped_block_kernels().quantize(  # type: ignore[union-attr]
            values.contiguous(), routing.order, routing.top_k, plan.operands[kind].fmt, self.tables, rowwise, columnwise
        )

    def quantize(
        self, rows: Tensor, plan: GemmPlan, kind: str, *, rowwise: bool, columnwise: bool, record: bool
    ) -> Any:
        self._announce(plan, kind, rows)
        return grouped_block_kernels().quantize(  # type: ignore[union-attr]
            rows.contiguous(), None, 1, plan.operands[kind].fmt, self.tables, rowwise, columnwise
        )

    def save(self, operand: Any, plan: GemmPlan, low: bool) -> tuple[list[Tensor | None], Any]:
        if hasattr(operand, "col_scale"):
            return [operand.col, operand.col_scale], False
        return super().save(operand, plan, low)

    def restore(self, tensors: Sequence[Tensor | None], metas: Any, plan: GemmPlan) -> Any:
        if metas is False:
            return grouped_block_kernels().Quantized(None, None, *tensors)  # type: ignore[union-attr]
        return super().restore(tensors, metas, plan)

    def fprop(self, x: Any, weight: Any, plan: GemmPlan, outs: int) -> Tensor:
        return self._times(x, weight.forward, plan)

    def dgrad(self, grad: Any, weight: Any, plan: GemmPlan, ins: int) -> Tensor:
        return self._times(grad, weight.backward, plan)

    def _times(self, rows: Any, weight: Any, plan: GemmPlan) -> Tensor:
        return grouped_block_kernels().rows_gemm(  # type: ignore[union-attr,no-any-return]
            rows.row, rows.row_scale, weight, rows.row.shape[1], self.tables, plan.half
        )

    def wgrad(
        self, grad: Any, x: Any, plan: GemmPlan, shape: torch.Size, transposed: bool, dtype: torch.dtype
    ) -> Tensor:
        a, b = (x, grad) if transposed else (grad, x)
        return grouped_block_kernels().weights_gemm(  # type: ignore[union-attr,no-any-return]
            a.col, a.col_scale, b.col, b.col_scale, self.tables, dtype
        )

    @staticmethod
    def _is_known(gate: Gate) -> bool:
        return False  # the kernels of gates have scales per tensor
