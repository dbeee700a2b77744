"""A linear layer whose output holds queries, keys and values, and the gradient that comes back of them.

Models write ``qkv(x).reshape(B, N, 3, heads, dim).permute(2, 0, 3, 1, 4).unbind(0)``. Of this torch stacks the three
gradients, and copies the stack into the layout of the layer's output, before the layer quantizes it. Here one kernel
writes the three into that layout and quantizes them (``Backend.join_gradients``).

The model's code runs as it is. The layer returns a ``LayerOutput``, a tensor that is like any other but for ``reshape``
(``view``), ``permute`` and ``unbind``: where these three follow each other as above, the last one has this backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from nemo_lowprec.compat.autograd import apply_function, is_batched, is_legacy_batched
from nemo_lowprec.compat.tensors import PlainSubclass, base_of
from nemo_lowprec.compute.backends.base import Backend, is_transformed, side_by_side
from nemo_lowprec.compute.linear import LowPrecisionLinear
from nemo_lowprec.compute.producers import GradReader

_PARTS = 3
_SPLIT = 2  # the dimension of the parts in [batch, tokens, parts, heads, dim]


class SplitLinear(LowPrecisionLinear):
    """``LowPrecisionLinear`` that returns a ``LayerOutput`` while autograd records."""

    def forward(self, input: Tensor) -> Tensor:
        out = super().forward(input)
        if not torch.compiler.is_compiling() and type(out) is Tensor and out.requires_grad and not is_transformed():
            return as_layer_output(out, self.gemm_plan.backend)
        return out


def as_layer_output(out: Tensor, backend: Backend) -> LayerOutput:
    """``out`` itself, in another class."""
    out.__class__ = LayerOutput
    out.__dict__["_backend"] = backend
    return out  # type: ignore[return-value]


class LayerOutput(PlainSubclass):
    """[batch, tokens, features]: the output of a ``SplitLinear``. Attribute ``_backend``: the layer's."""

    _backend: Backend

    def reshape(self, *shape: Any) -> Tensor:  # type: ignore[override]
        return _in_parts(self, Tensor.reshape(self, *shape))

    def view(self, *shape: Any) -> Tensor:  # type: ignore[override]
        return _in_parts(self, Tensor.view(self, *shape))


def _in_parts(out: LayerOutput, shaped: Tensor) -> Tensor:
    whole = shaped.dim() == 5 and shaped.shape[_SPLIT] == _PARTS and base_of(shaped) is out
    if whole and shaped.shape[3] * shaped.shape[4] * _PARTS == out.shape[-1]:
        shaped.__class__ = Parts
        shaped.__dict__.update(_output=out, _order=(0, 1, 2, 3, 4))
    return shaped


class Parts(PlainSubclass):
    """A view of a ``LayerOutput``: [batch, tokens, parts, heads, dim], permuted.

    Attributes:
        _output: the ``LayerOutput``.
        _order: the permutation.
    """

    _output: LayerOutput
    _order: tuple[int, ...]

    def permute(self, *dims: Any) -> Tensor:  # type: ignore[override]
        result = Tensor.permute(self, *dims)
        dims = tuple(dims[0]) if len(dims) == 1 and not isinstance(dims[0], int) else dims
        result.__class__ = Parts
        result.__dict__.update(_output=self._output, _order=tuple(self._order[d] for d in dims))
        return result

    def unbind(self, dim: int = 0) -> Any:
        if self._order[dim] != _SPLIT or not self._joins():
            return Tensor.unbind(self, dim)
        there = self.__dict__.get("_unbound")
        if there is None:
            out = self._output
            there = self.__dict__["_unbound"] = _apply(self, self._order, out._backend, GradReader.of(out))
        return there

    def __getitem__(self, index: Any) -> Tensor:  # type: ignore[override]
        if type(index) is int and self._order[0] == _SPLIT and self._joins():
            return self.unbind(0)[index]  # type: ignore[no-any-return]
        return Tensor.__getitem__(self, index)

    def _joins(self) -> bool:
        """Whether the gradients will be joined."""
        if "_seen" in self._output.__dict__:
            self._output.__dict__["_seen"].append(self._order)
        return self.requires_grad and torch.is_grad_enabled()


class _Unbind(torch.autograd.Function):
    """(parts, their order, the layer's backend, who reads the gradient) to each part without the parts' dimension."""

    @staticmethod
    def forward(ctx: Any, parts: Parts, order: tuple[int, ...], backend: Backend, reader: GradReader | None) -> Any:
        ctx.set_materialize_grads(False)
        ctx.order, ctx.backend, ctx.reader = order, backend, reader
        # As one of several views, torch would forbid to change a part in place.
        return tuple(part.detach() for part in Tensor.unbind(parts, order.index(_SPLIT)))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        given = [grad for grad in grads if grad is not None]
        if not given:
            return None, None, None, None
        filled = [torch.zeros_like(given[0]) if grad is None else grad for grad in grads]
        order, place = ctx.order, ctx.order.index(_SPLIT)
        if torch.is_grad_enabled() or any(is_batched(t) or is_legacy_batched(t) for t in filled):
            return torch.stack(filled, place), None, None, None
        # Of a part's dimensions, those that are batch, tokens, heads and dim.
        left = [d for d in order if d != _SPLIT]
        parts = [grad.permute([left.index(d) for d in (0, 1, 3, 4)]) for grad in filled]
        return _joined(parts, ctx.backend, ctx.reader).permute(order), None, None, None


_apply = apply_function(_Unbind)


def _joined(parts: Sequence[Tensor], backend: Backend, reader: GradReader | None) -> Tensor:
    """The gradients [batch, tokens, heads, dim] as [batch, tokens, parts, heads, dim], offered to ``reader``."""
    batch, tokens, heads, dim = parts[0].shape
    if reader is not None and reader.wants(batch * tokens, parts[0].dtype) and (reader.rowwise or reader.columnwise):
        joined, data, sums = backend.join_gradients(
            parts, reader.operand, rowwise=reader.rowwise, columnwise=reader.columnwise, record=reader.record,
            sums=reader.sums,
        )  # fmt: skip
        reader.offer(joined, data, sums)
    else:
        joined = side_by_side(parts)
        if reader is not None:
            reader.announce(joined)
    return joined.view(batch, tokens, len(parts), heads, dim)
