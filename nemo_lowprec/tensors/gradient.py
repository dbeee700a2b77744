"""A gradient that is stored in E4M3 with a scale for every 128 elements and reads as FP32.

``grads.fp8_storage`` sets the tensor as ``p.grad``, where it behaves as a gradient: autograd accumulates into it (one
rounding a micro-batch), and clipping, ``GradScaler`` and ``zero_grad`` of torch work on it. Multiplying the tensor by a
number changes its ``factor`` and rounds nothing. Norms and the search for overflows read the stored bytes, without an
FP32 copy.

The first micro-batch's gradient is rounded to nearest, sums are rounded stochastically: with three bits of mantissa, a
sum rounded to nearest does not change where a micro-batch adds less than a sixteenth of it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from nemo_lowprec.compat.autograd import current_backward
from nemo_lowprec.formats.block_scale_128 import UNIT, block_grid, dequantize_rows, quantize_rows, scale_to_blocks
from nemo_lowprec.formats.floats import E4M3, FloatFormat
from nemo_lowprec.formats.stochastic import round_stochastic, salts_of_values
from nemo_lowprec.kernels.loader import block_kernels
from nemo_lowprec.tensors.block_scaled_tensor import BlockScaledTensor
from nemo_lowprec.tensors.marks import Marks
from nemo_lowprec.tensors.quantized_tensor import QuantizedTensor, aten

# The ``GradientTensor`` of a parameter that FSDP2 has gathered, until it is reduced onto the shards. FSDP2 would reduce
# the parameter's ``grad`` itself.
DETACHED_GRADS = Marks("detached_grad")

_COMPUTED_AS = Marks("gradient_computed_as")
_STORED_IN_FP8 = Marks("gradient_stored_in_fp8")
_QUANTIZED = Marks("gradient_quantized")


def gradient_dtype(param: Tensor) -> torch.dtype:
    """Dtype of the gradient of ``param`` in autograd."""
    return (param.grad_dtype if param.is_leaf else None) or param.dtype


def computed_dtype(param: Tensor) -> torch.dtype:
    """Dtype in which a layer's backward pass computes the gradient of ``param``, where no later one goes through it."""
    own, dtype = _COMPUTED_AS.get(param) or (None, None)
    return dtype if dtype is not None and own == id(param) else gradient_dtype(param)  # a copy has its original's mark


def compute_gradient_as(param: Tensor, dtype: torch.dtype | None) -> None:
    """Let layers compute the gradient of ``param``, which any dtype fits, in ``dtype``; None for its own."""
    if dtype is None:
        _COMPUTED_AS.discard(param)
    else:
        _COMPUTED_AS.add(param, (id(param), dtype))


def note_stored_in_fp8(param: Tensor, stored: bool) -> None:
    """Note whether a hook of ``param`` stores its gradient in FP8, and does nothing else with it."""
    if stored:
        _STORED_IN_FP8.add(param, id(param))
    else:
        _STORED_IN_FP8.discard(param)


def is_stored_in_fp8(param: Tensor) -> bool:
    """Whether a hook of ``param`` stores its gradient in FP8, as ``note_stored_in_fp8`` was told."""
    return _STORED_IN_FP8.get(param) == id(param)  # a copy has its original's mark


def offer_quantized(param: Tensor, grad: Tensor, quantized: GradientTensor) -> None:
    """Hand over ``quantized``, made of ``grad``, which the caller's backward pass returns as the gradient of ``param``.

    The hook that stores the gradient then need not quantize ``grad``, unless autograd has added another gradient.
    """
    _QUANTIZED.add(param, (grad.data_ptr(), current_backward(), quantized))


def take_quantized(param: Tensor, grad: Tensor) -> GradientTensor | None:
    """The quantized ``grad``, the gradient of ``param``, that this backward pass has handed over; None for nothing."""
    found = _QUANTIZED.discard(param)
    if found is None:
        return None
    address, graph, quantized = found
    return quantized if address == grad.data_ptr() and graph == current_backward() else None


# Operations that multiply or divide by a number, each as one on a list of tensors.
_SCALES = {
    **dict.fromkeys((aten.mul_.Tensor, aten.mul_.Scalar), torch._foreach_mul_),
    **dict.fromkeys((aten.div_.Tensor, aten.div_.Scalar), torch._foreach_div_),
}
_SCALES_EACH = {
    **dict.fromkeys((aten._foreach_mul_.Scalar, aten._foreach_mul_.Tensor), torch._foreach_mul_),
    **dict.fromkeys((aten._foreach_div_.Scalar, aten._foreach_div_.Tensor), torch._foreach_div_),
}


class GradientTensor(BlockScaledTensor):
    """E4M3 blocks that read as FP32."""

    PARTS = ("data_blocks", "exponent", "factor", "nonfinite")
    SETTINGS = ("fmt", "multiplied")
    factor: Tensor  # FP32 [1]; value = data_blocks * 2**(exponent - 127) * factor
    nonfinite: Tensor  # FP32 [1]; 1 where an element was not finite when it was stored, else 0
    multiplied: bool  # whether ``factor`` belongs to this tensor and may differ from 1; until then tensors share one
    additions: int = 0  # since values were stored, for stochastic rounding

    @staticmethod
    def __new__(cls, data_blocks: Tensor, exponent: Tensor, factor: Tensor, nonfinite: Tensor):
        return cls._wrap((data_blocks, exponent, factor, nonfinite), {"fmt": E4M3, "multiplied": False}, torch.float32)

    @classmethod
    def from_float(cls, values: Tensor, fmt: FloatFormat = E4M3) -> GradientTensor:
        """Quantize ``values`` (any shape, any float dtype)."""
        values = values.detach() if values.requires_grad else values
        kernels = block_kernels() if values.is_cuda else None
        if kernels is not None:
            data, exponent, nonfinite = kernels.quantize(values, E4M3)
        else:
            data, exponent = quantize_rows(values, E4M3)
            nonfinite = _any_nonfinite(values)
        return cls.of_parts(data, exponent, nonfinite)

    @classmethod
    def empty(cls, like: Tensor, nonfinite: Tensor | None = None) -> GradientTensor:
        """An uninitialised gradient of the shape and on the device of ``like``, noted as finite."""
        rows, _, per_row = block_grid(like.shape)
        data = torch.empty(like.shape, dtype=E4M3.dtype, device=like.device)
        exponent = torch.empty(rows, per_row, dtype=torch.uint8, device=like.device)
        return cls.of_parts(
            data, exponent, torch.zeros(1, device=like.device, dtype=torch.float32) if nonfinite is None else nonfinite
        )

    @classmethod
    def of_parts(cls, data: Tensor, exponent: Tensor, nonfinite: Tensor) -> GradientTensor:
        """A gradient of these parts, with a factor of 1."""
        return cls(data, exponent, _one(data.device), nonfinite)

    def copied(self) -> GradientTensor:
        """A copy to which additions are rounded as to this tensor."""
        copy: GradientTensor = self.clone()  # type: ignore[assignment]
        copy.additions = self.additions
        return copy

    @torch.no_grad()
    def quantize_(self, values: Tensor) -> GradientTensor:
        """Store ``values`` anew."""
        self.nonfinite.zero_()
        self.store_(values.to(self.device))
        return self.written_()

    def store_(self, values: Tensor) -> None:
        """Write ``values`` into the blocks, and set ``nonfinite`` where an element is not finite.

        Nothing else changes: a graph may be captured that does the same. ``values`` are on this tensor's device.
        """
        kernels = block_kernels() if values.is_cuda else None
        if kernels is not None:
            kernels.quantize_into(values, E4M3, self.data_blocks, self.exponent, self.nonfinite)
        else:
            self.set_blocks_(*quantize_rows(values, E4M3))
            torch.maximum(self.nonfinite, _any_nonfinite(values), out=self.nonfinite)

    @torch.no_grad()
    def accumulate_(self, values: Tensor, alpha: float = 1.0) -> GradientTensor:
        """Add ``alpha * values``; the sum is rounded once, stochastically."""
        count = self.additions + 1
        kernels = block_kernels() if values.is_cuda else None
        if kernels is not None:
            kernels.accumulate(self.data_blocks, self.exponent, self.factor, self.nonfinite, values, alpha, count)
        else:
            total = self.dequantize() + alpha * values.float()
            scaled, exponent = scale_to_blocks(total, self.fmt)
            self.set_blocks_(round_stochastic(scaled, self.fmt.dtype, salts_of_values(scaled, count)), exponent)
            self.nonfinite.copy_(_any_nonfinite(total))
        return self.written_(count)

    def fold_(self) -> GradientTensor:
        """Make the factor 1. Values with another factor are rounded again."""
        if self.multiplied:
            self.quantize_(self.dequantize())
            self.multiplied = False
        return self

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The values as a plain tensor."""
        values = dequantize_rows(self.data_blocks, self.exponent) * self.factor
        return values.view(self.shape).to(dtype or self.dtype)

    @classmethod
    def scale(cls, grads: Sequence[GradientTensor], change: Callable[..., None], by: Any) -> None:
        """Multiply or divide ``grads`` of this class, all at once.

        Args:
            grads: on one device.
            change: ``torch._foreach_mul_`` or ``torch._foreach_div_``.
            by: a number, or a scalar tensor on the device.
        """
        change(own_factors(grads), by)

    @staticmethod
    def any_nonfinite(grads: list[GradientTensor]) -> Tensor:
        """1 where an element of any of ``grads`` is not finite, else 0: an FP32 scalar."""
        factors = [g.factor for g in grads if g.multiplied]
        bad = torch.cat([g.nonfinite for g in grads]).amax()
        return (bad + (~torch.cat(factors).isfinite()).any() > 0).float() if factors else bad

    def renewed_(self) -> GradientTensor:
        """Note that a graph has stored values in the blocks, and share the factor 1 again."""
        self.additions = 0
        if self.multiplied:
            self.factor, self.multiplied = _one(self.device), False
        return self

    def written_(self, additions: int = 0) -> GradientTensor:
        """Note that values were stored in the blocks, with a factor of 1, after ``additions`` additions."""
        self.additions = additions
        if self.multiplied:
            self.factor.fill_(1.0)
        return self

    @classmethod
    def _special(cls, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        this = args[0] if args else None
        if isinstance(this, GradientTensor):
            if func in _SCALES and _is_number(args[1]):
                _scale_each(_SCALES[func], [this], args[1])
                return this
            if func is aten.add_.Tensor and isinstance(args[1], Tensor) and args[1].shape == this.shape:
                other = args[1].dequantize() if isinstance(args[1], QuantizedTensor) else args[1]
                return this.accumulate_(other, kwargs.get("alpha", 1))
            if func is aten.zero_.default:
                this.data_blocks.zero_()
                this.exponent.fill_(UNIT)
                this.nonfinite.zero_()
                return this.written_()
            if func in (aten.detach.default, aten.alias.default):
                own_factors([this])  # the alias shares the factor: multiplying one multiplies the other
        if func in _SCALES_EACH and _is_number(args[1]):
            return _scale_each(_SCALES_EACH[func], *args)
        if func is aten._foreach_norm.Scalar and (args[1] if len(args) > 1 else kwargs.get("ord", 2)) == 2:
            return _norms(args[0], kwargs.get("dtype") or (args[2] if len(args) > 2 else None))
        if func is aten._amp_foreach_non_finite_check_and_unscale_.default:
            return _unscale(*args)
        return NotImplemented


@lru_cache(maxsize=16)
def _one(device: torch.device) -> Tensor:
    return torch.ones(1, device=device, dtype=torch.float32)


def _is_number(value: Any) -> bool:
    return not isinstance(value, Tensor) or (value.numel() == 1 and not isinstance(value, QuantizedTensor))


def _any_nonfinite(values: Tensor) -> Tensor:
    return (~values.isfinite()).any().float().reshape(1)


def own_factors(grads: Sequence[GradientTensor]) -> list[Tensor]:
    """The factors of ``grads``, FP32 [1] each, for a change in place; shared factors are replaced first."""
    by_device: dict[torch.device, list[GradientTensor]] = defaultdict(list)
    for grad in grads:
        if not grad.multiplied:
            by_device[grad.device].append(grad)
    for device, sharing in by_device.items():
        # Each factor begins at a multiple of 16 bytes, as allocations do: Triton compiles kernels for other addresses
        # once more.
        made = torch.ones(len(sharing), 4, device=device, dtype=torch.float32)[:, :1].unbind()
        for grad, factor in zip(sharing, made, strict=True):
            grad.factor, grad.multiplied = factor, True
    return [grad.factor for grad in grads]


def _scale_each(change: Callable[..., None], tensors: Sequence[Tensor], by: Any) -> None:
    members: dict[Any, list[Any]] = defaultdict(list)
    for tensor in tensors:
        members[type(tensor) if isinstance(tensor, GradientTensor) else None].append(tensor)
    for kind, group in members.items():
        if kind is None:
            change(group, by)
        else:
            kind.scale(group, change, by.reshape(()).to(group[0].device) if isinstance(by, Tensor) else by)


def _norms(tensors: list[Tensor], dtype: torch.dtype | None) -> list[Tensor]:
    ours = [t for t in tensors if isinstance(t, GradientTensor)]
    kernels = block_kernels() if ours[0].is_cuda else None
    if kernels is not None:
        norms = kernels.norms([g.parts()[:3] for g in ours])
    else:
        norms = [torch.linalg.vector_norm(g.dequantize()) for g in ours]
    found = {id(g): n for g, n in zip(ours, norms, strict=True)}
    plain = [t for t in tensors if id(t) not in found]
    if plain:
        norms = torch._foreach_norm(plain, dtype=torch.float32)  # squares of half values overflow
        found |= {id(t): n for t, n in zip(plain, norms, strict=True)}
    return [found[id(t)].to(dtype or torch.float32) for t in tensors]


def _unscale(tensors: list[Tensor], found_inf: Tensor, inv_scale: Tensor) -> None:
    """torch's unscaling for GradScaler: multiply by ``inv_scale``, raise ``found_inf`` where one is not finite."""
    ours = [t for t in tensors if isinstance(t, GradientTensor)]
    plain = [t for t in tensors if not isinstance(t, GradientTensor)]
    torch._foreach_mul_(own_factors(ours), inv_scale.reshape(()))
    if plain:
        torch._amp_foreach_non_finite_check_and_unscale_(plain, found_inf, inv_scale)
    bad = torch.maximum(GradientTensor.any_nonfinite(ours), found_inf.float().reshape(()))
    found_inf.copy_(bad.view_as(found_inf))
