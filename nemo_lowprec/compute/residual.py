"""The sum of a residual block, x + f(norm(x)), and the gradient of x.

Autograd adds what comes back through the norm to what comes back past it: two tensors are read and a third is written.
Here the sum hands its gradient to the norm, whose backward kernel adds it. Where the residual stream is FP32, that
kernel also writes the gradient in half precision, for the branch before. The kernel of the sum computes the norm that
reads the sum, too, which so need not read it (``NormCall``).

The model's code runs as it is. The last layer of a branch returns a ``BranchOutput``, a tensor like any other but for
``+``. Which layers are the last ones is learned: in the graph of a sum the norm behind it finds the layers that have
made its terms.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from nemo_lowprec.compat.autograd import (
    after_backward,
    apply_function,
    current_backward,
    is_batched,
    is_legacy_batched,
    is_wanted,
)
from nemo_lowprec.compat.tensors import PlainSubclass
from nemo_lowprec.compute.backends.base import NormKind, is_transformed
from nemo_lowprec.compute.shared_input import InputGradient

_BRANCH, _HALF, _NORMED = "_lowprec_branch", "_lowprec_half", "_lowprec_normed"


@dataclass
class NormCall:
    """How the norm that reads a residual sum computes. A pass before has shown which norm this is.

    Attributes:
        kernels: as ``kernels/triton_norm.py``.
        weight, bias, kind, out: as the norm's backend was called.
        taken: whether the norm has read what the last sum has computed for it.
    """

    kernels: Any
    weight: Tensor
    bias: Tensor | None
    kind: NormKind
    out: torch.dtype
    taken: bool = True

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None  # the layers of a copied model learn anew

    def __reduce__(self) -> Any:
        return type(None), ()

    def is_of(self, weight: Tensor | None, bias: Tensor | None, kind: NormKind, out: torch.dtype) -> bool:
        """Whether a norm computes the same. In a CUDA graph's capture parameters have twins in their memory."""
        same = _same_memory(weight, self.weight) and _same_memory(bias, self.bias)
        return same and kind == self.kind and out == self.out

    def add(self, residual: Tensor, branch: Tensor) -> tuple[Tensor, ...] | None:
        """(the sum, the norm of the sum, the norm's statistics); None where no kernel computes them."""
        if not self.kernels.fits_sum(residual, branch, self.weight, self.bias, self.out):
            return None
        kind = self.kind
        how = kind.eps, kind.layer, kind.zero_centered, self.out
        return self.kernels.add_forward(residual, branch, self.weight, self.bias, *how)  # type: ignore[no-any-return]


def _same_memory(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None or a is b:
        return a is b
    return a.data_ptr() == b.data_ptr() and a.dtype == b.dtype and a.shape == b.shape


class BranchOutput(PlainSubclass):
    """The output of a layer that ends a branch.

    Attributes:
        plan: the layer's ``GemmPlan``.
    """

    plan: Any = None

    def __add__(self, other: Any) -> Tensor:  # type: ignore[override]
        return _sum(self, other)

    def __radd__(self, other: Any) -> Tensor:  # type: ignore[override]
        return _sum(self, other)


def as_branch(out: Tensor, plan: Any) -> Tensor:
    """``out`` itself, the output of the layer with ``plan``, in another class while autograd records."""
    if type(out) is Tensor and out.requires_grad and torch.is_grad_enabled() and not is_transformed():
        out.__class__ = BranchOutput
        out.plan = plan  # type: ignore[attr-defined]
    return out


def learn(
    source: Tensor, kernels: Any, weight: Tensor | None, bias: Tensor | None, kind: NormKind, out: torch.dtype
) -> None:
    """A norm reads ``source``: note of the layers whose outputs are terms of ``source`` that they end a branch.

    Args:
        kernels, weight, bias, kind, out: of the norm, as ``NormCall`` has them. A norm without a weight is not noted.
    """
    terms = [source.grad_fn]
    for last in (True, False):  # a sum may have three terms
        sums = [node for node in terms if node is not None and node.name() == "AddBackward0"]
        terms = [term for node in sums for term, _ in node.next_functions]
        for plan in (getattr(term, "plan", None) for term in terms):
            if plan is not None:
                plan.ends_branch = True
                if last and plan.inputs.parameters_stay and weight is not None:
                    plan.read_by = NormCall(kernels, weight, bias, kind, out)


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
    if current_backward() != -1:  # a recomputed block, which may stop before its sum
        after_backward(partial(forget, gradient))


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
    norm, made = _norm_behind(branch), list[Tensor]()
    out: Tensor = _apply(handle, branch, (residual, gradient, norm, made))
    if norm is not None and made:
        norm.taken = False
        out.__dict__[_NORMED] = norm, made, out._version
    if out.dtype != branch.dtype:
        out.__dict__[_BRANCH] = branch.dtype, out._version
    return out


def _norm_behind(branch: Tensor) -> NormCall | None:
    """The norm that will read the sum of ``branch`` and another term; None for an unknown one."""
    plan: Any = getattr(branch, "plan", None)
    norm: NormCall | None = None if plan is None else plan.read_by
    if norm is None or norm.taken:
        return norm
    plan.read_by = None  # the norm has not read the last sum
    return None


def take_normed(
    source: Tensor, weight: Tensor | None, bias: Tensor | None, kind: NormKind, out: torch.dtype
) -> list[Tensor] | None:
    """The norm of ``source`` and its statistics, where the sum that has made ``source`` has computed them."""
    norm, made, version = source.__dict__.pop(_NORMED, (None, None, 0))
    if norm is None or version != source._version or not norm.is_of(weight, bias, kind, out):
        return None
    norm.taken = True
    return made  # type: ignore[no-any-return]


class _Sum(torch.autograd.Function):
    """(handle of the residual, branch, call) to residual + branch.

    ``call``: the residual, its gradient's sum, the ``NormCall`` of the norm behind or None, and a list that gets the
    norm's result and statistics.
    """

    @staticmethod
    def forward(ctx: Any, handle: Tensor, branch: Tensor, call: Any) -> Tensor:
        residual, ctx.gradient, norm, made = call  # autograd must not see the residual
        ctx.set_materialize_grads(False)
        ctx.dtypes = residual.dtype, branch.dtype
        found = None if norm is None else norm.add(residual, branch)
        if found is None:
            return torch.add(residual, branch)
        total, *of_norm = found
        made += of_norm
        return total

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
