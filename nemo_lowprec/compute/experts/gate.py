"""What an expert computes between its two projections: a known activation, or the module's own operations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from nemo_lowprec.compat.transformers import apply_gate
from nemo_lowprec.compute.activations import KINDS, Activation
from nemo_lowprec.compute.experts.layout import ExpertsLayout

_PROBE = 64


@dataclass(frozen=True)
class Gate:
    """Computes [rows, outs] of the first projection to [rows, ins] of the second.

    Attributes:
        gated: as in ``ExpertsLayout``.
        activation: what is computed; None where only the module knows, which then computes again in backward.
    """

    gated: bool
    activation: Activation | None

    @classmethod
    @torch.no_grad()
    def of(cls, module: nn.Module, layout: ExpertsLayout) -> Gate:
        """The gate of ``module``, whose activation is found by its values."""
        unknown = cls(layout.gated, None)
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(_PROBE, 2 * _PROBE, generator=generator, dtype=torch.float32) * 4
        try:
            found = unknown._run(module, x.clone())
        except Exception:  # it takes other sizes, or other devices
            return unknown
        for kind in KINDS:
            for form in ("gate_up", "up_gate") if layout.gated else ("plain",):
                activation = Activation(kind, form)
                expected = activation.forward((x,))
                if found.shape == expected.shape and torch.allclose(found, expected, rtol=1e-5, atol=1e-6):
                    return cls(layout.gated, activation)
        return unknown

    def _run(self, module: Any, h: Tensor) -> Tensor:
        return apply_gate(module, h) if self.gated else module.act_fn(h)  # type: ignore[no-any-return]

    def forward(self, module: nn.Module, h: Tensor) -> Tensor:
        """The values [rows, ins] in the dtype of ``h``."""
        return self._run(module, h) if self.activation is None else self.activation.forward((h,))

    def backward(self, module: nn.Module, grad: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        """The gradient of ``h`` for ``grad`` of the values, and the values."""
        if self.activation is not None:
            return self.activation.backward(grad, (h,))[0], self.activation.forward((h,))
        with torch.enable_grad():
            leaf = h.detach().requires_grad_()
            values = self._run(module, leaf)
        return torch.autograd.grad(values, leaf, grad.to(values.dtype))[0], values.detach()
