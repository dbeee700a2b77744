"""A weight stored in FP16 that reads as BF16 or FP32. At the MS-AMP levels such a weight is its own master.

FP16 keeps three mantissa bits more than BF16, which small updates need. Autograd, modules and autocast see the dtype
that the weight reads as, so that gradients never pass through FP16's narrow range.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nemo_lowprec.compat.tensors import tree_map
from nemo_lowprec.tensors.quantized_tensor import QuantizedTensor, aten


class Fp16Weight(QuantizedTensor):
    """FP16 storage that reads as ``dtype``."""

    PARTS = ("data_fp16",)
    data_fp16: Tensor  # float16, of the same shape; bfloat16 for a frozen weight that was given in bfloat16
    # FP32 scalar, amax of the values that the last fused optimizer step wrote; None where no kernel has measured them.
    amax_of_step: Tensor | None = None

    @staticmethod
    def __new__(cls, data_fp16: Tensor, dtype: torch.dtype):
        return cls._wrap((data_fp16,), {}, dtype)

    @classmethod
    def from_float(cls, values: Tensor, dtype: torch.dtype, storage: torch.dtype = torch.float16) -> Fp16Weight:
        """Round ``values`` to ``storage``."""
        return cls(values.detach().to(storage, copy=True), dtype)

    @torch.no_grad()
    def quantize_(self, values: Tensor) -> Fp16Weight:
        """Store ``values`` anew."""
        self.data_fp16.copy_(values)
        if not self.data_fp16.is_inference():  # torch counts no write that is made inside another operation's dispatch
            torch.autograd.graph.increment_version(self.data_fp16)
        return self

    def transposed(self) -> Fp16Weight:
        """The transpose of a 2-D tensor, sharing the storage."""
        return self._with(self.data_fp16.t())

    def matrix(self) -> Fp16Weight:
        """[first dimension, all others], sharing the storage."""
        return self._with(self.data_fp16.flatten(1))

    def rows(self, start: int, stop: int) -> Fp16Weight:
        """Some of the rows, sharing the storage."""
        return self._with(self.data_fp16[start:stop])

    def item_of(self, index: int) -> Fp16Weight:
        """One item of the first dimension, sharing the storage."""
        return self._with(self.data_fp16[index])

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The values as a plain tensor (of FP16, the storage itself)."""
        return self.data_fp16.to(dtype or self.dtype)

    def exact_storage(self) -> Tensor:
        return self.data_fp16  # which is its own master

    def _exactly(self, x: Any) -> Any:
        """FP32 in place of the dtype that this tensor reads as."""
        if isinstance(x, QuantizedTensor):
            return x.dequantize(torch.float32)
        return x.float() if isinstance(x, Tensor) and x.dtype == self.dtype else x

    @classmethod
    def _special(cls, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        this = args[0] if args else None
        if not isinstance(this, Fp16Weight):
            return NotImplemented
        if func is aten._to_copy.default and kwargs.get("dtype") not in (None, this.dtype):
            return this.data_fp16.to(device=kwargs.get("device"), dtype=kwargs["dtype"], copy=True)
        if func._schema.is_mutable and func._schema.name.endswith("_") and func is not aten.copy_.default:
            # In-place updates start from the stored values, not from the rounded values that a read returns.
            exact, *others = tree_map(this._exactly, args)
            return this.quantize_(func(exact, *others, **tree_map(this._exactly, kwargs)))
        if func is aten.embedding.default:  # converts the rows that are looked up, not the whole table
            return func(this.data_fp16, *args[1:], **kwargs).to(this.dtype)
        return NotImplemented
