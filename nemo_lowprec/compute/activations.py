"""What activations and gated activations compute, as operations of torch: the reference of the fused kernels.

An activation is computed in FP32 from half values and rounded to half once. A gated activation rounds the product of
two half values to half, too. These are the roundings of torch's modules.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


def _in_fp32(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _quick_gelu(x: Tensor) -> Tensor:
    wide = _in_fp32(x)
    return (wide * torch.sigmoid(1.702 * wide)).to(x.dtype)


def _quick_gelu_backward(dy: Tensor, x: Tensor) -> Tensor:
    wide = _in_fp32(x)
    s = torch.sigmoid(1.702 * wide)
    return (_in_fp32(dy) * s * (1 + 1.702 * wide * (1 - s))).to(x.dtype)


def _silu_backward(dy: Tensor, x: Tensor) -> Tensor:
    if not torch.is_grad_enabled():
        return torch.ops.aten.silu_backward(dy, x)  # type: ignore[no-any-return]
    wide = _in_fp32(x)  # torch's own has no derivative
    s = torch.sigmoid(wide)
    return (_in_fp32(dy) * s * (1 + wide * (1 - s))).to(x.dtype)


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


_aten = torch.ops.aten
KINDS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]] = {
    "gelu": (F.gelu, lambda dy, x: _aten.gelu_backward(dy, x)),
    "gelu_tanh": (_gelu_tanh, lambda dy, x: _aten.gelu_backward(dy, x, approximate="tanh")),
    "silu": (F.silu, _silu_backward),
    "relu": (F.relu, lambda dy, x: _aten.threshold_backward(dy, x, 0)),
    "quick_gelu": (_quick_gelu, _quick_gelu_backward),
}


@dataclass(frozen=True)
class Activation:
    """An activation, or the product of an activation and another tensor.

    Attributes:
        kind: of ``KINDS``.
        form: ``plain``: of one tensor [..., features]; ``gated``: of the gate and the tensor that its activation is
            multiplied with; ``gate_up`` and ``up_gate``: of one tensor [..., 2 * features] that holds both, in this
            order.
    """

    kind: str
    form: str = "plain"

    @property
    def joint(self) -> bool:
        """Whether one tensor holds the gate and the other factor."""
        return self.form in ("gate_up", "up_gate")

    def parts(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The activation's argument, and what the activation is multiplied with."""
        if not self.joint:
            return tensors
        first, second = tensors[0].chunk(2, -1)
        return (first, second) if self.form == "gate_up" else (second, first)

    def forward(self, tensors: tuple[Tensor, ...]) -> Tensor:
        """The result [..., features] in the dtype of ``tensors``; autograd may follow."""
        x, *up = self.parts(tensors)
        y = KINDS[self.kind][0](x)
        return y * up[0] if up else y

    def backward(self, grad: Tensor, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The gradients of ``tensors`` for ``grad`` of the result; has derivatives of any order."""
        x, *up = self.parts(tensors)
        act, act_backward = KINDS[self.kind]
        if not up:
            return (act_backward(grad, x),)
        dx, dup = act_backward(grad * up[0], x), grad * act(x)
        if self.joint:
            return (torch.cat((dx, dup) if self.form == "gate_up" else (dup, dx), -1),)
        return dx, dup
