"""Chooses the modules of a converted model that keep their inputs alone (``activations``), and gives them a forward.

Converted norms; activation modules, of torch and of transformers or timm, that autograd would keep the input of; and
gated MLPs
``down(act(gate(x)) * up(x))``, of which autograd would keep three tensors of the hidden size. A module that is computed
by a class of ours keeps by that class; all others get a forward of their own here. Code that autograd does not see in
that form, in compiled graphs, under ``torch.func`` and ``torch.jit.trace``, runs the module's own forward.
"""

from __future__ import annotations

import copy
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from nemo_lowprec.compute.backends.base import is_transformed
from nemo_lowprec.compute.class_swap import own_forward, swap
from nemo_lowprec.compute.kept import Formula, Keeps, keep_input
from nemo_lowprec.compute.patterns import Match, candidates, recognise
from nemo_lowprec.compute.patterns.activations import LowPrecisionActivation
from nemo_lowprec.compute.patterns.gated_mlp import GatedMLPs, LowPrecisionGatedMLP

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_ACTIVATIONS = (nn.GELU, nn.SiLU, nn.Mish, nn.Hardswish, nn.Softplus)
_OTHERS = ("transformers.activations", "timm.layers.activations")
# Modules of the same places whose outputs autograd keeps, which the layer behind them keeps, too.
_NAMED = ("GELU", "SiLU", "Swish", "Mish")
_GATED = GatedMLPs()


class _OwnForward:
    """A module's ``forward`` as an attribute of the module.

    Args:
        module: whose input is kept.
        keeps: how.
    """

    def __init__(self, module: nn.Module, keeps: Keeps) -> None:
        self._module, self._keeps = ref(module), keeps

    def __deepcopy__(self, memo: dict[int, Any]) -> _OwnForward:
        return _OwnForward(copy.deepcopy(self._module(), memo), self._keeps)  # type: ignore[arg-type]

    def __reduce__(self) -> Any:
        return _OwnForward, (self._module(), self._keeps)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self._module()
        assert module is not None
        if len(args) == 1 and not kwargs and _applies(args[0]):
            return keep_input(self._formula(module, args[0]), args[0])
        return type(module).forward(module, *args, **kwargs)

    def _formula(self, module: nn.Module, x: Tensor) -> Formula:
        device = x.device.type
        autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        return Formula(module, self._keeps, device, autocast)


def _applies(x: Any) -> bool:
    if torch.compiler.is_compiling() or not torch.is_grad_enabled() or not isinstance(x, Tensor) or is_transformed():
        return False
    return x.requires_grad and x.dtype in _DTYPES and x.dim() > 1 and x.numel() > 0


def may_keep_less(model: nn.Module) -> bool:
    """Whether ``model``, which is not converted, has a module whose inputs would be kept."""
    if any(map(_is_activation, model.modules())):
        return True
    return any(not patterns[0].is_parent for _, patterns in candidates(model, False).values())


def find_gated(model: nn.Module) -> dict[str, Match]:
    """The gated MLPs of ``model``, by name; called before a layer is converted. Reads no values of ``model``."""
    found = {name: recognise(m, [_GATED], None)[1] for name, m in model.named_modules() if _GATED.is_candidate(m)}
    return {name: match for name, match in found.items() if isinstance(match, Match)}


def keep_less(model: nn.Module, keeps: Keeps, norms: list[str], gated: dict[str, Match]) -> dict[str, str]:
    """Have the modules of ``model`` keep their inputs as ``keeps`` says; ``revert_layers`` undoes this.

    Args:
        norms: names of the converted norms.
        gated: from ``find_gated``.

    Returns:
        name to kind (``norm``, ``activation``, ``gated MLP``) of the modules that keep their inputs alone.
    """
    modules = dict(model.named_modules())
    kinds = dict.fromkeys(norms, "norm") | dict.fromkeys(gated, "gated MLP")
    within = [match.settings["gated"].act for match in gated.values()]
    inner = {id(act[1]) for act in within if act is not None}
    kinds |= {n: "activation" for n, module in modules.items() if id(module) not in inner and _is_activation(module)}
    result = {}
    for name, kind in kinds.items():
        module = modules[name]
        if name in gated and not isinstance(module, LowPrecisionGatedMLP):
            _GATED.apply(module, gated[name], keeps.backend)
        if hasattr(type(module), "keeps"):
            swap(module, type(module), keeps=keeps)
        elif own_forward(module) is None:
            swap(module, type(module), forward=_OwnForward(module, keeps))
        else:
            continue
        result[name] = kind
    return result


def _is_activation(module: nn.Module) -> bool:
    cls = type(module)
    if isinstance(module, LowPrecisionActivation):
        return True
    if next(module.parameters(), None) is not None or getattr(module, "inplace", False):
        return False
    return cls in _ACTIVATIONS or (cls.__module__ in _OTHERS and any(name in cls.__name__ for name in _NAMED))
