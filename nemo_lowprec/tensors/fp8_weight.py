"""A weight stored in FP8 with one scale: under ``fp8_params``, at MS-AMP O3, and a frozen one (``frozen="fp8"``)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nemo_lowprec.formats.floats import FloatFormat, cast, decode
from nemo_lowprec.formats.scale import compute_amax, compute_scale, power_of_two_scale
from nemo_lowprec.kernels.loader import fused_kernels
from nemo_lowprec.tensors.quantized_tensor import MASTER, QuantizedTensor


class Fp8Weight(QuantizedTensor):
    """Per-tensor scaled FP8 storage of shape ``data_fp8.shape`` that reads as ``dtype``.

    A frozen weight has no master until it is written. A merged adapter is far smaller than a step between two numbers
    of E4M3, so that the first write makes a master, from which torch's operations read. FP8 GEMMs read the storage.
    """

    PARTS = ("data_fp8", "scale_inv")
    SETTINGS = ("fmt", "margin", "power_of_two", "came_as")
    data_fp8: Tensor  # float8, of the same shape
    scale_inv: Tensor  # FP32 [1]; value = data_fp8 * scale_inv
    fmt: FloatFormat  # the storage format
    margin: int  # scales are divided by 2**margin
    power_of_two: bool  # whether scales are powers of two
    came_as: torch.dtype | None  # of a frozen weight: its dtype before, in which it is saved, and of its master

    @staticmethod
    def __new__(
        cls, data_fp8: Tensor, scale_inv: Tensor, fmt: FloatFormat, dtype: torch.dtype, margin: int = 0,
        power_of_two: bool = False, came_as: torch.dtype | None = None,
    ):  # fmt: skip
        settings = {"fmt": fmt, "margin": margin, "power_of_two": power_of_two, "came_as": came_as}
        return cls._wrap((data_fp8, scale_inv), settings, dtype)

    @classmethod
    def from_float(
        cls, values: Tensor, fmt: FloatFormat, dtype: torch.dtype, margin: int = 0, power_of_two: bool = False
    ) -> Fp8Weight:
        """Quantize ``values`` with the scale of their own amax."""
        values = values.detach()
        scale = _scale(values, fmt, margin, power_of_two)
        data = cast(values.float() * scale, fmt).view(values.shape)
        return cls(data, scale.reciprocal(), fmt, dtype, margin, power_of_two)

    @torch.no_grad()
    def quantize_(self, values: Tensor) -> Fp8Weight:
        """Store ``values`` anew, with the scale of their own amax."""
        plain = values.dim() == 2 and self.data_fp8.is_contiguous() and not self.power_of_two
        kernels = fused_kernels() if values.is_cuda and plain else None
        if kernels is not None:
            _, _, scale_inv = kernels.quantize_current(values, self.fmt, self.margin, True, False, out=self.data_fp8)
            self.scale_inv.copy_(scale_inv)
            if not self.data_fp8.is_inference():  # the kernel's write is not counted
                torch.autograd.graph.increment_version(self.data_fp8)
            return self
        scale = _scale(values, self.fmt, self.margin, self.power_of_two)
        self.data_fp8.copy_(cast(values.float() * scale, self.fmt))
        self.scale_inv.copy_(scale.reciprocal())
        return self

    @property
    def is_frozen(self) -> bool:
        """Whether the weight is a frozen one."""
        return self.came_as is not None

    @property
    def writes_exactly(self) -> bool:
        return self.is_frozen or super().writes_exactly

    @torch.no_grad()
    def write_(self, values: Tensor) -> Fp8Weight:
        if self.is_frozen and MASTER not in self.__dict__:
            self.__dict__[MASTER] = torch.empty(self.shape, dtype=self.came_as, device=self.device)
        return super().write_(values)  # type: ignore[no-any-return]

    def frozen_values(self) -> Tensor:
        """The values of a frozen weight in the dtype in which it came, as it is saved."""
        return self.dequantize(self.came_as)

    def _exact(self) -> torch.nn.Parameter:
        if self.is_frozen:  # which no optimizer updates: a copy needs no FP32
            return torch.nn.Parameter(self.frozen_values().clone(), self.requires_grad)
        return super()._exact()

    def transposed(self) -> Fp8Weight:
        """The transpose of a 2-D tensor, sharing the storage (``t()`` is a plain tensor of the values)."""
        return self._with(self.data_fp8.t(), self.scale_inv)

    def matrix(self) -> Fp8Weight:
        """[first dimension, all others], sharing the storage."""
        return self._with(self.data_fp8.flatten(1), self.scale_inv)

    def rows(self, start: int, stop: int) -> Fp8Weight:
        """Some of the rows, sharing the storage and the scale (a slice is a plain tensor of the values)."""
        return self._with(self.data_fp8[start:stop], self.scale_inv)

    def joined(self) -> Fp8Weight:
        """The first two dimensions as one, sharing the storage and the scale."""
        return self._with(self.data_fp8.flatten(0, 1), self.scale_inv)

    def item_of(self, index: int) -> Fp8Weight:
        """One item of the first dimension, sharing the storage and the scale."""
        return self._with(self.data_fp8[index], self.scale_inv)

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The values as a plain tensor; of a frozen weight that was written, the master's values."""
        if self.is_frozen and MASTER in self.__dict__:
            return self.__dict__[MASTER].detach().to(self.device, dtype or self.dtype)  # type: ignore[no-any-return]
        return (decode(self.data_fp8) * self.scale_inv).view(self.shape).to(dtype or self.dtype)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Fp8Weight({self.fmt.name}, shape={tuple(self.shape)}, reads as {self.dtype})"


def _scale(values: Tensor, fmt: FloatFormat, margin: int, power_of_two: bool) -> Tensor:
    amax = compute_amax(values).reshape(1)
    return power_of_two_scale(amax, fmt, margin) if power_of_two else compute_scale(amax, fmt.max, margin)
