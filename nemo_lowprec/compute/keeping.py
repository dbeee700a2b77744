"""Chooses the modules of a converted model that keep their inputs alone (``activations``), and gives them a forward.

Norms, converted or of a class of their own (under autocast autograd keeps an FP32 copy of their input); activation
modules, of torch and of transformers or timm, that autograd would keep the input
of; and gated MLPs ``down(act(gate(x)) * up(x))``, of which autograd would keep three tensors of the hidden size. The
forward of a gated MLP calls its linear layers as before. Code that autograd does not see in that form, in compiled
graphs, under ``torch.func`` and ``torch.jit.trace``, runs the module's own forward.
"""

from __future__ import annotations

import copy
from collections.abc import Container
from itertools import permutations
from typing import Any, NamedTuple
from weakref import ref

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nemo_lowprec.compat.modules import all_hooks
from nemo_lowprec.compute.backends.base import is_transformed
from nemo_lowprec.compute.class_swap import own_forward, swap
from nemo_lowprec.compute.kept import Formula, Keeps, keep_inputs, own_values
from nemo_lowprec.compute.patterns import candidates, run_with

_NORMS = (nn.LayerNorm, nn.RMSNorm)
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_ACTIVATIONS = (nn.GELU, nn.SiLU, nn.Mish, nn.Hardswish, nn.Softplus)
_OTHERS = ("transformers.activations", "timm.layers.activations")
# Modules of the same places whose outputs autograd keeps, which the layer behind them keeps, too.
_NAMED = ("GELU", "SiLU", "Swish", "Mish")


class GatedMLP(NamedTuple):
    """Names of the children of a module that computes ``down(act(gate(x)) * up(x))``."""

    gate: str
    up: str
    down: str
    act: str


class _OwnForward:
    """A module's ``forward`` as an attribute of the module.

    Args:
        module: whose inputs are kept.
        keeps: how.
        parts: the children of a gated MLP; None for a norm or an activation.
    """

    def __init__(self, module: nn.Module, keeps: Keeps, parts: GatedMLP | None = None) -> None:
        self._module, self._keeps, self._parts = ref(module), keeps, parts

    def __deepcopy__(self, memo: dict[int, Any]) -> _OwnForward:
        return _OwnForward(copy.deepcopy(self._module(), memo), self._keeps, self._parts)  # type: ignore[arg-type]

    def __reduce__(self) -> Any:
        return _OwnForward, (self._module(), self._keeps, self._parts)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self._module()
        assert module is not None
        if len(args) == 1 and not kwargs and _applies(args[0]):
            out = self._kept(module, args[0])
            if out is not None:
                return out
        return type(module).forward(module, *args, **kwargs)

    def _kept(self, module: nn.Module, x: Tensor) -> Tensor | None:
        if self._parts is None:
            return keep_inputs(self._formula(module, False, x), x) if x.requires_grad else None
        gate, up, down, act = (module._modules[name] for name in self._parts)
        assert gate is not None and up is not None and down is not None and act is not None
        if any(all_hooks(act)):
            return None
        first, second = gate(x), up(x)
        if first.dtype == second.dtype and first.requires_grad and second.requires_grad:
            hidden = keep_inputs(self._formula(act, True, first), first, second)
        else:  # frozen, as with adapters elsewhere
            hidden = own_values(act, first) * second
        return down(hidden)  # type: ignore[no-any-return]

    def _formula(self, module: nn.Module, gated: bool, x: Tensor) -> Formula:
        device = x.device.type
        autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        return Formula(module, gated, self._keeps, device, autocast)


def _applies(x: Any) -> bool:
    if torch.compiler.is_compiling() or not torch.is_grad_enabled() or not isinstance(x, Tensor) or is_transformed():
        return False
    return x.dtype in _DTYPES and x.dim() > 1 and x.numel() > 0


def may_keep_less(model: nn.Module) -> bool:
    """Whether ``model``, which is not converted, has a module whose inputs would be kept."""
    if any(isinstance(module, _NORMS) or _is_activation(module) for module in model.modules()):
        return True
    return any(not patterns[0].is_parent for _, patterns in candidates(model).values())  # other RMSNorms


def find_gated(model: nn.Module) -> dict[str, GatedMLP]:
    """The gated MLPs of ``model``, by name; called before a layer is converted. Reads no values of ``model``."""
    found = {name: _parts_of(module) for name, module in model.named_modules()}
    return {name: parts for name, parts in found.items() if parts is not None}


def keep_less(
    model: nn.Module, keeps: Keeps, norms: list[str], left: Container[str], gated: dict[str, GatedMLP]
) -> dict[str, str]:
    """Have the modules of ``model`` keep their inputs as ``keeps`` says; ``revert_layers`` undoes this.

    Args:
        norms: names of the converted norms.
        left: names of norms that are left alone.
        gated: from ``find_gated``.

    Returns:
        name to kind (``norm``, ``activation``, ``gated MLP``) of the modules that keep their inputs alone.
    """
    modules = dict(model.named_modules())
    others = [name for name, module in modules.items() if isinstance(module, _NORMS) and name not in left]
    kinds = dict.fromkeys([*norms, *others], "norm") | dict.fromkeys(gated, "gated MLP")
    within = {f"{name}.{parts.act}" if name else parts.act for name, parts in gated.items()}
    kinds |= {n: "activation" for n, module in modules.items() if n not in within and _is_activation(module)}
    result = {}
    for name, kind in kinds.items():
        module = modules[name]
        if hasattr(type(module), "keeps"):  # which has kernels of its own
            swap(module, type(module), keeps=keeps)
        elif own_forward(module) is None:
            swap(module, type(module), forward=_OwnForward(module, keeps, gated.get(name)))
        else:
            continue
        result[name] = kind
    return result


def _is_activation(module: nn.Module) -> bool:
    cls = type(module)
    if next(module.parameters(), None) is not None or getattr(module, "inplace", False):
        return False
    return cls in _ACTIVATIONS or (cls.__module__ in _OTHERS and any(name in cls.__name__ for name in _NAMED))


def _parts_of(module: nn.Module) -> GatedMLP | None:
    children = dict(module.named_children())
    linears = [name for name, child in children.items() if isinstance(child, nn.Linear)]
    acts = [name for name, child in children.items() if _is_activation(child)]
    if len(children) != 4 or len(linears) != 3 or len(acts) != 1 or own_forward(module):
        return None
    act = children[acts[0]]
    if len(list(module.parameters(recurse=False))) or any(own_forward(child) for child in children.values()):
        return None
    for gate, up, down in permutations(linears):
        shapes = [tuple(children[name].weight.shape) for name in (gate, up, down)]  # type: ignore[union-attr,arg-type]
        if shapes[0] == shapes[1] == shapes[2][::-1] and _computes(module, children, gate, up, down, act):
            return GatedMLP(gate, up, down, acts[0])
    return None


def _computes(module: nn.Module, children: dict[str, nn.Module], gate: str, up: str, down: str, act: nn.Module) -> bool:
    """Whether the forward of ``module`` is a gated MLP's; it runs with small random parameters."""
    generator = torch.Generator().manual_seed(0)
    values = {}
    for name, shape in ((gate, (6, 4)), (up, (6, 4)), (down, (4, 6))):
        values[f"{name}.weight"] = torch.randn(shape, generator=generator, device="cpu")
        if children[name].bias is not None:
            values[f"{name}.bias"] = torch.randn(shape[0], generator=generator, device="cpu")
    x = torch.randn(2, 3, 4, generator=generator, device="cpu")
    got = run_with(module, values, x)
    if got is None or got.shape != x.shape:
        return False

    def linear(name: str, x: Tensor) -> Tensor:
        return F.linear(x, values[f"{name}.weight"], values.get(f"{name}.bias"))

    with torch.no_grad():
        want = linear(down, own_values(act, linear(gate, x)) * linear(up, x))
    return torch.allclose(got, want, rtol=1e-3, atol=1e-4)
