"""The ``torch`` backend: the FP8 GEMMs of ``torch._scaled_mm`` on NVIDIA GPUs of compute capability 8.9 and up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from nemo_lowprec.chart.recipe import Recipe
from nemo_lowprec.compute.activations import Activation
from nemo_lowprec.compute.backends import fused_activations
from nemo_lowprec.compute.backends.base import (
    NormKind,
    Orientation,
    Packing,
    QuantizedOperand,
    half_matmul,
    is_transformed,
)
from nemo_lowprec.compute.backends.packing import TwoCopies
from nemo_lowprec.compute.backends.reference import ReferenceBackend
from nemo_lowprec.compute.norm_function import fused_norm
from nemo_lowprec.compute.operands import Operand
from nemo_lowprec.compute.residual import NormCall
from nemo_lowprec.kernels.fp8_gemm import PER_TENSOR, gemm
from nemo_lowprec.kernels.loader import (
    fused_kernels,
    join_kernels,
    norm_kernels,
    sum_kernels,
    transpose_kernels,
)
from nemo_lowprec.tensors import Fp8Weight


class ScaledMMBackend(ReferenceBackend):
    """Per-tensor scales; quantization by a fused kernel where there is Triton, GEMMs on tensor cores."""

    name = "torch"
    ignores_autocast = True
    # Which scales the operands have in GEMMs with the weight, and in the GEMM of its gradient.
    scales_of_weight = scales_of_wgrad = PER_TENSOR

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

    def from_storage(self, weight: Fp8Weight, *, rowwise: bool, columnwise: bool) -> QuantizedOperand:
        data, scale_inv = weight.data_fp8, weight.scale_inv
        kernels = transpose_kernels() if columnwise and data.is_cuda and data.is_contiguous() else None
        if kernels is None:
            return super().from_storage(weight, rowwise=rowwise, columnwise=columnwise)
        flipped = Orientation(kernels.transpose(data), scale_inv, None)
        return QuantizedOperand(Orientation(data, scale_inv, None) if rowwise else None, flipped)

    def quantize(self, values: Tensor, operand: Operand, *, rowwise: bool, columnwise: bool, record: bool) -> Any:
        return self._quantize(values, operand, rowwise, columnwise, record, None)

    def quantize_grad(
        self, values: Tensor, operand: Operand, *, rowwise: bool, columnwise: bool, record: bool, sums: bool
    ) -> tuple[Any, Tensor | None]:
        kernels, adding = (fused_kernels(), sum_kernels()) if sums and values.is_cuda else (None, None)
        if kernels is None or adding is None or values.dtype == torch.float32:
            return super().quantize_grad(
                values, operand, rowwise=rowwise, columnwise=columnwise, record=record, sums=sums
            )
        parts = kernels.new_sums(values)
        return self._quantize(values, operand, rowwise, columnwise, record, parts), adding.add_up(parts)[0]

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
        return joined, _oriented(row, col, scale_inv), added

    def quantize_parts(
        self, parts: Sequence[Tensor], operand: Operand, *, rowwise: bool, columnwise: bool, record: bool, sums: bool
    ) -> tuple[Any, Tensor | None]:
        kernels, adding, slot = fused_kernels(), sum_kernels(), operand.slot
        how = {"rowwise": rowwise, "columnwise": columnwise, "record": record, "sums": sums}
        direct = len(parts) > 1 and parts[0].is_cuda and parts[0].dtype != torch.float32
        if not direct or kernels is None or adding is None or slot is None or slot.cold:
            return super().quantize_parts(parts, operand, **how)
        rows, widths = len(parts[0]), [part.shape[1] for part in parts]
        row, col, scale_inv = _new_operand(parts[0], rows, sum(widths), operand, rowwise, columnwise)
        partial = [kernels.new_sums(part) if sums else None for part in parts]
        for part, into, flipped, own in zip(
            parts, _split(row, widths, 1), _split(col, widths, 0), partial, strict=True
        ):
            kernels.quantize(
                part, slot.scale, operand.fmt, rowwise, columnwise, slot.amax if record else None, out=into, sums=own,
                flipped_out=flipped, scale_inv=scale_inv,
            )  # fmt: skip
        added = adding.add_up(torch.cat(partial, 2))[0] if sums else None  # type: ignore[arg-type]
        return _oriented(row, col, scale_inv), added

    def quantize_weights(self, weights: Sequence[Tensor], operand: Operand, *, rowwise: bool, columnwise: bool) -> Any:
        kernels = fused_kernels() if weights[0].is_cuda else None
        if kernels is None or operand.slot is None:
            return super().quantize_weights(weights, operand, rowwise=rowwise, columnwise=columnwise)
        heights, ins = [len(weight) for weight in weights], weights[0].shape[1]
        row, col, scale_inv = _new_operand(weights[0], sum(heights), ins, operand, rowwise, columnwise)
        for weight, into, flipped in zip(weights, _split(row, heights, 0), _split(col, heights, 1), strict=True):
            kernels.quantize(
                weight, operand.slot.scale, operand.fmt, rowwise, columnwise, out=into, flipped_out=flipped,
                scale_inv=scale_inv,
            )  # fmt: skip
        return _oriented(row, col, scale_inv)

    def _quantize(
        self, values: Tensor, operand: Operand, rowwise: bool, columnwise: bool, record: bool, sums: Tensor | None
    ) -> Any:
        kernels = fused_kernels() if values.is_cuda else None
        if kernels is None:
            return self._orient(self._per_tensor(values, operand, record), rowwise, columnwise)
        slot, fmt = operand.slot, operand.fmt
        if slot is None:
            row, col, scale_inv = kernels.quantize_current(values, fmt, operand.margin, rowwise, columnwise, sums=sums)
        elif slot.cold:  # ``operand.scale`` records its amax, the kernel any other amax
            scale = operand.scale(kernels.amax(values), record)
            row, col, scale_inv = kernels.quantize(values, scale, fmt, rowwise, columnwise, sums=sums)
        else:
            row, col, scale_inv = kernels.quantize(
                values, slot.scale, fmt, rowwise, columnwise, slot.amax if record else None, sums=sums
            )
        return _oriented(row, col, scale_inv)

    def fuses(self, activation: Activation) -> bool:
        return fused_activations.is_faster(activation)

    def activate(
        self, activation: Activation, tensors: tuple[Tensor, ...], operand: Operand, *, columnwise: bool, record: bool,
        half: bool = True,
    ) -> tuple[Tensor | None, Any]:  # fmt: skip
        made = fused_activations.activate(activation, tensors, operand, columnwise, record, half)
        if made is None:
            return super().activate(activation, tensors, operand, columnwise=columnwise, record=record, half=half)
        return made.half, _operand(made)

    def activate_backward(
        self, activation: Activation, grad: Tensor, tensors: tuple[Tensor, ...], readers: list[Any], half: bool = True
    ) -> list[tuple[Tensor | None, Any, Tensor | None]]:
        found = fused_activations.activate_backward(activation, grad, tensors, readers, half)
        if found is None:
            return super().activate_backward(activation, grad, tensors, readers, half)
        return [(made.half, None if made.scale_inv is None else _operand(made), made.sums) for made in found]

    def fprop(self, x: Any, weight: Any, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
        a, b = x.rowwise, weight.rowwise
        if bias is None or out_dtype == torch.float32:  # the epilogue adds half biases only
            out = gemm(a.data, b.data, a.scale_inv, b.scale_inv, out_dtype, True)
            return out if bias is None else out + bias.float()
        half = bias if bias.dtype == out_dtype else bias.to(out_dtype)
        return gemm(a.data, b.data, a.scale_inv, b.scale_inv, out_dtype, True, half)

    def dgrad(self, grad_output: Any, weight: Any, out_dtype: torch.dtype, total: Tensor | None = None) -> Tensor:
        a, b = grad_output.rowwise, weight.columnwise
        return gemm(a.data, b.data, a.scale_inv, b.scale_inv, out_dtype, self.fast_accum, None, None, total)

    def wgrad(self, grad_output: Any, x: Any, out_dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
        a, b = grad_output.columnwise, x.columnwise
        return gemm(a.data, b.data, a.scale_inv, b.scale_inv, out_dtype, self.fast_accum, None, out)

    def packing(self, operand: Operand) -> Packing | None:
        return TwoCopies()

    def norm(self, x: Tensor, weight: Tensor | None, bias: Tensor | None, kind: NormKind, out: torch.dtype) -> Tensor:
        # Of FP32 input the kernels write no FP32 result, and they add the gradients of the parameters up in the pass
        # that computes the input's.
        kernels = norm_kernels() if x.is_cuda else None
        if kernels is None or is_transformed() or kind.shape != x.shape[-1:] or not kernels.fits(x, weight, bias, out):
            return super().norm(x, weight, bias, kind, out)
        return fused_norm(kernels, x, weight, bias, kind, out)

    def norm_call(self, weight: Tensor, bias: Tensor | None, kind: NormKind, out: torch.dtype) -> NormCall | None:
        kernels = norm_kernels() if weight.is_cuda else None
        return None if kernels is None else NormCall(kernels, weight, bias, kind, out)

    def matmul(self, a: Tensor, b: Tensor, out_dtype: torch.dtype) -> Tensor:
        return half_matmul(a, b, out_dtype)


def _operand(made: Any) -> QuantizedOperand:
    """What a kernel has quantized with a scale per tensor."""
    return _oriented(made.row, made.col, made.scale_inv)


def _oriented(row: Tensor | None, col: Tensor | None, scale_inv: Tensor) -> QuantizedOperand:
    return QuantizedOperand(
        None if row is None else Orientation(row, scale_inv, None),
        None if col is None else Orientation(col, scale_inv, None),
    )


def _new_operand(
    like: Tensor, rows: int, cols: int, operand: Operand, rowwise: bool, columnwise: bool
) -> tuple[Tensor | None, Tensor | None, Tensor]:
    """Uninitialised rowwise data [rows, cols], columnwise data [cols, rows] and 1 / scale."""
    dtype = operand.fmt.dtype
    return (
        like.new_empty((rows, cols), dtype=dtype) if rowwise else None,
        like.new_empty((cols, rows), dtype=dtype) if columnwise else None,
        like.new_empty(1, dtype=torch.float32),
    )


def _split(data: Tensor | None, sizes: list[int], dim: int) -> Sequence[Tensor | None]:
    return [None] * len(sizes) if data is None else data.split(sizes, dim)
