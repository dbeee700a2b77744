"""The ``torch`` backend: ``torch._scaled_mm`` on NVIDIA GPUs of compute capability 8.9 and up, without TE."""

from __future__ import annotations

import torch
from torch import Tensor

from nemo_lowprec.compute.backends.base import Orientation, QuantizedOperand
from nemo_lowprec.compute.backends.reference import ReferenceBackend
from nemo_lowprec.compute.operands import Operand
from nemo_lowprec.kernels.loader import fused_kernels
from nemo_lowprec.options import Recipe


class ScaledMMBackend(ReferenceBackend):
    """Per-tensor scales; quantization by a fused kernel where there is Triton, GEMMs on tensor cores."""

    name = "torch"
    row_multiple = 16
    scalings = frozenset({"delayed", "current"})

    @classmethod
    def unavailable(cls, recipe: Recipe | None) -> str | None:
        if not torch.cuda.is_available() or torch.version.cuda is None:
            return "backend='torch' needs an NVIDIA GPU; use backend='reference' on this machine"
        if torch.cuda.get_device_capability() < (8, 9):
            major, minor = torch.cuda.get_device_capability()
            return f"FP8 needs compute capability 8.9 or higher, this GPU has {major}.{minor}; use backend='reference'"
        if recipe is not None and recipe.scaling not in cls.scalings:
            return f"backend='torch' has no {recipe.scaling} scaling; install transformer-engine or use another level"
        return None

    @staticmethod
    def _orient(part: Orientation, rowwise: bool, columnwise: bool) -> QuantizedOperand:
        # Hopper's FP8 GEMM contracts the contiguous dimension of both operands, so columnwise data are a copy.
        row = Orientation(part.data.contiguous(), part.scale_inv, None) if rowwise else None
        return QuantizedOperand(
            row, Orientation(part.data.t().contiguous(), part.scale_inv, None) if columnwise else None
        )

    def quantize(
        self, values: Tensor, operand: Operand, *, rowwise: bool, columnwise: bool, record: bool
    ) -> QuantizedOperand:
        kernels = fused_kernels() if values.is_cuda else None
        if kernels is None:
            return self._orient(self._per_tensor(values, operand, record), rowwise, columnwise)
        slot, fmt = operand.slot, operand.fmt
        if slot is None:
            row, col, scale_inv = kernels.quantize_current(values, fmt, operand.margin, rowwise, columnwise)
        elif slot.cold:
            amax = kernels.amax(values)
            if record:
                slot.record(amax)
            scale = slot.current_scale(amax)
            row, col, scale_inv = kernels.quantize(values, scale, fmt, rowwise, columnwise, None)
        else:
            recorded = slot.amax if record else None
            row, col, scale_inv = kernels.quantize(values, slot.scale, fmt, rowwise, columnwise, recorded)
        return QuantizedOperand(
            None if row is None else Orientation(row, scale_inv, None),
            None if col is None else Orientation(col, scale_inv, None),
        )

    def fprop(
        self, x: QuantizedOperand, weight: QuantizedOperand, bias: Tensor | None, out_dtype: torch.dtype
    ) -> Tensor:
        out = _gemm(x.rowwise, weight.rowwise, out_dtype, fast_accum=True)
        return out if bias is None else out + bias.to(out_dtype)

    def dgrad(
        self,
        grad_output: QuantizedOperand,
        weight: QuantizedOperand,
        out_dtype: torch.dtype,
        total: Tensor | None = None,
    ) -> Tensor:
        dx = _gemm(grad_output.rowwise, weight.columnwise, out_dtype)
        return dx if total is None else dx.add_(total)  # _scaled_mm adds nothing to its result

    def wgrad(self, grad_output: QuantizedOperand, x: QuantizedOperand, out_dtype: torch.dtype) -> Tensor:
        return _gemm(grad_output.columnwise, x.columnwise, out_dtype)

    def matmul(self, a: Tensor, b: Tensor, out_dtype: torch.dtype) -> Tensor:
        return half_matmul(a, b, out_dtype)


def half_matmul(a: Tensor, b: Tensor, out_dtype: torch.dtype) -> Tensor:
    """Half-precision GEMM [m, k] @ [k, n]; an FP32 result is the accumulator, not rounded to half before.

    An operand that requires a gradient gives a rounded result: torch's GEMM with ``out_dtype`` may have no derivative.
    """
    mixed = out_dtype == torch.float32 and a.dtype != out_dtype and a.is_cuda and a.numel() > 0 and b.numel() > 0
    mixed = mixed and not (torch.is_grad_enabled() and (a.requires_grad or b.requires_grad))
    if mixed and "dtype" in torch.ops.aten.mm.overloads():
        return torch.mm(a, b, out_dtype=out_dtype)
    return torch.mm(a, b).to(out_dtype)


def _gemm(a: Orientation | None, b: Orientation | None, out_dtype: torch.dtype, fast_accum: bool = False) -> Tensor:
    assert a is not None and b is not None, "the operand was not quantized in the orientation that this GEMM needs"
    if a.data.numel() == 0 or b.data.numel() == 0:
        return a.data.new_zeros(a.data.shape[0], b.data.shape[0], dtype=out_dtype)
    return torch._scaled_mm(
        a.data, b.data.t(), a.scale_inv.view(()), b.scale_inv.view(()), out_dtype=out_dtype, use_fast_accum=fast_accum
    )
