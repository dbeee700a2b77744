"""The sum of a residual block, x + f(norm(x)), and the gradient of x.

Autograd adds what comes back through the norm to what comes back past it: two tensors are read and a third is written.
Here the sum hands its gradient to the norm, whose backward kernel adds it. Where the residual stream is FP32, that
kernel also writes the gradient in half precision, for the branch before.

The model's code runs as it is. The last layer of a branch returns a ``BranchOutput``, a tensor like any other but for
``+``. Which layers are the last ones is learned: in the graph of a sum the norm behind it finds the layers that have
made its terms.
"""

from __future__ import annotations

from typing import Any
from weakref import ref

import torch
from torch import Tensor

from nemo_lowprec.compat.autograd import apply_function, is_batched, is_legacy_batched, is_wanted
from nemo_lowprec.compat.tensors import PlainSubclass
from nemo_lowprec.compute.backends.base import is_transformed
from nemo_lowprec.compute.shared_input import InputGradient

_BRANCH, _HALF = "_lowprec_branch", "_lowprec_half"


class BranchOutput(PlainSubclass):
    """The output of a layer that ends a branch."""

    def __add__(self, other: Any) -> Tensor:  # type: ignore[override]
        return _sum(self, other)

    def __radd__(self, other: Any) -> Tensor:  # type: ignore[override]
        return _sum(self, other)


def as_branch(out: Tensor) -> Tensor:
    """``out`` itself, in another class while autograd records."""
    if type(out) is Tensor and out.requires_grad and torch.is_grad_enabled() and not is_transformed():
        out.__class__ = BranchOutput
    return out


def learn(source: Tensor) -> None:
    """Note of the layers whose output is a term of ``source``, which a norm reads, that they end a branch."""
    terms = [source.grad_fn]
    for _ in range(2):  # a sum may have three terms
        sums = [node for node in terms if node is not None and node.name() == "AddBackward0"]
        terms = [term for node in sums for term, _ in node.next_functions]
        for plan in (getattr(term, "plan", None) for term in terms):
            if plan is not None:
                plan.ends_branch = True


# (the tensor that a norm has read last, held weakly; its version; the gradient's sum; the handle) of the process. One
# tuple, which threads replace as a whole. The handle's graph holds the tensor: see ``SharedInput.give_out``.
_latest: tuple[Any, int, InputGradient, Tensor] | None = None


def hand_out(source: Tensor, gradient: InputGradient, handle: Tensor) -> None:
    """Let a sum that reads ``source`` next read ``handle`` in its place, and put its gradient into ``gradient``.

    Args:
        source: what a norm has read.
        gradient: the norm's backward pass adds it to the gradient of ``source``.
        handle: an empty tensor in the graph of the norm.
    """
    global _latest
    _latest = ref(source), source._version, gradient, handle


def _handed_out(source: Tensor) -> tuple[InputGradient, Tensor] | None:
    global _latest
    there = _latest
    if there is None or there[0]() is not source or there[1] != source._version:
        return None
    _latest = None
    return there[2], there[3]


def forget(gradient: InputGradient) -> None:
    """Drop the handle of ``gradient``, which would keep the norm's input alive after the norm's backward pass."""
    global _latest
    if _latest is not None and _latest[2] is gradient:
        _latest = None


def _sum(branch: BranchOutput, other: Any) -> Tensor:
    alike = type(other) in (Tensor, BranchOutput) and other.shape == branch.shape and other.device == branch.device
    records = torch.is_grad_enabled() and not is_transformed()
    residual, found = other, _handed_out(other) if alike and records else None
    if found is None and alike and records:
        residual, branch, found = branch, other, _handed_out(branch)
    if found is None:
        return Tensor.__add__(branch, residual)
    gradient, handle = found
    out: Tensor = _apply(handle, branch, (residual, gradient))
    if out.dtype != branch.dtype:
        out.__dict__[_BRANCH] = branch.dtype, out._version
    return out


class _Sum(torch.autograd.Function):
    """(handle of the residual, branch, (residual, its gradient's sum)) to residual + branch."""

    @staticmethod
    def forward(ctx: Any, handle: Tensor, branch: Tensor, call: Any) -> Tensor:
        residual, ctx.gradient = call  # autograd must not see the residual
        ctx.set_materialize_grads(False)
        ctx.dtypes = residual.dtype, branch.dtype
        return torch.add(residual, branch)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[None, Tensor | None, None]:
        if grad is None:
            return None, None, None
        residual, branch = ctx.dtypes
        again = torch.is_grad_enabled() or is_batched(grad) or is_legacy_batched(grad)
        # A sum that no norm takes would keep its graph alive, and the graph the sum.
        if not again or is_wanted(ctx, 0):
            ctx.gradient.put(grad.to(residual))
        there = None if again else _half_of(grad, branch)
        return None, grad.to(branch) if there is None else there, None


_apply = apply_function(_Sum)


def branch_dtype(source: Tensor) -> torch.dtype | None:
    """The dtype in which the branch that ``source`` is a sum of wants its gradient; None where that is the sum's."""
    dtype, version = source.__dict__.get(_BRANCH, (None, 0))
    return dtype if version == source._version else None


def leave_half(grad: Tensor, half: Tensor) -> None:
    """Hand ``half``, the same values as ``grad`` in another dtype, to the sum whose gradient ``grad`` is."""
    grad.__dict__[_HALF] = half, grad._version


def _half_of(grad: Tensor, dtype: torch.dtype) -> Tensor | None:
    half, version = grad.__dict__.get(_HALF, (None, 0))
    return half if half is not None and version == grad._version and half.dtype == dtype else None
