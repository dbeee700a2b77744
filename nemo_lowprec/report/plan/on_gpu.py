"""Stands in for a GPU on a machine without one: a backend without values, and CUDA's autocast rules.

torch traces no autograd of CUDA tensors where it was built without CUDA, so that the tensors of a plan are fake tensors
of the CPU. This file holds the points at which the two devices keep and allocate different tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from nemo_lowprec.compat.tensors import tree_map
from nemo_lowprec.compute import AmaxState
from nemo_lowprec.compute.activations import Activation
from nemo_lowprec.compute.backends.base import Orientation, QuantizedOperand
from nemo_lowprec.compute.backends.fused_activations import is_faster
from nemo_lowprec.compute.backends.reference import ReferenceBackend
from nemo_lowprec.compute.logits import Logits
from nemo_lowprec.compute.operands import Operand
from nemo_lowprec.engine import Engine
from nemo_lowprec.engine.columns import Columns
from nemo_lowprec.tensors import Fp8Weight

aten = torch.ops.aten


class PlannedBackend(ReferenceBackend):
    """Operands and results of the ``te`` and ``torch`` backends, by their shapes: 8 bits an element, 4 for NVFP4.

    A transpose is a copy, as the FP8 GEMMs of a GPU take it.
    """

    name = "planned"
    row_multiple = 32

    def fuses(self, activation: Activation) -> bool:
        return is_faster(activation)

    def quantize(
        self, values: Tensor, operand: Operand, *, rowwise: bool, columnwise: bool, record: bool
    ) -> QuantizedOperand:
        rows, cols = values.shape
        row = _part(values, operand, rows, cols) if rowwise else None
        col = _part(values, operand, cols, rows) if columnwise else None
        if row is not None and col is not None and operand.layout is None:
            col = col._replace(scale_inv=row.scale_inv)  # one scale for both
        return QuantizedOperand(row, col)

    def from_storage(self, weight: Fp8Weight, *, rowwise: bool, columnwise: bool) -> QuantizedOperand:
        data, scale = weight.data_fp8, weight.scale_inv
        return QuantizedOperand(
            Orientation(data, scale, None) if rowwise else None,
            Orientation(torch.empty_like(data).t().contiguous(), scale, None) if columnwise else None,
        )

    def fprop(self, x: Any, weight: Any, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
        return x.rowwise.data.new_empty(x.rowwise.data.shape[0], weight.rowwise.data.shape[0], dtype=out_dtype)

    def dgrad(self, grad_output: Any, weight: Any, out_dtype: torch.dtype, total: Tensor | None = None) -> Tensor:
        if total is not None:  # added to in the GEMM
            return total
        data = grad_output.rowwise.data
        return data.new_empty(data.shape[0], weight.columnwise.data.shape[0], dtype=out_dtype)

    def wgrad(self, grad_output: Any, x: Any, out_dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
        data = grad_output.columnwise.data
        return data.new_empty(data.shape[0], x.columnwise.data.shape[0], dtype=out_dtype) if out is None else out

    def matmul(self, a: Tensor, b: Tensor, out_dtype: torch.dtype) -> Tensor:
        return a.new_empty(a.shape[0], b.shape[1], dtype=out_dtype)

    def activate(
        self, activation: Activation, tensors: tuple[Tensor, ...], operand: Operand, *, columnwise: bool, record: bool,
        half: bool = True,
    ) -> tuple[Tensor | None, Any]:  # fmt: skip
        rows, features = tensors[0].shape
        shape = rows, features // (2 if activation.joint else 1)
        shaped = tensors[0].new_empty(()).expand(shape)
        data = self.quantize(shaped, operand, rowwise=True, columnwise=columnwise, record=record)
        return tensors[0].new_empty(shape) if half else None, data

    def activate_backward(
        self, activation: Activation, grad: Tensor, tensors: tuple[Tensor, ...], readers: list[Any], half: bool = True
    ) -> list[tuple[Tensor | None, Any, Tensor | None]]:
        half, made = half or None in readers, list[Any]()
        for t, reader in zip(tensors, readers, strict=True):
            data = sums = None
            if reader is not None:
                how = {"rowwise": reader.rowwise, "columnwise": reader.columnwise, "record": reader.record}
                data = self.quantize(t, reader.operand, **how)
                sums = t.new_empty(t.shape[1], dtype=torch.float32) if reader.sums else None
            made.append((torch.empty_like(t) if half else None, data, sums))
        return made

    def cross_entropy(self, logits: Tensor, targets: Tensor, ignore: int) -> tuple[Tensor, Tensor]:
        return tuple(logits.new_empty(len(logits), dtype=torch.float32) for _ in range(2))  # type: ignore[return-value]

    def cross_entropy_backward(
        self, logits: Tensor, targets: Tensor, lse: Tensor, scale: Tensor, ignore: int
    ) -> Tensor:
        return torch.empty_like(logits)

    def compress(self, values: Tensor) -> list[Tensor]:
        features = values.shape[-1]
        blocks = values.numel() // features, -(-features // 128)
        return [
            values.new_empty(values.shape, dtype=torch.float8_e4m3fn), values.new_empty(blocks, dtype=torch.uint8)
        ]  # fmt: skip

    def decompress(self, tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        return tensors[0].new_empty(tensors[0].shape, dtype=dtype)

    def rms_norm(self, x: Tensor, weight: Tensor | None, eps: float, zero_centered: bool) -> Tensor:
        if weight is None:
            return super().rms_norm(x, weight, eps, zero_centered)
        return _RMSNorm.apply(x, weight)  # type: ignore[no-any-return]


def _part(values: Tensor, operand: Operand, rows: int, cols: int) -> Orientation:
    layout = operand.layout
    if layout is None:
        return Orientation(
            values.new_empty(rows, cols, dtype=operand.fmt.dtype), values.new_empty(1, dtype=torch.float32), None
        )
    if layout.scale == "e4m3":  # two E2M1 elements to a byte
        data = values.new_empty(rows, cols // 2, dtype=torch.float4_e2m1fn_x2)
    else:
        data = values.new_empty(rows, cols, dtype=operand.fmt.dtype)
    scale = torch.float32 if layout.scale == "fp32_pow2" else torch.uint8
    return Orientation(data, values.new_empty(layout.grid(rows, cols), dtype=scale), layout)


class _RMSNorm(torch.autograd.Function):
    """The fused RMSNorm of TE and of torch on a GPU: one kernel each way, which keeps its input and a number a row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, x.new_empty(x.shape[:-1], dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


class PlannedEngine(Engine):
    """An engine that converts as on a GPU."""

    def _build(self, amaxes: AmaxState) -> Columns:
        columns = super()._build(amaxes)
        columns.computation.choose_backend = lambda device: PlannedBackend()  # type: ignore[method-assign]
        return columns


F = torch.nn.functional
# torch's documentation, "CUDA Ops that can autocast to float32": by their inputs, or by the dtype of their results.
_IN_FP32 = {
    torch.layer_norm, F.layer_norm, torch.group_norm, F.group_norm, torch.rsqrt, torch.exp, torch.log, torch.pow,
    torch.norm, torch.logsumexp, torch.cosine_similarity, torch.Tensor.rsqrt, torch.Tensor.exp, torch.Tensor.log,
    torch.Tensor.pow, torch.Tensor.__pow__, F.nll_loss, F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.kl_div,
    F.cosine_similarity, F.binary_cross_entropy_with_logits, F.softplus,
}  # fmt: skip
_TO_FP32 = {
    torch.softmax, torch.log_softmax, torch.cumsum, torch.cumprod, torch.prod, torch.sum, torch.Tensor.softmax,
    torch.Tensor.log_softmax, torch.Tensor.cumsum, torch.Tensor.prod, torch.Tensor.sum, F.softmax, F.log_softmax,
}  # fmt: skip
_HALVES = (torch.float16, torch.bfloat16)


class GpuRules(TorchFunctionMode):
    """On tensors of the CPU under autocast: CUDA's casts to FP32, its attention kernels and its dropout masks."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return _attention(*args, **kwargs)
        if func is torch.dropout or func is F.dropout:
            return _dropout(*args, **{{"train": "training"}.get(name, name): value for name, value in kwargs.items()})
        if func is torch.rms_norm or func is F.rms_norm:
            x, shape, weight = args[0], args[1], args[2] if len(args) > 2 else kwargs.get("weight")
            if weight is not None and len(shape) == 1:
                return _RMSNorm.apply(x, weight.to(x.dtype))
        if torch.is_autocast_enabled("cpu"):
            if func in _IN_FP32:
                args, kwargs = tree_map(_widen, args), tree_map(_widen, kwargs)
            elif func in _TO_FP32 and args[0].dtype in _HALVES:
                kwargs = {**kwargs, "dtype": kwargs.get("dtype") or torch.float32}
            elif func is F.cross_entropy and not isinstance(args[0], Logits):  # whose loss is the backend's
                args = (args[0].log_softmax(1, dtype=torch.float32), *args[1:])
                func = _nll_loss
        return func(*args, **kwargs)


def _nll_loss(values: Tensor, target: Tensor, weight: Any = None, *rest: Any, **kwargs: Any) -> Tensor:
    """The rest of a cross entropy, given the logarithms of the probabilities."""
    if target.is_floating_point() or kwargs.get("label_smoothing"):
        return -(values * target if target.is_floating_point() else values).sum() / target.shape[0]
    ignore = kwargs.get("ignore_index", -100)
    return F.nll_loss(values, target, weight, ignore_index=ignore, reduction=kwargs.get("reduction", "mean"))


def _widen(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype in _HALVES else value


def _attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """FlashAttention's operation where it takes the arguments, else the memory-efficient one.

    cuDNN's keeps the same: query, key, value, the output, and FP32 log-sum-exps of each row.
    """
    if torch.is_autocast_enabled("cpu"):
        half = torch.get_autocast_dtype("cpu")
        query, key, value = (t.to(half) if t.is_floating_point() else t for t in (query, key, value))
    head = query.shape[-1]
    if attn_mask is None and query.dtype in _HALVES and head == value.shape[-1] <= 256 and query.dim() == 4:
        pad = -head % 8
        if pad:
            query, key, value = (F.pad(t, (0, pad)) for t in (query, key, value))
        out: Tensor = aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal)[0]
        return out[..., :head] if pad else out
    if enable_gqa:
        groups = query.shape[-3] // key.shape[-3]
        key, value = (t.repeat_interleave(groups, -3) for t in (key, value))
    shape = query.shape
    if query.dim() == 3:
        query, key, value = (t.unsqueeze(0) for t in (query, key, value))
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            attn_mask = attn_mask.to(query.dtype)
        attn_mask = attn_mask.expand(*query.shape[:-1], key.shape[-2])
    out = aten._scaled_dot_product_efficient_attention(query, key, value, attn_mask, True, dropout_p, is_causal)[0]
    return out.reshape(*shape[:-1], value.shape[-1])


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """The kernel that keeps a mask of a byte an element."""
    if training and 0 < p < 1 and not inplace:
        return torch.native_dropout(input, p, True)[0]
    return F.dropout(input, p, training, inplace)
