"""Shards: the rows of a parameter that one process holds, as the local tensor of FSDP2's DTensor.

A shard is the master. FSDP2 gathers its data in a low-precision format; the gathered tensor is the weight, and lives
for one layer's computation. All shards read as FP32, since FSDP2 gathers parameters of one dtype together.

Source: the extension points ``fsdp_pre_all_gather`` and ``fsdp_post_all_gather`` of torch's ``fully_shard``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nemo_lowprec.formats.floats import E4M3, FP16, FloatFormat, cast
from nemo_lowprec.formats.scale import compute_amax, compute_scale, power_of_two_scale
from nemo_lowprec.kernels.loader import block_kernels, fused_kernels
from nemo_lowprec.tensors.block_scaled_tensor import BlockScaledTensor, quantize_blocks_of_rows
from nemo_lowprec.tensors.fp8_weight import Fp8Weight
from nemo_lowprec.tensors.fp16_weight import Fp16Weight
from nemo_lowprec.tensors.quantized_tensor import QuantizedTensor, aten


class Shard(QuantizedTensor):
    """Base of all shards: FSDP2 pads, cuts and gathers them."""

    def zeros_of(self, shape: torch.Size | tuple[int, ...]) -> Any:
        """A shard of zeros of the same kind."""
        return self._each(lambda part: part.new_zeros(shape))

    def gathered(self) -> tuple[Tensor, Any]:
        """(the data to gather, of the shard's shape; metadata that stays on this process, such as a scale)."""
        raise NotImplementedError

    def weight(self, data: Tensor, along: Any) -> Tensor:
        """The weight made of gathered data, [rows of all processes, ...], and of the metadata ``along``."""
        raise NotImplementedError

    def renew(self, weight: Any, along: Any) -> None:
        """Update ``weight``, whose storage FSDP2 has filled with new data, from the metadata ``along``."""

    def _scaled_as_this(self, other: Any) -> Any:
        """``other``, a part of this shard, with what the whole weight's scale has left on this one."""
        return other

    def untyped_storage(self) -> torch.UntypedStorage:
        """The storage of the elements. FSDP2 compares it to notice that a parameter has other data."""
        return self.parts()[0].untyped_storage()

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: torch.Size, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[Tensor], Any]:
        data, along = self.gathered()
        missing = -(-outer_size[0] // mesh.size()) - data.shape[0]
        if missing:
            data = F.pad(data, (0, 0) * (data.dim() - 1) + (0, missing))
        return (data,), (outer_size[0], along)

    def fsdp_post_all_gather(
        self, outputs: tuple[Tensor], metadata: Any, param_dtype: torch.dtype, *, out: Tensor | None = None
    ) -> Any:
        rows, along = metadata
        if out is not None:  # FSDP2 has filled the storage of this weight
            self.renew(out, along)
            return None
        return self.weight(outputs[0][:rows], along), ()

    @classmethod
    def _special(cls, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        this = args[0] if args else None
        if isinstance(this, Shard):
            # FSDP2 pads shards of unequal numbers of rows, and takes a slice of the padded one for the shard.
            if func is aten.new_zeros.default:
                return this._scaled_as_this(this.zeros_of(args[1]))
            if func is aten.slice.Tensor and (args[1] if len(args) > 1 else 0) == 0:
                return this._scaled_as_this(this._each(lambda part: func(part, *args[1:]) if part.dim() else part))
            if func is aten.view.default:  # FSDP2 keeps a flat view, and never reads it
                return this._each(lambda part: part)
        return super()._special(func, args, kwargs)


class HalfShard(Shard, Fp16Weight):
    """FP16, the only copy of a matrix at MS-AMP's O1 and O2; gathered in FP16."""

    PARTS = ("data_fp16",)
    SETTINGS = ("gathers_as",)
    gathers_as: torch.dtype  # that the gathered weight reads as

    @staticmethod
    def __new__(cls, data_fp16: Tensor, gathers_as: torch.dtype):
        return cls._wrap((data_fp16,), {"gathers_as": gathers_as}, torch.float32)

    def gathered(self) -> tuple[Tensor, Any]:
        return self.data_fp16, None

    def weight(self, data: Tensor, along: Any) -> Tensor:
        return data if self.gathers_as == torch.float16 else Fp16Weight(data, self.gathers_as)


class FullShard(Shard):
    """FP32, gathered in FP32 whatever the other parameters of its FSDP2 unit are gathered in."""

    PARTS = ("data_fp32",)
    data_fp32: Tensor

    @staticmethod
    def __new__(cls, data_fp32: Tensor):
        return cls._wrap((data_fp32,), {}, torch.float32)

    def gathered(self) -> tuple[Tensor, Any]:
        return self.data_fp32, None

    def weight(self, data: Tensor, along: Any) -> Tensor:
        return data

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        return self.data_fp32.to(dtype or self.dtype)

    @torch.no_grad()
    def quantize_(self, values: Tensor) -> Any:
        if values.data_ptr() != self.data_fp32.data_ptr():  # equal where an operation has written in place
            self.data_fp32.copy_(values)
        return self


class Fp8Gathered(Shard):
    """A shard whose weight is E4M3 with one scale, computed from the amax of the whole matrix over all processes."""

    amax_of_step: Tensor | None = None  # as in ``Fp16Weight``
    scale: Tensor  # FP32 [1], set by ``set_scales`` before the first weight is gathered
    scale_inv: Tensor  # FP32 [1], its inverse
    gathers_as: torch.dtype  # that the gathered weight reads as
    margin: int  # the scale is divided by 2**margin
    power_of_two: bool  # whether the scale is a power of two

    def _scaled_as_this(self, other: Any) -> Any:
        for name in ("scale", "scale_inv", "amax_of_step"):
            if name in self.__dict__:
                other.__dict__[name] = self.__dict__[name]
        return other

    def local_amax(self) -> Tensor:
        """Largest magnitude in this shard, FP32 scalar."""
        known, self.amax_of_step = self.amax_of_step, None
        return compute_amax(self.dequantize(torch.float32)) if known is None else known

    @staticmethod
    def set_scales(shards: Sequence[Fp8Gathered], amax: Tensor) -> None:
        """Set the scales of ``shards``, all of one kind and margin, for matrices of these amaxes (FP32 [shards])."""
        power_of_two, margin = shards[0].power_of_two, shards[0].margin
        scale = power_of_two_scale(amax, E4M3, margin) if power_of_two else compute_scale(amax, E4M3.max, margin)
        # The inverse is computed here: gathering runs on another stream, which would reuse its memory too early.
        scale_inv = scale.reciprocal()
        for shard, *both in zip(shards, scale.split(1), scale_inv.split(1), strict=True):
            assert (shard.power_of_two, shard.margin) == (power_of_two, margin)
            shard.scale, shard.scale_inv = both

    def gathered(self) -> tuple[Tensor, Any]:
        return self.scaled_to_fp8().view(torch.uint8), self.scale_inv

    def scaled_to_fp8(self) -> Tensor:
        """The values times the scale, in E4M3."""
        return cast(self.dequantize(torch.float32) * self.scale, E4M3)

    def weight(self, data: Tensor, along: Any) -> Tensor:
        stored = data.view(torch.float8_e4m3fn)
        return Fp8Weight(stored, along.clone(), E4M3, self.gathers_as, self.margin, self.power_of_two)

    def renew(self, weight: Any, along: Any) -> None:
        weight.scale_inv.data.copy_(along)  # without a new version, as FSDP2 fills the data: autograd saves both


class BlockShard(Fp8Gathered, BlockScaledTensor):
    """FP16 in blocks, the master of an FP8 weight at MS-AMP's O3."""

    PARTS = ("data_blocks", "exponent")
    SETTINGS = ("fmt", "gathers_as", "margin", "power_of_two")

    @staticmethod
    def __new__(cls, data_blocks: Tensor, exponent: Tensor, fmt: FloatFormat, gathers_as: torch.dtype, margin: int):
        settings = {"fmt": fmt, "gathers_as": gathers_as, "margin": margin, "power_of_two": True}
        return cls._wrap((data_blocks, exponent), settings, torch.float32)

    @classmethod
    def of(cls, values: Tensor, gathers_as: torch.dtype, margin: int) -> BlockShard:
        """Quantize ``values``."""
        return cls(*quantize_blocks_of_rows(values.detach(), FP16), FP16, gathers_as, margin)

    def scaled_to_fp8(self) -> Tensor:
        kernels = block_kernels() if self.is_cuda else None
        if kernels is None:
            return super().scaled_to_fp8()
        cast_: Tensor = kernels.cast_blocks(self.data_blocks, self.exponent, self.scale, E4M3)
        return cast_

    def zeros_of(self, shape: torch.Size | tuple[int, ...]) -> BlockShard:
        zeros: BlockScaledTensor = BlockScaledTensor.zeros(shape, self.fmt, self.device)
        return BlockShard(zeros.data_blocks, zeros.exponent, self.fmt, self.gathers_as, self.margin)


class PlainShard(Fp8Gathered, FullShard):
    """FP32, the master of an FP8 weight under ``fp8_params``."""

    PARTS = ("data_fp32",)
    SETTINGS = ("gathers_as", "margin", "power_of_two")

    @staticmethod
    def __new__(cls, data_fp32: Tensor, gathers_as: torch.dtype, margin: int):
        settings = {"gathers_as": gathers_as, "margin": margin, "power_of_two": False}
        return cls._wrap((data_fp32,), settings, torch.float32)

    def scaled_to_fp8(self) -> Tensor:
        kernels = fused_kernels() if self.is_cuda else None
        if kernels is None:
            return super().scaled_to_fp8()
        matrix = self.data_fp32.reshape(self.shape[0], self.shape[1:].numel())
        data, _, _ = kernels.quantize(matrix, self.scale, E4M3, rowwise=True, columnwise=False, record=None)
        return data.view(self.shape)
