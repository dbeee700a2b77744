"""Recognises modules that keep the weights of all experts in parameters of three dimensions.

transformers decorates such modules (``use_experts_implementation``): the attributes that the decorator sets say how the
weights lie, and ``_apply_gate`` or ``act_fn`` computes between the two projections.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor, nn

from nemo_lowprec.compat.transformers import is_expert_parallel

_SAYS = ("has_gate", "has_bias", "is_transposed", "num_experts")  # attributes of the interface


class ExpertsLayout(NamedTuple):
    """How a module keeps the weights of its experts.

    Attributes:
        up: name of the parameter of the first projection: [experts, outs, ins], or with ``transposed``
            [experts, ins, outs]; ``outs`` holds the gate, too, where there is one.
        down: name of the parameter of the second projection, alike.
        transposed: whether an expert computes ``x @ weight``, and not ``x @ weight.T``.
        biases: names of the biases [experts, outs] of the two projections; None for none.
        gated: whether the module multiplies one half of the first projection with the activation of the other.
    """

    up: str
    down: str
    transposed: bool
    biases: tuple[str, str] | None
    gated: bool

    @property
    def weights(self) -> tuple[str, str]:
        """The names of the two weights."""
        return self.up, self.down


def layout_of(module: nn.Module) -> ExpertsLayout | None:
    """The layout of a module that transformers' interface for experts calls; None for any other module."""
    if not all(hasattr(module, name) for name in _SAYS):
        return None
    up = "gate_up_proj" if module.has_gate else "up_proj"
    layout = ExpertsLayout(
        up,
        "down_proj",
        bool(module.is_transposed),
        (f"{up}_bias", "down_proj_bias") if module.has_bias else None,
        bool(module.has_gate),
    )
    found = [module._parameters.get(name) for name in layout.weights]
    return layout if all(weight is not None and weight.dim() == 3 for weight in found) else None


def obstacle(module: nn.Module, layout: ExpertsLayout) -> str | None:
    """Why grouped GEMMs of this package cannot compute ``module``; None where they can."""
    if getattr(module, "has_post_expert_norm", False):
        return f"{type(module).__name__} normalizes what each expert returns"
    if is_expert_parallel(module):
        return f"{type(module).__name__} is spread over processes by transformers' expert parallelism"
    known = {*layout.weights, *(layout.biases or ())}
    others = [name for name, _ in module.named_parameters() if name not in known]
    if others:
        return f"{type(module).__name__} has {others[0]}, which its interface does not name"
    up, down = (_sizes(module._parameters[name], layout.transposed) for name in layout.weights)
    outs = up[1] // 2 if layout.gated else up[1]
    if up[0] != module.num_experts or down != (up[0], up[2], outs):
        return f"the shapes of {layout.up} and {layout.down} do not fit each other"
    return None


def _sizes(weight: Any, transposed: bool) -> tuple[int, int, int]:
    """(experts, outs, ins)."""
    assert isinstance(weight, Tensor)
    experts, outs, ins = weight.shape
    return (experts, ins, outs) if transposed else (experts, outs, ins)
