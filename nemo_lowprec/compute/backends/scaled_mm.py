"""The ``torch`` backend: ``torch._scaled_mm`` on NVIDIA GPUs of compute capability 8.9 and up, without TE."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from nemo_lowprec.compute.backends.base import Orientation, Packing, QuantizedOperand, half_matmul
from nemo_lowprec.compute.backends.packing import TwoCopies
from nemo_lowprec.compute.backends.reference import ReferenceBackend
from nemo_lowprec.compute.operands import Operand
from nemo_lowprec.kernels.loader import fused_kernels, join_kernels
from nemo_lowprec.options import Recipe


class ScaledMMBackend(ReferenceBackend):
    """Per-tensor scales; quantization by a fused kernel where there is Triton, GEMMs on tensor cores."""

    name = "torch"
    ignores_autocast = True

    @classmethod
    def unavailable(cls, recipe: Recipe | None) -> str | None:
        if not torch.cuda.is_available() or torch.version.cuda is None:
            return "backend='torch' needs an NVIDIA GPU; use backend='reference' on this machine"
        if torch.cuda.get_device_capability() < (8, 9):
            major, minor = torch.cuda.get_device_capability()
            return f"FP8 needs compute capability 8.9 or higher, this GPU has {major}.{minor}; use backend='reference'"
        if recipe is not None and recipe.scaling not in ("delayed", "current"):
            return f"backend='torch' has no {recipe.scaling} scaling; install transformer-engine or use another level"
        return None

    @staticmethod
    def _orient(part: Orientation, rowwise: bool, columnwise: bool) -> QuantizedOperand:
        # Hopper's FP8 GEMM contracts the contiguous dimension of both operands, so columnwise data are a copy.
        return QuantizedOperand(
            Orientation(part.data.contiguous(), part.scale_inv, None) if rowwise else None,
            Orientation(part.data.t().contiguous(), part.scale_inv, None) if columnwise else None,
        )

    def quantize(self, values: Tensor, operand: Operand, *, rowwise: bool, columnwise: bool, record: bool) -> Any:
        return self._quantize(values, operand, rowwise, columnwise, record, None)

    def quantize_grad(
        self, values: Tensor, operand: Operand, *, rowwise: bool, columnwise: bool, record: bool, sums: bool
    ) -> tuple[Any, Tensor | None]:
        kernels = fused_kernels() if sums and values.is_cuda else None
        if kernels is None or values.dtype == torch.float32:
            return super().quantize_grad(
                values, operand, rowwise=rowwise, columnwise=columnwise, record=record, sums=sums
            )
        parts = kernels.new_sums(values)
        return self._quantize(values, operand, rowwise, columnwise, record, parts), parts.sum(0)

    def join_gradients(
        self, parts: Sequence[Tensor], operand: Operand, *, rowwise: bool, columnwise: bool, record: bool, sums: bool
    ) -> tuple[Tensor, Any, Tensor | None]:
        kernels, slot = join_kernels() if parts[0].is_cuda else None, operand.slot
        if kernels is None or slot is None or slot.cold or not kernels.fits(parts):
            return super().join_gradients(
                parts, operand, rowwise=rowwise, columnwise=columnwise, record=record, sums=sums
            )
        joined, row, col, scale_inv, added = kernels.join_quantized(
            parts, slot.scale, operand.fmt, rowwise, columnwise, slot.amax if record else None, sums
        )
        data = QuantizedOperand(
            None if row is None else Orientation(row, scale_inv, None),
            None if col is None else Orientation(col, scale_inv, None),
        )
        return joined, data, added

    def _quantize(
        self, values: Tensor, operand: Operand, rowwise: bool, columnwise: bool, record: bool, sums: Tensor | None
    ) -> Any:
        kernels = fused_kernels() if values.is_cuda else None
        if kernels is None:
            return self._orient(self._per_tensor(values, operand, record), rowwise, columnwise)
        slot, fmt = operand.slot, operand.fmt
        if slot is None:
            row, col, scale_inv = kernels.quantize_current(values, fmt, operand.margin, rowwise, columnwise, sums=sums)
        else:  # ``operand.scale`` records the amax of a cold slot, the kernel any other amax
            scale = operand.scale(kernels.amax(values), record) if slot.cold else slot.scale
            recorded = slot.amax if record and not slot.cold else None
            row, col, scale_inv = kernels.quantize(values, scale, fmt, rowwise, columnwise, recorded, sums=sums)
        return QuantizedOperand(
            None if row is None else Orientation(row, scale_inv, None),
            None if col is None else Orientation(col, scale_inv, None),
        )

    def fprop(self, x: Any, weight: Any, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
        if bias is None or out_dtype == torch.float32:  # the epilogue adds half biases only
            out = _gemm(x.rowwise, weight.rowwise, out_dtype, fast_accum=True)
            return out if bias is None else out + bias.float()
        half = bias if bias.dtype == out_dtype else bias.to(out_dtype)
        return _gemm(x.rowwise, weight.rowwise, out_dtype, fast_accum=True, bias=half)

    def dgrad(self, grad_output: Any, weight: Any, out_dtype: torch.dtype, total: Tensor | None = None) -> Tensor:
        dx = _gemm(grad_output.rowwise, weight.columnwise, out_dtype)
        return dx if total is None else dx.add_(total)  # _scaled_mm adds nothing to its result

    def wgrad(self, grad_output: Any, x: Any, out_dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
        return _gemm(grad_output.columnwise, x.columnwise, out_dtype, out=out)

    def packing(self, operand: Operand) -> Packing | None:
        return TwoCopies()

    def matmul(self, a: Tensor, b: Tensor, out_dtype: torch.dtype) -> Tensor:
        return half_matmul(a, b, out_dtype)


def _gemm(
    a: Orientation | None,
    b: Orientation | None,
    out_dtype: torch.dtype,
    fast_accum: bool = False,
    bias: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    assert a is not None and b is not None, "the operand was not quantized in the orientation that this GEMM needs"
    how: dict[str, Any] = {} if out is None else {"out": out}
    return torch._scaled_mm(
        a.data, b.data.t(), a.scale_inv, b.scale_inv, bias=bias, out_dtype=out_dtype, use_fast_accum=fast_accum, **how
    )
