"""Gated MLPs, down(act(gate(x)) * up(x)), whose product and its gradients go from layer to layer in FP8.

The layers are called as ever, with their hooks; between them one operation takes the place of the activation, the
product and their backward. Gate and up may be one linear layer with both outputs side by side.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nemo_lowprec.compat.modules import all_hooks, global_hooks
from nemo_lowprec.compat.tensors import is_plain
from nemo_lowprec.compute.activation_function import between_layers, takes
from nemo_lowprec.compute.activations import KINDS, Activation
from nemo_lowprec.compute.backends.base import Backend, is_transformed
from nemo_lowprec.compute.class_swap import derive, kind_of, swap
from nemo_lowprec.compute.kept import Keeps
from nemo_lowprec.compute.linear import LowPrecisionLinear
from nemo_lowprec.compute.patterns.pattern import Match, Pattern, probing, twin_of
from nemo_lowprec.compute.patterns.plain_linear import is_linear
from nemo_lowprec.compute.producers import Reader

_PLAIN = (bool, int, float, str, type(None))
_ALL = (True, True, True)  # GEMMs in FP8
_SIZES = 6, 8, 5  # of the probe's input, product and output


def are_low(layers: Iterable[Any]) -> bool:
    """Whether these children are converted layers whose GEMMs all run in FP8."""
    return all(
        kind_of(layer) is LowPrecisionLinear and layer.gemm_plan.fp8 == _ALL and "forward" not in layer.__dict__
        for layer in layers
    )


def are_alone(layers: Iterable[Any]) -> bool:
    """Whether no hook can read what goes between these converted layers."""
    if any(global_hooks()) or torch.is_anomaly_enabled():
        return False
    return not any(any(all_hooks(layer)) for layer in layers)


@dataclass
class GatedPlan:
    """How a module computes a gated MLP.

    Attributes:
        activation: its tensors are the outputs of ``linears``, of two in the order gate, up.
        linears: names of the layers that read the input, in the order of the calls.
        gate_first: whether the first of two is the gate.
        down: name of the layer behind.
        act: (name, module) of the activation; None for a function.
        state: plain attributes and functions of the module that the probe has seen.
    """

    activation: Activation
    linears: tuple[str, ...]
    gate_first: bool
    down: str
    act: tuple[str, nn.Module] | None
    state: dict[str, Any]

    def holds(self, module: nn.Module, only_fp8: bool) -> bool:
        """Whether ``module`` still computes so; with ``only_fp8`` by GEMMs in FP8."""
        children = module._modules
        layers = [children.get(name) for name in (*self.linears, self.down)]
        if not all(isinstance(layer, nn.Linear) and "forward" not in layer.__dict__ for layer in layers):
            return False
        if only_fp8 and not are_low(layers):
            return False
        if self.act is not None:
            name, act = self.act
            hooked = any(all_hooks(act)) or any(global_hooks())
            if children.get(name) is not act or hooked or "forward" in act.__dict__:
                return False
        return all(module.__dict__.get(name) == value for name, value in self.state.items())

    @property
    def joint_activation(self) -> Activation:
        """``activation`` of one tensor that holds the outputs of two layers, in the order of their calls."""
        return replace(self.activation, form="gate_up" if self.gate_first else "up_gate")

    def joint_output(self, module: nn.Module, x: Tensor) -> Tensor | None:
        """The outputs of two layers side by side; None where the layers do not compute as one."""
        children: Any = module._modules
        plans = [children[name].gemm_plan for name in self.linears]
        group = plans[0].group
        return None if group is None else group.joint_output(plans, x)  # type: ignore[no-any-return]

    def is_alone(self, module: nn.Module) -> bool:
        """Whether nobody but the layers can read what goes between them."""
        return are_alone([module._modules[name] for name in (*self.linears, self.down)])


class LowPrecisionGatedMLP(nn.Module):
    """A gated MLP over converted layers; conversion derives its class from the module's own.

    Attributes:
        gated: what it computes.
        reader: the layer behind the product.
        activation_backend: quantizes.
        keeps: how the product's two factors are kept for backward; None as they are. The layers need not be in FP8
            then.
    """

    gated: GatedPlan
    reader: Reader
    activation_backend: Backend
    keeps: Keeps | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        own, plan, keeps = super().forward, self.gated, self.keeps
        if torch.compiler.is_compiling() or kwargs or len(args) != 1:
            return own(*args, **kwargs)
        (x,) = args
        if not is_plain(x) or not x.numel() or is_transformed() or not plan.holds(self, keeps is None):
            return own(x)
        children: Any = self._modules
        alone = (keeps is None or plan.holds(self, True)) and plan.is_alone(self)
        joint = plan.joint_output(self, x) if alone else None
        if joint is None:
            activation, tensors = plan.activation, tuple(children[name](x) for name in plan.linears)
            tensors = tensors if plan.gate_first else tensors[::-1]
        else:
            activation, tensors = plan.joint_activation, (joint,)
        if takes(*tensors, keeps=keeps):
            backend, reader = self.activation_backend, self.reader
            # Observers read the values in half precision.
            alone = alone and not children[plan.down].gemm_plan.observers.quantized
            product = between_layers(activation, tensors, backend, reader, self.training, keeps, alone)
        else:
            product = activation.forward(tensors)
        return children[plan.down](product)


class GatedMLPs(Pattern):
    """Modules of two or three linear layers and an activation that compute a gated MLP."""

    name = "gated MLP"
    needs_histories = True

    def is_candidate(self, module: nn.Module) -> bool:
        return type(type(module)) is type and bool(_roles(module))

    def recognise(self, module: nn.Module) -> Match | str:
        for down in _roles(module):
            found = _recognise(module, down)
            if found is not None:
                return Match(linears=(*found.linears, found.down), settings={"gated": found})
        return "it computes no gated MLP of a known activation"

    def pays(self, match: Match, backend: Backend) -> bool:
        return backend.fuses(match.settings["gated"].activation)

    def apply(self, module: nn.Module, match: Match, backend: Backend) -> None:
        cls = derive(LowPrecisionGatedMLP, type(module))
        swap(module, cls, reader=Reader(), activation_backend=backend, **match.settings)


def linear_children(module: nn.Module) -> dict[str, nn.Linear]:
    """The children that are linear layers and nothing else, by name."""
    children = module._modules.items()
    return {name: child for name, child in children if is_linear(child) and "forward" not in child.__dict__}


def _roles(module: nn.Module) -> list[str]:
    """The names of children that may be the layer behind the product, by all children's kinds and shapes."""
    linears = linear_children(module)
    others = [child for name, child in module._modules.items() if name not in linears and child is not None]
    if len(linears) not in (2, 3) or len(others) > 1 or module._parameters or module._buffers:
        return []
    if any(child._parameters or child._buffers or child._modules for child in others):
        return []
    if {name[0] for name in linears} == set("qkv"):  # of an attention, which the table should not call an MLP
        return []
    found = []
    for down, layer in linears.items():
        front = [child for name, child in linears.items() if name != down]
        shapes = {(child.in_features, child.out_features) for child in front}
        width = layer.in_features * (2 if len(front) == 1 else 1)
        if len(shapes) == 1 and next(iter(shapes))[1] == width:
            found.append(down)
    return found


@probing()
def _recognise(module: nn.Module, down: str) -> GatedPlan | None:
    """Compare a run of ``module`` with all gated MLPs whose layer behind the product is ``down``."""
    linears = linear_children(module)
    front = [name for name in linears if name != down]
    parameters, x = _random(linears, down, _SIZES[1] * (3 - len(front)))
    try:
        runs = [_run(module, parameters, x, training) for training in (False, True)]
        calls = runs[0][2]
        if any(sorted(run[2]) != sorted(linears) or run[2] != calls or calls[-1] != down for run in runs):
            return None
        for activation, gate_first in _formulas(len(front)):
            want = _formula(activation, calls if gate_first else [*calls[-2::-1], down], parameters, x)
            if all(_close(got, wanted) for run in runs for got, wanted in zip(run[:2], want, strict=True)):
                return _plan(module, activation, tuple(calls[:-1]), gate_first, down)
    except Exception:  # any failure means: another function
        return None
    return None


def _random(linears: dict[str, nn.Linear], down: str, inner: int) -> tuple[dict[str, Tensor], Tensor]:
    """Small random parameters of the layers, of which those but ``down`` have ``inner`` outputs, and an input."""
    size, width, out_size = _SIZES
    generator, parameters = torch.Generator().manual_seed(0), dict[str, Tensor]()

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")

    for name, layer in linears.items():
        shape = (out_size, width) if name == down else (inner, size)
        parameters[f"{name}.weight"] = random(*shape)
        if layer.bias is not None:
            parameters[f"{name}.bias"] = random(shape[0])
    return parameters, random(32, size)


@probing()
def computes(module: nn.Module, layers: tuple[str, str], activation: Activation) -> bool:
    """Whether ``module`` computes down(``activation``(up(x))) by its ``layers``, but for dropout."""
    parameters, x = _random(linear_children(module), layers[1], _SIZES[1])
    try:
        runs = [_run(module, parameters, x, training, dropout_off=True) for training in (False, True)]
        want = _formula(activation, list(layers), parameters, x)
    except Exception:  # any failure means: another function
        return False
    same = all(_close(got, wanted) for run in runs for got, wanted in zip(run[:2], want, strict=True))
    return same and all(run[2] == list(layers) for run in runs)


def _plan(
    module: nn.Module, activation: Activation, linears: tuple[str, ...], gate_first: bool, down: str
) -> GatedPlan:
    act = next(((n, m) for n, m in module._modules.items() if n not in (*linears, down) and m is not None), None)
    return GatedPlan(activation, linears, gate_first, down, act, plain_state(module))


def plain_state(module: nn.Module) -> dict[str, Any]:
    """The plain attributes and functions of ``module``, with which a probe has seen it."""
    return {
        name: value
        for name, value in module.__dict__.items()
        if not name.startswith("_") and name != "training" and (type(value) in _PLAIN or callable(value))
    }


def _formulas(front: int) -> Iterator[tuple[Activation, bool]]:
    for kind in KINDS:
        if front == 2:
            yield Activation(kind, "gated"), True
            yield Activation(kind, "gated"), False
        else:
            yield Activation(kind, "gate_up"), True
            yield Activation(kind, "up_gate"), True


def _close(got: Tensor, want: Tensor) -> bool:
    # A module may round its constants to FP32; the two forms of GELU differ by a hundred times as much.
    return got.shape == want.shape and torch.allclose(got, want, rtol=0, atol=1e-6 * float(want.abs().max()))


def _run(
    module: nn.Module, parameters: dict[str, Tensor], x: Tensor, training: bool, dropout_off: bool = False
) -> tuple[Tensor, Tensor, list[str]]:
    """The output, the gradient of the input, and the names of the linear layers as they were called."""
    twin, calls = twin_of(module, parameters), list[str]()
    leaf = x.clone().requires_grad_()

    def call(name: str, child: nn.Linear, inner: Tensor) -> Tensor:
        if (inner is leaf) == (len(calls) == len(linear_children(module)) - 1):
            raise ValueError("a layer reads another tensor")
        calls.append(name)
        return F.linear(inner, child.weight, child.bias)

    for child in twin.modules():
        child.training = training
        if dropout_off and type(child) is nn.Dropout:
            child.p = 0.0
    for name, layer in linear_children(twin).items():
        layer.__dict__["forward"] = partial(call, name, layer)
    out = type(module).forward(twin, leaf)
    return out.detach(), torch.autograd.grad(out.square().sum(), leaf)[0], calls


def _formula(
    activation: Activation, names: list[str], parameters: dict[str, Tensor], x: Tensor
) -> tuple[Tensor, Tensor]:
    leaf = x.clone().requires_grad_()
    *hidden, down = ((parameters[f"{name}.weight"], parameters.get(f"{name}.bias")) for name in names)
    out = F.linear(activation.forward(tuple(F.linear(leaf, *layer) for layer in hidden)), *down)
    return out.detach(), torch.autograd.grad(out.square().sum(), leaf)[0]
