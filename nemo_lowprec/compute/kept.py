"""What norms, activations and gated activations keep from forward to backward: their inputs, and nothing else.

``activations="fp8"``        the inputs in E4M3, each block of 128 features of a row with a power of two (COAT,
                             arXiv:2410.19313, section 5): 129 bytes for 128 elements
``activations="recompute"``  the inputs as they are; the linear layers behind keep no input (``again.py``), and no
                             linear layer keeps an FP8 weight

Backward computes the module again from the inputs that were kept; for activations that torch has a derivative of, only
the derivative. A module that computes with kernels of its own keeps through ``Keeps``: its class has an attribute
``keeps``, which is None where the level does not ask for it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from nemo_lowprec.compat.autograd import is_batched, is_legacy_batched
from nemo_lowprec.compute.again import Again, mark
from nemo_lowprec.compute.backends.base import Backend
from nemo_lowprec.compute.double_backward import link_to, linked
from nemo_lowprec.compute.shared_input import InputGradient


@dataclass(frozen=True)
class Keeps:
    """How modules keep what backward needs.

    Attributes:
        backend: quantizes.
        fp8: whether inputs are kept in FP8; else as they are.
        again: whether the layers behind compute their input again.
    """

    backend: Backend
    fp8: bool
    again: bool

    def keep(self, values: Tensor) -> list[Tensor]:
        """The tensors to keep, for ``save_for_backward``, in the place of ``values`` [..., features]."""
        return self.backend.compress(values) if self.fp8 else [values]

    def restore(self, tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """The values of which ``keep`` has returned ``tensors``, in their ``dtype``."""
        return self.backend.decompress(tensors, dtype) if self.fp8 else tensors[0]

    @property
    def tensors(self) -> int:
        """How many tensors ``keep`` returns."""
        return 2 if self.fp8 else 1


def own_values(module: nn.Module, x: Tensor) -> Tensor:
    """The output of the forward of the module's class."""
    return type(module).forward(module, x)  # type: ignore[no-any-return]


Slope = Callable[[Any, Tensor, Tensor], Tensor]  # (module, gradient of its output, its input) to the input's gradient

SLOPES: dict[type[nn.Module], Slope] = {
    nn.GELU: lambda module, grad, x: torch.ops.aten.gelu_backward(grad, x, approximate=module.approximate),
    nn.SiLU: lambda module, grad, x: torch.ops.aten.silu_backward(grad, x),
}


@dataclass
class Formula:
    """What is computed from an input that is kept.

    Attributes:
        module: a norm or an activation.
        keeps: how its input is kept.
        device, autocast: the input's device, and the dtype of its autocast in forward; None without.
    """

    module: nn.Module
    keeps: Keeps
    device: str = "cpu"
    autocast: torch.dtype | None = None

    def as_in_forward(self) -> Any:
        """The autocast of forward."""
        return torch.autocast(self.device, self.autocast, enabled=self.autocast is not None, cache_enabled=False)

    def again(self, dtype: torch.dtype) -> Again:
        """Computes the output in backward."""

        def compute(tensors: Sequence[Tensor]) -> Tensor:
            with self.as_in_forward():
                return own_values(self.module, self.keeps.restore(tensors, dtype))

        return Again(compute)


class KeptFunction(torch.autograd.Function):
    """(formula, kept, link, input, parameters) to the output. ``kept`` takes what is kept of the input.

    The link is an empty tensor through whose node a second derivative reaches the input.
    """

    @staticmethod
    def forward(ctx: Any, formula: Formula, kept: list[Tensor], link: Any, x: Tensor, *params: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        out = own_values(formula.module, x)
        kept += formula.keeps.keep(x)
        empty, ctx.sum = link
        ctx.save_for_backward(*kept, empty)
        ctx.formula, ctx.dtype = formula, x.dtype
        # An input that is kept as it is stays with ``kept`` as plain values, without its graph.
        kept[:] = [tensor.detach() for tensor in kept]
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        needs = ctx.needs_input_grad[3:]
        if grad is None:
            return (None,) * (3 + len(needs))
        formula: Formula = ctx.formula
        *kept, link = ctx.saved_tensors
        x = formula.keeps.restore(kept, ctx.dtype)
        slope = SLOPES.get(type(formula.module))
        again = torch.is_grad_enabled() or is_batched(grad) or is_legacy_batched(grad)
        found: list[Tensor | None]
        if again:
            found = _differentiable(formula, x, link, ctx.sum, grad, needs)
        elif slope is not None and x.dtype == grad.dtype:
            with torch.no_grad():
                found = [slope(formula.module, grad, x)]
        else:
            found = _by_autograd(formula, x, grad, needs)
        return None, None, None, *found


def _by_autograd(formula: Formula, x: Tensor, grad: Tensor, needs: Sequence[bool]) -> list[Tensor | None]:
    # A copy with parameters of its own: gradient hooks of the model's parameters run once, after this.
    twin = copy.copy(formula.module)
    own = {n: None if p is None else p.detach().requires_grad_() for n, p in formula.module._parameters.items()}
    twin.__dict__["_parameters"] = own
    leaf = x.detach().requires_grad_()
    with torch.enable_grad(), formula.as_in_forward():
        out = own_values(twin, leaf)
    return _gradients(out, [leaf, *(p for p in own.values() if p is not None)], grad, needs, False)


def _differentiable(
    formula: Formula, x: Tensor, link: Tensor, total: InputGradient, grad: Tensor, needs: Sequence[bool]
) -> list[Tensor | None]:
    """The gradients as operations that autograd differentiates again, and that take batches of gradients."""
    graph = torch.is_grad_enabled()
    with torch.enable_grad(), formula.as_in_forward():
        leaf = linked(link, x, total) if graph else x.detach().requires_grad_()
        out = own_values(formula.module, leaf)
    params = [p for p in formula.module._parameters.values() if p is not None]
    return _gradients(out, [leaf, *params], grad, needs, graph)


def _gradients(
    out: Tensor, of: Sequence[Tensor], grad: Tensor, needs: Sequence[bool], graph: bool
) -> list[Tensor | None]:
    wanted = [tensor for tensor, need in zip(of, needs, strict=True) if need]
    found = iter(torch.autograd.grad(out, wanted, grad, create_graph=graph))
    return [next(found) if need else None for need in needs]


def keep_input(formula: Formula, x: Tensor) -> Tensor:
    """The output of ``formula``, of which autograd keeps the input ``x`` as ``formula.keeps`` says."""
    params = [p for p in formula.module._parameters.values() if p is not None]
    kept: list[Tensor] = []
    out: Tensor = KeptFunction.apply(formula, kept, link_to(x), x, *params)
    if formula.keeps.again:
        mark(out, formula.again(x.dtype), kept)
    return out
