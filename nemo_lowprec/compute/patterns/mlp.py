"""MLPs, down(act(up(x))), as timm has them: between the two layers values travel in FP8 alone.

The layers are called as ever. The activation computes by ``LowPrecisionActivation``, which hands over FP8 in any
module; here nobody else can read its result or its input's gradient, so that nothing is written in half precision.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from nemo_lowprec.compat.modules import all_hooks
from nemo_lowprec.compat.tensors import is_plain
from nemo_lowprec.compute.activation_function import between_layers, takes
from nemo_lowprec.compute.activations import Activation
from nemo_lowprec.compute.backends.base import Backend, is_transformed
from nemo_lowprec.compute.class_swap import derive, swap
from nemo_lowprec.compute.patterns.activations import Activations, LowPrecisionActivation, recognise_activation
from nemo_lowprec.compute.patterns.gated_mlp import are_alone, are_low, computes, linear_children, plain_state
from nemo_lowprec.compute.patterns.pattern import Match, Pattern

_INERT = (nn.Identity, nn.Dropout)
_ACTIVATIONS = Activations()


@dataclass
class MLPPlan:
    """How a module computes an MLP.

    Attributes:
        activation: what ``act`` computes.
        up, act, down: names of the children, in the order of the calls.
        inert: names of children that change nothing: identities, and dropout that is off.
        state: plain attributes and functions of the module that the probe has seen.
    """

    activation: Activation
    up: str
    act: str
    down: str
    inert: tuple[str, ...]
    state: dict[str, Any]

    def holds(self, module: nn.Module) -> bool:
        """Whether ``module`` still computes so, by GEMMs in FP8, and nobody can read what goes between the layers."""
        children: Any = module._modules
        layers, act = (children.get(self.up), children.get(self.down)), children.get(self.act)
        if not isinstance(act, LowPrecisionActivation) or act.keeps is not None or any(all_hooks(act)):
            return False
        if not are_low(layers) or not are_alone(layers):
            return False
        for child in (children.get(name) for name in self.inert):
            off = type(child) is nn.Identity or (type(child) is nn.Dropout and not (child.p and child.training))
            if not off or any(all_hooks(child)) or "forward" in child.__dict__:
                return False
        return all(module.__dict__.get(name) == value for name, value in self.state.items())


class LowPrecisionMLP(nn.Module):
    """An MLP over converted layers; conversion derives its class from the module's own.

    Attributes:
        mlp: what it computes.
    """

    mlp: MLPPlan

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        own, plan = super().forward, self.mlp
        if torch.compiler.is_compiling() or kwargs or len(args) != 1:
            return own(*args, **kwargs)
        (x,) = args
        if not is_plain(x) or not x.numel() or is_transformed() or not plan.holds(self):
            return own(x)
        children: Any = self._modules
        hidden, act = children[plan.up](x), children[plan.act]
        if takes(hidden, keeps=None):
            alone = not children[plan.down].gemm_plan.observers.quantized  # observers read values in half precision
            how = act.activation_backend, act.reader, act.training, None, alone
            hidden = between_layers(act.activation, (hidden,), *how)
        else:
            hidden = act(hidden)
        return children[plan.down](hidden)


class MLPs(Pattern):
    """Modules of two linear layers, an activation, and dropout that compute an MLP."""

    name = "MLP"
    needs_histories = True

    def is_candidate(self, module: nn.Module) -> bool:
        # What has such children and is no MLP is computed by its layers, and not worth a line in a table.
        return type(type(module)) is type and _plan(module) is not None

    def recognise(self, module: nn.Module) -> Match | str:
        plan = _plan(module)
        assert plan is not None
        return Match(linears=(plan.up, plan.down), settings={"mlp": plan})

    def pays(self, match: Match, backend: Backend) -> bool:
        return backend.fuses(match.settings["mlp"].activation)

    def apply(self, module: nn.Module, match: Match, backend: Backend) -> None:
        swap(module, derive(LowPrecisionMLP, type(module)), **match.settings)


def _plan(module: nn.Module) -> MLPPlan | None:
    """The plan by the kinds and the order of the children, and by a run; None for a module that computes no MLP."""
    if module._parameters or module._buffers:
        return None
    layers = list(linear_children(module))
    others = {name: child for name, child in module._modules.items() if name not in layers and child is not None}
    inert = tuple(name for name, child in others.items() if type(child) in _INERT)
    acts = [name for name, child in others.items() if name not in inert]
    if len(layers) != 2 or len(acts) != 1 or not _ACTIVATIONS.is_candidate(others[acts[0]]):
        return None
    up, down = layers
    children: Any = module._modules
    if children[up].out_features != children[down].in_features:
        return None
    found = recognise_activation(others[acts[0]])
    if found is None or not computes(module, (up, down), Activation(found[0])):
        return None
    return MLPPlan(Activation(found[0]), up, acts[0], down, inert, plain_state(module))
