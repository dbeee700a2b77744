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
    """What is computed from the inputs that are kept.

    Attributes:
        module: holds the parameters.
        gated: whether the inputs are (gate, up), and the output ``module(gate) * up``; else ``module(input)``.
        keeps: how the inputs are kept.
        device, autocast: the inputs' device, and the dtype of its autocast in forward; None without.
    """

    module: nn.Module
    gated: bool
    keeps: Keeps
    device: str = "cpu"
    autocast: torch.dtype | None = None

    def values(self, *inputs: Tensor) -> Tensor:
        """The output, as the module computes it."""
        return self.of(self.module, inputs)

    def of(self, module: nn.Module, inputs: Sequence[Tensor]) -> Tensor:
        """The output with the parameters of ``module``."""
        out = own_values(module, inputs[0])
        return out * inputs[1] if self.gated else out

    def as_in_forward(self) -> Any:
        """The autocast of forward."""
        return torch.autocast(self.device, self.autocast, enabled=self.autocast is not None, cache_enabled=False)

    def restored(self, tensors: Sequence[Tensor], dtypes: Sequence[torch.dtype]) -> list[Tensor]:
        """The inputs that were kept."""
        step = self.keeps.tensors
        return [self.keeps.restore(tensors[i * step : (i + 1) * step], dtype) for i, dtype in enumerate(dtypes)]

    def again(self, dtypes: Sequence[torch.dtype]) -> Again:
        """Computes the output in backward."""

        def compute(tensors: Sequence[Tensor]) -> Tensor:
            with self.as_in_forward():
                return self.values(*self.restored(tensors, dtypes))

        return Again(compute)


class KeptFunction(torch.autograd.Function):
    """(formula, number of inputs, kept, inputs, parameters) to the output. ``kept`` takes what is kept of the inputs.

    The link is an empty tensor for each input, through whose node a second derivative reaches the input.
    """

    @staticmethod
    def forward(ctx: Any, formula: Formula, count: int, kept: list[Tensor], links: Any, *tensors: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        inputs = tensors[:count]
        out = formula.values(*inputs)
        for x in inputs:
            kept += formula.keeps.keep(x)
        ctx.save_for_backward(*kept, *(link for link, _ in links))
        ctx.sums = [total for _, total in links]
        ctx.formula, ctx.count, ctx.dtypes = formula, count, [x.dtype for x in inputs]
        # Inputs that are kept as they are stay with ``kept`` as plain values, without their graph.
        kept[:] = [tensor.detach() for tensor in kept]
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        needs = ctx.needs_input_grad[4:]
        if grad is None:
            return (None,) * (4 + len(needs))
        formula: Formula = ctx.formula
        saved = ctx.saved_tensors
        links = saved[len(saved) - len(ctx.sums) :]
        inputs = formula.restored(saved, ctx.dtypes)
        slope = SLOPES.get(type(formula.module))
        again = torch.is_grad_enabled() or is_batched(grad) or is_legacy_batched(grad)
        found: list[Tensor | None]
        if again:
            found = _differentiable(formula, inputs, list(zip(links, ctx.sums, strict=True)), grad, needs)
        elif slope is not None and all(x.dtype == grad.dtype for x in inputs):
            found = _by_slope(formula, slope, inputs, grad)
        else:
            found = _by_autograd(formula, inputs, grad, needs)
        return None, None, None, None, *found


@torch.no_grad()
def _by_slope(formula: Formula, slope: Slope, inputs: list[Tensor], grad: Tensor) -> list[Tensor | None]:
    if not formula.gated:
        return [slope(formula.module, grad, inputs[0])]
    gate, up = inputs
    return [slope(formula.module, grad * up, gate), grad * own_values(formula.module, gate)]


def _by_autograd(formula: Formula, inputs: list[Tensor], grad: Tensor, needs: Sequence[bool]) -> list[Tensor | None]:
    # A copy with parameters of its own: gradient hooks of the model's parameters run once, after this.
    twin = copy.copy(formula.module)
    own = {n: None if p is None else p.detach().requires_grad_() for n, p in formula.module._parameters.items()}
    twin.__dict__["_parameters"] = own
    leaves = [x.detach().requires_grad_() for x in inputs]
    with torch.enable_grad(), formula.as_in_forward():
        out = formula.of(twin, leaves)
    return _gradients(out, [*leaves, *(p for p in own.values() if p is not None)], grad, needs, False)


def _differentiable(
    formula: Formula, inputs: list[Tensor], links: list[tuple[Tensor, InputGradient]], grad: Tensor,
    needs: Sequence[bool],
) -> list[Tensor | None]:  # fmt: skip
    """The gradients as operations that autograd differentiates again, and that take batches of gradients."""
    graph = torch.is_grad_enabled()
    with torch.enable_grad(), formula.as_in_forward():
        leaves = [
            linked(link, x, total) if graph else x.detach().requires_grad_()
            for x, (link, total) in zip(inputs, links, strict=True)
        ]
        out = formula.values(*leaves)
    params = [p for p in formula.module._parameters.values() if p is not None]
    return _gradients(out, [*leaves, *params], grad, needs, graph)


def _gradients(
    out: Tensor, of: Sequence[Tensor], grad: Tensor, needs: Sequence[bool], graph: bool
) -> list[Tensor | None]:
    wanted = [tensor for tensor, need in zip(of, needs, strict=True) if need]
    found = iter(torch.autograd.grad(out, wanted, grad, create_graph=graph))
    return [next(found) if need else None for need in needs]


def keep_inputs(formula: Formula, *inputs: Tensor) -> Tensor:
    """The output of ``formula``, of which autograd keeps the inputs as ``formula.keeps`` says."""
    params = [p for p in formula.module._parameters.values() if p is not None]
    kept: list[Tensor] = []
    links = [link_to(x) for x in inputs]
    out: Tensor = KeptFunction.apply(formula, len(inputs), kept, links, *inputs, *params)
    if formula.keeps.again:
        mark(out, formula.again([x.dtype for x in inputs]), kept)
    return out
