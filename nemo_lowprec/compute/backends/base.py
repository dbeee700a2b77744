"""The interface of a backend: it quantizes operands and runs the three GEMMs of a linear layer.

A GEMM that contracts an operand's last dimension reads rowwise data; a GEMM that contracts the first dimension reads
columnwise data, the transpose:

    fprop   input.rowwise [M, K]         weight.rowwise [N, K]        contracts K
    dgrad   grad_output.rowwise [M, N]   weight.columnwise [K, N]     contracts N
    wgrad   grad_output.columnwise [N, M]  input.columnwise [K, M]    contracts M
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from nemo_lowprec.chart.recipe import Recipe
from nemo_lowprec.compat.autograd import is_tracing, is_transforming
from nemo_lowprec.compute.activations import Activation
from nemo_lowprec.compute.backends.losses import gradient_of, losses_of
from nemo_lowprec.compute.operands import Operand
from nemo_lowprec.formats import E4M3
from nemo_lowprec.formats.block_scale_128 import dequantize_rows, quantize_rows
from nemo_lowprec.formats.gemm_block_scaling import BlockLayout
from nemo_lowprec.kernels.loader import block_kernels, join_kernels, loss_kernels
from nemo_lowprec.tensors import Fp8Weight


def is_transformed() -> bool:
    """Whether ``torch.func`` or ``torch.jit.trace`` is transforming the call; both know torch's operations only."""
    return is_transforming() or is_tracing()


_BLOCK_FORMATS = {"e8m0": "mxfp8", "e4m3": "nvfp4"}


def half_matmul(a: Tensor, b: Tensor, out_dtype: torch.dtype) -> Tensor:
    """Half-precision GEMM [m, k] @ [k, n]; an FP32 result is the accumulator, not rounded to half before.

    An operand that requires a gradient gives a rounded result: torch's GEMM with ``out_dtype`` may have no derivative.
    """
    mixed = out_dtype == torch.float32 and a.dtype != out_dtype and a.is_cuda and a.numel() > 0 and b.numel() > 0
    mixed = mixed and not (torch.is_grad_enabled() and (a.requires_grad or b.requires_grad))
    if mixed and "dtype" in torch.ops.aten.mm.overloads():
        return torch.mm(a, b, out_dtype=out_dtype)
    return torch.mm(a, b).to(out_dtype)


def side_by_side(parts: Sequence[Tensor]) -> Tensor:
    """Tensors [batch, tokens, heads, dim] as one, [batch, tokens, parts * heads * dim], contiguous."""
    kernels = join_kernels() if parts[0].is_cuda else None
    if kernels is not None and kernels.fits(parts):
        return kernels.join(parts)  # type: ignore[no-any-return]
    stacked = torch.stack(tuple(parts), 2)
    return torch.ops.aten._unsafe_view.default(stacked, [*stacked.shape[:2], -1])  # type: ignore[no-any-return]


class NormKind(NamedTuple):
    """What a norm computes, beside its parameters.

    Attributes:
        shape: of the last dimensions, which are normalized.
        eps: added to the mean square.
        layer: whether it is LayerNorm, which subtracts the mean; else RMSNorm.
        zero_centered: whether the factor is 1 + weight (Gemma).
    """

    shape: tuple[int, ...]
    eps: float
    layer: bool
    zero_centered: bool


def plain_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, kind: NormKind, out: torch.dtype, rms_norm: Any = None
) -> Tensor:
    """The norm by torch's operations, which defines its roundings.

    Half input is not cast; FP32 parameters are rounded to its dtype, since torch's kernels take one dtype. FP32 input
    is normalized in FP32. The result is rounded to ``out``, a parameter's gradient to the dtypes of the normalized
    values and of the parameter.

    Args:
        rms_norm: a backend's, for one dimension; None for the reference's.
    """
    half = x.dtype in (torch.float16, torch.bfloat16)
    dtype = x.dtype if half or weight is None or weight.dtype == x.dtype else torch.float32
    x, weight, bias = x.to(dtype), _of_dtype(weight, dtype), _of_dtype(bias, dtype)
    if kind.layer:
        y = F.layer_norm(x, kind.shape, weight, bias, kind.eps)
    elif len(kind.shape) == 1:
        y = (_rms_norm if rms_norm is None else rms_norm)(x, weight, kind.eps, kind.zero_centered)
    else:
        y = F.rms_norm(x, kind.shape, weight, kind.eps)
    return y.to(out)


def _of_dtype(param: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """``param`` as a tensor of ``dtype`` whose gradient has that dtype, too, whatever dtype a parameter's has."""
    if param is None or param.dtype != dtype:
        return None if param is None else param.to(dtype)
    return param.view_as(param)


def _rms_norm(x: Tensor, weight: Tensor | None, eps: float, zero_centered: bool) -> Tensor:
    if weight is not None and zero_centered:
        return F.rms_norm(x.float(), x.shape[-1:], weight.float() + 1.0, eps).to(x.dtype)
    return F.rms_norm(x, x.shape[-1:], weight, eps)


class Orientation(NamedTuple):
    """One orientation of a quantized operand.

    Attributes:
        data: [rows, contracted dimension], an 8-bit format; FP32 with E2M1 values for NVFP4 on the reference backend.
        scale_inv: FP32, [1] for a scale per tensor, else as ``layout`` says; value = data * scale_inv.
        layout: the blocks; None for a scale per tensor.
    """

    data: Tensor
    scale_inv: Tensor
    layout: BlockLayout | None


@dataclass
class QuantizedOperand:
    """A quantized operand in the orientations that its GEMMs read; None for an orientation that no GEMM reads."""

    rowwise: Orientation | None = None
    columnwise: Orientation | None = None

    def split(self, sizes: Sequence[int], dim: int) -> list[QuantizedOperand]:
        """Operands of ``sizes`` rows each (``dim`` 0), or features (``dim`` 1), in the memory of this operand."""
        parts = [
            [None] * len(sizes) if part is None else
            [part._replace(data=data) for data in part.data.split(list(sizes), place)]
            for part, place in ((self.rowwise, dim), (self.columnwise, 1 - dim))
        ]  # fmt: skip
        return [QuantizedOperand(row, col) for row, col in zip(*parts, strict=True)]


def is_whole(operand: Any) -> bool:
    """Whether both orientations are there, as matrices that a GEMM reads by their addresses."""
    if not isinstance(operand, QuantizedOperand) or operand.rowwise is None or operand.columnwise is None:
        return False
    row, col = operand.rowwise.data, operand.columnwise.data
    return row.is_contiguous() and col.is_contiguous() and not (row.data_ptr() | col.data_ptr()) % 16


class Packing(ABC):
    """How a ``QuantizedOperand`` of values [rows, features] becomes a list of tensors."""

    @abstractmethod
    def pack(self, operand: Any) -> list[Tensor]:
        """The tensors of ``operand``."""

    @abstractmethod
    def unpack(self, tensors: list[Tensor], rowwise: bool, columnwise: bool) -> Any:
        """The operand of which ``pack`` has returned ``tensors``; it has the orientations that are named."""

    @abstractmethod
    def like(self, values: Tensor, operand: Operand, rowwise: bool, columnwise: bool) -> list[Tensor]:
        """Uninitialised tensors of the shapes and dtypes that ``pack`` returns for quantized ``values``."""

    @abstractmethod
    def columnwise(self, tensors: list[Tensor], rowwise: bool) -> list[Tensor]:
        """The tensors of the columnwise orientation alone."""


def _loss_kernels(logits: Tensor, targets: Tensor) -> Any:
    kernels = loss_kernels() if logits.is_cuda else None
    return kernels if kernels is not None and kernels.fits(logits, targets) else None


class Backend(ABC):
    """Kernels behind converted layers. Stateless: scales and histories belong to the operands.

    Attributes:
        name: as in ``backend=``.
        row_multiple: GEMMs need M to be a multiple of this; the layer pads with zero rows.
        ignores_autocast: whether the FP8 GEMMs give the same results under autocast.
        joins: whether ``quantize_parts`` and ``quantize_weights`` make one ``QuantizedOperand`` of several layers'.
        fast_accum: see ``Recipe``.
    """

    name: str
    row_multiple: int = 1
    ignores_autocast: bool = False
    joins: bool = False
    fast_accum: bool = False

    def __deepcopy__(self, memo: dict[int, Any]) -> Backend:
        return self  # a backend holds nothing of a model, and modules of TE cannot be copied

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()

    @classmethod
    @abstractmethod
    def unavailable(cls, recipe: Recipe | None) -> str | None:
        """Why this machine cannot run ``recipe`` on this backend, and what to do; None where it can."""

    @abstractmethod
    def quantize(self, values: Tensor, operand: Operand, *, rowwise: bool, columnwise: bool, record: bool) -> Any:
        """Quantize ``values`` [rows, features]; with ``record`` enter the amax into the operand's history."""

    def quantize_grad(
        self, values: Tensor, operand: Operand, *, rowwise: bool, columnwise: bool, record: bool, sums: bool
    ) -> tuple[Any, Tensor | None]:
        """``quantize``, and with ``sums`` the sums of the columns of ``values``: FP32 [features]."""
        data = self.quantize(values, operand, rowwise=rowwise, columnwise=columnwise, record=record)
        return data, values.sum(0, dtype=torch.float32) if sums else None

    def join_gradients(
        self, parts: Sequence[Tensor], operand: Operand, *, rowwise: bool, columnwise: bool, record: bool, sums: bool
    ) -> tuple[Tensor, Any, Tensor | None]:
        """``side_by_side`` of gradients, and what ``quantize_grad`` makes of the result as [rows, features]."""
        joined = side_by_side(parts)
        data, added = self.quantize_grad(
            joined.view(-1, joined.shape[-1]), operand, rowwise=rowwise, columnwise=columnwise, record=record, sums=sums
        )
        return joined, data, added

    def quantize_parts(
        self, parts: Sequence[Tensor], operand: Operand, *, rowwise: bool, columnwise: bool, record: bool, sums: bool
    ) -> tuple[Any, Tensor | None]:
        """``quantize_grad`` of matrices [rows, features] that lie side by side."""
        values = parts[0] if len(parts) == 1 else torch.cat(tuple(parts), 1)
        return self.quantize_grad(
            values, operand, rowwise=rowwise, columnwise=columnwise, record=record, sums=sums
        )  # fmt: skip

    def quantize_weights(self, weights: Sequence[Tensor], operand: Operand, *, rowwise: bool, columnwise: bool) -> Any:
        """Weights [out_features, in_features], below each other, quantized with one scale."""
        return self.quantize(torch.cat(tuple(weights)), operand, rowwise=rowwise, columnwise=columnwise, record=False)

    @abstractmethod
    def from_storage(self, weight: Fp8Weight, *, rowwise: bool, columnwise: bool) -> Any:
        """Use a weight that is stored in FP8 as a GEMM operand, without rounding it again."""

    @abstractmethod
    def fprop(self, x: Any, weight: Any, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
        """Return [M, N] = x @ weight.T + bias."""

    @abstractmethod
    def dgrad(self, grad_output: Any, weight: Any, out_dtype: torch.dtype, total: Tensor | None = None) -> Tensor:
        """Return [M, K] = grad_output @ weight + total. ``total`` has the output's dtype, and may be overwritten."""

    @abstractmethod
    def wgrad(self, grad_output: Any, x: Any, out_dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
        """Return [N, K] = grad_output.T @ x, in ``out`` where that is given."""

    def matmul(self, a: Tensor, b: Tensor, out_dtype: torch.dtype) -> Tensor:
        """Half-precision GEMM [m, k] @ [k, n], for overridden GEMMs."""
        return half_matmul(a, b, out_dtype)

    def copy_operand(self, operand: Any) -> Any:
        """An operand of the same data, for another layer, which may drop an orientation of it."""
        return operand

    def packing(self, operand: Operand) -> Packing | None:
        """How ``operand`` travels in compiled graphs; None for a backend whose layers break such graphs."""
        return None

    def rms_norm(self, x: Tensor, weight: Tensor | None, eps: float, zero_centered: bool) -> Tensor:
        """RMSNorm over the last dimension, statistics in FP32; ``x`` and ``weight`` of one dtype."""
        return _rms_norm(x, weight, eps, zero_centered)

    def norm(self, x: Tensor, weight: Tensor | None, bias: Tensor | None, kind: NormKind, out: torch.dtype) -> Tensor:
        """A norm of ``x`` [..., *kind.shape], of any float dtype, rounded to ``out``; called without autocast."""
        return plain_norm(x, weight, bias, kind, out, self.rms_norm)

    def norm_call(self, weight: Tensor, bias: Tensor | None, kind: NormKind, out: torch.dtype) -> Any:
        """The ``NormCall`` of ``norm``, for sums that compute the norm behind them; None where there is no kernel."""
        return None

    def compress(self, values: Tensor) -> list[Tensor]:
        """Activations [..., features] in E4M3, which backward reads again by ``decompress``.

        Returns:
            The values divided by powers of two, one for 128 features of a row: contiguous, of the same shape; and the
            exponents of the powers, uint8 [rows, blocks of a row]. An element that is not finite becomes NaN.
        """
        rows = values.reshape(-1, values.shape[-1])
        kernels = block_kernels() if values.is_cuda else None
        data, exponents = quantize_rows(rows, E4M3) if kernels is None else kernels.quantize(rows, E4M3)[:2]
        return [data.view(values.shape), exponents]

    def decompress(self, tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """The values of which ``compress`` has returned ``tensors``, in ``dtype``, saturated."""
        data, exponents = tensors
        rows = data.view(-1, data.shape[-1])
        kernels = block_kernels() if data.is_cuda else None
        if kernels is None:
            largest = torch.finfo(dtype).max
            return dequantize_rows(rows, exponents).clamp_(-largest, largest).to(dtype).view(data.shape)
        return kernels.dequantize(rows, exponents, dtype).view(data.shape)  # type: ignore[no-any-return]

    def cross_entropy(self, logits: Tensor, targets: Tensor, ignore: int) -> tuple[Tensor, Tensor]:
        """The losses of rows of logits, and the logs of the sums of exponentials: FP32 [rows] each.

        Args:
            logits: half [rows, classes], not empty.
            targets: int64 [rows].
            ignore: a target without a loss.
        """
        kernels = _loss_kernels(logits, targets)
        return losses_of(logits, targets, ignore) if kernels is None else kernels.forward(logits, targets, ignore)

    def cross_entropy_backward(
        self, logits: Tensor, targets: Tensor, lse: Tensor, scale: Tensor, ignore: int
    ) -> Tensor:
        """The gradient of the logits in their dtype, times ``scale``, FP32 [rows], or [1] for all rows."""
        kernels = _loss_kernels(logits, targets)
        how = gradient_of if kernels is None else kernels.backward
        return how(logits, targets, lse, scale, ignore)  # type: ignore[no-any-return]

    def fuses(self, activation: Activation) -> bool:
        """Whether ``activate`` and ``activate_backward`` take less time than torch and ``quantize``, one by one."""
        return True

    def activate(
        self, activation: Activation, tensors: tuple[Tensor, ...], operand: Operand, *, columnwise: bool, record: bool,
        half: bool = True,
    ) -> tuple[Tensor | None, Any]:  # fmt: skip
        """The result of ``activation`` in half [rows, features], and quantized for the layer that reads it.

        Args:
            tensors: half [rows, ...], not empty.
            operand: the reader's ``input``, whose history has begun.
            columnwise: whether the columnwise data are wanted, too.
            half: whether the half values are wanted; if not, they may be None.
        """
        out = activation.forward(tensors)
        return out, self.quantize(out, operand, rowwise=True, columnwise=columnwise, record=record)

    def activate_backward(
        self, activation: Activation, grad: Tensor, tensors: tuple[Tensor, ...], readers: list[Any], half: bool = True
    ) -> list[tuple[Tensor | None, Any, Tensor | None]]:
        """The gradients of ``tensors``: in half, quantized, and the sums of their columns (FP32 [features]) or None.

        Args:
            grad: of the result, in half.
            readers: for each of ``tensors`` the ``GradReader`` that wants its gradient, or None.
            half: whether the half values are wanted. If not, they may be None where every gradient has a reader.
        """
        made: list[tuple[Tensor | None, Any, Tensor | None]] = []
        for values, reader in zip(activation.backward(grad, tensors), readers, strict=True):
            data: tuple[Any, Tensor | None] = None, None
            if reader is not None:
                data = self.quantize_grad(
                    values, reader.operand, rowwise=reader.rowwise, columnwise=reader.columnwise,
                    record=reader.record, sums=reader.sums,
                )  # fmt: skip
            made.append((values, *data))
        return made

    def describe(self, operand: Any) -> str:
        """The chart's name of an operand's format."""
        part = operand.rowwise or operand.columnwise
        if part.layout is not None and part.layout.scale in _BLOCK_FORMATS:
            return _BLOCK_FORMATS[part.layout.scale]
        return "fp8" if part.data.element_size() == 1 else str(part.data.dtype).removeprefix("torch.")

    def stored(self, operand: Any) -> tuple[Orientation, bool]:
        """One orientation of a quantized operand of values [rows, features].

        Returns:
            the rowwise orientation and False, or where there is none the columnwise orientation and True.
        """
        columnwise = operand.rowwise is None
        return (operand.columnwise if columnwise else operand.rowwise), columnwise

    # Operands go from forward to backward as plain tensors, which activation checkpointing and offloading see.
    def save(self, operand: Any) -> tuple[list[Tensor | None], Any]:
        """Split the columnwise orientation, which backward reads, into plain tensors and a description (not None)."""
        return [operand.columnwise.data, operand.columnwise.scale_inv], (operand.columnwise.layout,)

    def restore(self, tensors: list[Tensor | None], meta: Any) -> Any:
        """The operand of which ``save`` has returned ``tensors`` and ``meta``."""
        data, scale_inv = tensors
        assert data is not None and scale_inv is not None
        return QuantizedOperand(None, Orientation(data, scale_inv, *meta))
