"""A tensor that is stored in FP8 and reads as a float tensor.

The storage of weights under ``fp8_params``: one byte an element and one FP32 scale. Any torch operation reads the
values; an in-place one writes them back, rounded again with a fresh scale. A view (``w[0]``, ``w.t()``) is a copy of
the values: writing into it does not reach the tensor.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from nemo_lowprec.formats.floats import FloatFormat, cast, decode, get_format
from nemo_lowprec.formats.fused import fused_kernels
from nemo_lowprec.formats.scale import compute_amax, compute_scale

__all__ = ["ScaledTensor"]

aten = torch.ops.aten


class ScaledTensor(Tensor):
    """Per-tensor scaled FP8 storage of shape ``data.shape`` that reads as ``dtype``.

    Attributes:
        data_fp8: float8 tensor of the same shape.
        scale_inv: FP32, shape [1]; value = data_fp8 * scale_inv.
        fmt: the storage format.
        margin: scales are divided by 2**margin.
    """

    data_fp8: Tensor
    scale_inv: Tensor
    fmt: FloatFormat
    margin: int

    @staticmethod
    def __new__(cls, data_fp8: Tensor, scale_inv: Tensor, fmt: FloatFormat, dtype: torch.dtype, margin: int = 0):
        self = torch.Tensor._make_wrapper_subclass(
            cls, data_fp8.shape, strides=data_fp8.stride(), dtype=dtype, device=data_fp8.device, requires_grad=False
        )
        self.data_fp8, self.scale_inv, self.fmt, self.margin = data_fp8, scale_inv, fmt, margin
        return self

    @classmethod
    def from_float(cls, values: Tensor, fmt: FloatFormat, dtype: torch.dtype, margin: int = 0) -> ScaledTensor:
        """Quantize ``values`` with the scale of their own amax."""
        values = values.detach()
        scale = compute_scale(compute_amax(values).reshape(1), fmt.max, margin)
        return cls(cast(values.float() * scale, fmt).view(values.shape), scale.reciprocal(), fmt, dtype, margin)

    @torch.no_grad()
    def quantize_(self, values: Tensor) -> ScaledTensor:
        """Store ``values`` (same shape) anew, in place."""
        kernels = fused_kernels() if values.is_cuda and values.dim() == 2 and self.data_fp8.is_contiguous() else None
        if kernels is not None:
            _, _, scale_inv = kernels.quantize_current(values, self.fmt, self.margin, True, False, out=self.data_fp8)
            self.scale_inv.copy_(scale_inv)
            return self
        scale = compute_scale(compute_amax(values).reshape(1), self.fmt.max, self.margin)
        self.data_fp8.copy_(cast(values.float() * scale, self.fmt))
        self.scale_inv.copy_(scale.reciprocal())
        return self

    def transposed(self) -> ScaledTensor:
        """The transpose of a 2-D tensor, sharing the storage (``t()`` is a plain tensor of the values)."""
        return self._with(self.data_fp8.t(), self.scale_inv)

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The values as a plain tensor, of the nominal dtype unless told otherwise."""
        return (decode(self.data_fp8) * self.scale_inv).view(self.shape).to(dtype or self.dtype)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"ScaledTensor({self.fmt.name}, shape={tuple(self.shape)}, reads as {self.dtype})"

    # module.to() assigns .data (without __tensor_flatten__ it does not swap the parameter for another object, whose
    # attributes and hooks would be lost), so .data carries the storage over.
    def _get_data(self) -> Tensor:
        return self.detach()

    def _set_data(self, other: Tensor) -> None:
        if not isinstance(other, ScaledTensor):
            self.quantize_(other)
            return
        if other.device != self.device or other.shape != self.shape or other.dtype != self.dtype:
            outer = torch.Tensor._make_wrapper_subclass(
                ScaledTensor, other.shape, strides=other.stride(), dtype=other.dtype, device=other.device
            )
            super(ScaledTensor, type(self)).data.__set__(self, outer)  # type: ignore[attr-defined]
        self.data_fp8, self.scale_inv = other.data_fp8, other.scale_inv
        self.fmt, self.margin = other.fmt, other.margin

    data = property(_get_data, _set_data)  # type: ignore[assignment]

    def __reduce_ex__(self, protocol):
        state = (self.data_fp8.view(torch.uint8), self.scale_inv, self.fmt.name, self.dtype, self.margin)
        return _rebuild, (*state, self.requires_grad, isinstance(self, torch.nn.Parameter))

    def __deepcopy__(self, memo):
        copy = self._with(self.data_fp8.clone(), self.scale_inv.clone())
        return _as(copy, self.requires_grad, isinstance(self, torch.nn.Parameter))

    def _with(self, data: Tensor, scale_inv: Tensor, dtype: torch.dtype | None = None) -> ScaledTensor:
        return ScaledTensor(data, scale_inv, self.fmt, dtype or self.dtype, self.margin)

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        this = args[0] if args and isinstance(args[0], ScaledTensor) else None
        if this is not None:
            if func in (aten.detach.default, aten.alias.default):
                return this._with(this.data_fp8, this.scale_inv)
            if func is aten.clone.default:
                return this._with(this.data_fp8.clone(), this.scale_inv.clone())
            if func is aten._to_copy.default and kwargs.get("dtype", this.dtype) in (None, this.dtype):
                device = kwargs.get("device", this.device)
                return this._with(this.data_fp8.to(device, copy=True), this.scale_inv.to(device, copy=True))
            if func is aten.copy_.default:
                source = args[1]
                return this.quantize_(source.dequantize(torch.float32) if isinstance(source, ScaledTensor) else source)

        def read(x):
            return x.dequantize() if isinstance(x, ScaledTensor) else x

        plain_args, plain_kwargs = tree_map(read, args), tree_map(read, kwargs)
        result = func(*plain_args, **plain_kwargs)
        if not func._schema.is_mutable:
            return result
        stored = _write_back(func, args, kwargs, plain_args, plain_kwargs)
        return tree_map(lambda x: stored.get(id(x), x), result)


def _write_back(func: Any, args: Any, kwargs: Any, plain_args: Any, plain_kwargs: Any) -> dict[int, ScaledTensor]:
    """Store what an operation wrote into plain stand-ins; return the tensors they stood for, by the stand-in's id."""
    stored = {}
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        given, plain = (args, plain_args) if i < len(args) else (kwargs, plain_kwargs)
        key = i if i < len(args) else argument.name
        if i >= len(args) and key not in kwargs:
            continue
        pairs = zip(given[key], plain[key], strict=True) if isinstance(given[key], (list, tuple)) else [
            (given[key], plain[key])
        ]  # fmt: skip
        for tensor, values in pairs:
            if isinstance(tensor, ScaledTensor):
                stored[id(values)] = tensor.quantize_(values)
    return stored


def _as(tensor: ScaledTensor, requires_grad: bool, parameter: bool) -> Any:
    return torch.nn.Parameter(tensor, requires_grad) if parameter else tensor.requires_grad_(requires_grad)


def _rebuild(
    data: Tensor, scale_inv: Tensor, fmt: str, dtype: torch.dtype, margin: int, requires_grad: bool, parameter: bool
) -> Any:
    storage = get_format(fmt)
    return _as(ScaledTensor(data.view(storage.dtype), scale_inv, storage, dtype, margin), requires_grad, parameter)
