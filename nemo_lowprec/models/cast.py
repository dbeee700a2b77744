"""Rounds weights to another format for use outside of training, and measures the rounding errors."""

from __future__ import annotations

import torch
from torch import Tensor

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_NAMES = {dtype: name.upper() for name, dtype in DTYPES.items()}
_CHUNK = 1 << 20  # elements compared at a time, so that temporaries stay in the cache


class Cast:
    """Rounds tensors to one dtype, to nearest, and counts and measures the errors.

    Args:
        dtype: ``bf16``, ``fp16`` or ``fp32``.

    Attributes:
        max_relative_error: the largest abs(rounded - exact) / abs(exact) of an element that did not become zero.
        underflows: nonzero elements that became zero.
        not_finite: elements that are infinite or NaN before and after rounding.
        found: number of elements by the name of their dtype before rounding, such as ``FP32``.

    Raises:
        ValueError: an unknown ``dtype``.
    """

    def __init__(self, dtype: str) -> None:
        if dtype not in DTYPES:
            raise ValueError(f"dtype={dtype!r} must be one of {', '.join(DTYPES)}.")
        self.name = dtype
        self.dtype = DTYPES[dtype]
        self.max_relative_error = 0.0
        self.underflows = 0
        self.not_finite = 0
        self.found: dict[str, int] = {}

    @torch.no_grad()
    def __call__(self, name: str, tensor: Tensor) -> Tensor:
        """Return ``tensor`` in the dtype, contiguous. A tensor of the dtype, or of integers, keeps its values.

        Raises:
            ValueError: a finite value above the dtype's largest value, or a tensor of FP8 without its scale.
        """
        if not tensor.is_floating_point():
            return tensor.contiguous()
        if tensor.dtype.itemsize < 2:
            raise ValueError(f"{name} is {tensor.dtype}: bare FP8 without its scale is no weight that can be exported.")
        kind = _NAMES.get(tensor.dtype, str(tensor.dtype).removeprefix("torch."))
        self.found[kind] = self.found.get(kind, 0) + tensor.numel()
        exact = tensor.contiguous()
        out = exact if exact.dtype == self.dtype else torch.empty(exact.shape, dtype=self.dtype)
        for a, b in zip(exact.view(-1).split(_CHUNK), out.view(-1).split(_CHUNK), strict=True):
            if out is not exact:
                b.copy_(a)
            self._compare(name, a, b)
        return out

    def _compare(self, name: str, exact: Tensor, rounded: Tensor) -> None:
        if not exact.numel():
            return
        ends = torch.stack(exact.aminmax())  # isfinite() of every element is slow on a CPU
        if not ends.isfinite().all():
            finite = exact.isfinite()
            self.not_finite += exact.numel() - int(finite.sum())
            exact, rounded = exact.where(finite, 0.0), rounded.where(finite, 0.0)
            ends = torch.stack(exact.aminmax())
        if torch.promote_types(exact.dtype, self.dtype) == self.dtype:
            return  # the dtype holds every value exactly
        if not ends.to(self.dtype).isfinite().all():
            raise ValueError(self._too_large(name, float(ends.abs().max())))
        wide = torch.promote_types(exact.dtype, torch.float32)
        exact, rounded = exact.to(wide), rounded.to(wide)
        error = rounded.sub(exact).div_(exact).abs_().nan_to_num_(0.0)  # NaN where both are zero
        if error.max() >= 1:
            lost = (rounded == 0) & (exact != 0)
            self.underflows += int(lost.sum())
            error.masked_fill_(lost, 0.0)
        self.max_relative_error = max(self.max_relative_error, float(error.max()))

    def _too_large(self, name: str, largest: float) -> str:
        wider = "bf16" if largest <= torch.finfo(torch.bfloat16).max and self.name == "fp16" else "fp32"
        text = f"{name} reaches {largest:g}, beyond {torch.finfo(self.dtype).max:g}, the largest of {self.name.upper()}"
        return f"{text}." if self.name == "fp32" else f"{text}: use --dtype {wider} (dtype={wider!r} in Python)."
