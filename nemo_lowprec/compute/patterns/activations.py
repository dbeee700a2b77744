"""Activation modules that hand their result, and their input's gradient, to the layers around them in FP8.

Nothing of this is listed in ``Conversion``: an activation without converted layers around it computes as before.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from nemo_lowprec.compute.activation_function import between_layers, takes
from nemo_lowprec.compute.activations import KINDS, Activation
from nemo_lowprec.compute.backends.base import Backend
from nemo_lowprec.compute.class_swap import derive, swap
from nemo_lowprec.compute.kept import Keeps
from nemo_lowprec.compute.patterns.pattern import Match, Pattern, probing
from nemo_lowprec.compute.producers import GradReader, Reader, name_reader

_NAMES = ("gelu", "silu", "swish", "relu")  # in the names of classes that are looked at


class LowPrecisionActivation(nn.Module):
    """An activation module between converted layers; conversion derives its class from the module's own.

    Half tensors are computed in FP32 and rounded to half once. All else the module's own forward computes.

    Attributes:
        activation: what the module computes.
        is_exact: whether the module's own forward rounds half tensors so, too. One that is written as several
            operations of torch rounds after each of them.
        reader: the layer behind.
        activation_backend: quantizes.
        keeps: how the input is kept for backward; None as it is.
    """

    activation: Activation
    is_exact: bool
    reader: Reader
    activation_backend: Backend
    keeps: Keeps | None = None

    def forward(self, input: Tensor) -> Tensor:
        keeps = self.keeps
        if not takes(input, keeps=keeps):
            return super().forward(input)  # type: ignore[no-any-return,misc]
        # Two passes of activation checkpointing must save alike: only an exact module saves as its own forward does.
        alone = self.reader.backend is None and GradReader.of(input) is None
        if alone and self.is_exact and keeps is None:
            out: Tensor = super().forward(input)  # type: ignore[misc]
            name_reader(out, self.reader)
            return out
        return between_layers(self.activation, (input,), self.activation_backend, self.reader, self.training, keeps)


class Activations(Pattern):
    """GELU (with erf, with tanh, with a sigmoid), SiLU and ReLU of torch, transformers, timm and others."""

    name = "activation"
    is_parent = False
    is_listed = False
    needs_histories = True

    def is_candidate(self, module: nn.Module) -> bool:
        cls = type(module)
        if module._parameters or module._buffers or module._modules or type(cls) is not type:
            return False
        return any(name in cls.__name__.lower() for name in _NAMES)

    def recognise(self, module: nn.Module) -> Match | str:
        found = recognise_activation(module)
        if found is None:
            return f"{type(module).__name__} computes no known activation"
        return Match(settings={"activation": Activation(found[0]), "is_exact": found[1]})

    def pays(self, match: Match, backend: Backend) -> bool:
        return backend.fuses(match.settings["activation"])

    def apply(self, module: nn.Module, match: Match, backend: Backend) -> None:
        cls = derive(LowPrecisionActivation, type(module))
        swap(module, cls, reader=Reader(), activation_backend=backend, **match.settings)


@probing()
def recognise_activation(module: nn.Module) -> tuple[str, bool] | None:
    """(kind, whether half results are the same bits) of a module without parameters; None for another function.

    The module's forward runs on a grid of values, in evaluation and in training. Results and gradients are compared.
    """
    inner = torch.linspace(-6, 6, 193, device="cpu", dtype=torch.float32)
    outer = torch.tensor([-1e4, -50, -20.5, -8, -1e-3, 1e-3, 8, 12, 20.5, 50, 1e4], device="cpu", dtype=torch.float32)
    grid = torch.cat([inner, outer]).view(12, 17)
    try:
        runs = [_run(module, grid, training) for training in (False, True)]
        if None in runs:
            return None
        for kind, (act, act_backward) in KINDS.items():
            want, slope = act(grid), act_backward(torch.ones_like(grid), grid)
            if all(_close(out, want) and _close(grad, slope) for out, grad in runs):  # type: ignore[misc]
                return kind, _is_exact(module, grid, act)
    except Exception:  # any failure means: another function
        return None
    return None


def _close(got: Tensor, want: Tensor) -> bool:
    return torch.allclose(got, want, rtol=1e-5, atol=1e-5)


def _call(module: nn.Module, x: Tensor, training: bool) -> Any:
    twin = copy.copy(module)
    twin.__dict__["training"] = training
    return type(module).forward(twin, x)


def _run(module: nn.Module, grid: Tensor, training: bool) -> tuple[Tensor, Tensor] | None:
    """The result for ``grid`` and its gradient; None for no new tensor of the same shape and dtype."""
    leaf = grid.clone().requires_grad_()
    x = leaf * 1
    out = _call(module, x, training)
    if not isinstance(out, Tensor) or out is x or out.shape != x.shape or out.dtype != x.dtype:
        return None
    if out.data_ptr() == x.data_ptr() or not torch.equal(x.detach(), grid):  # in place
        return None
    return out.detach(), torch.autograd.grad(out.sum(), leaf)[0]


def _is_exact(module: nn.Module, grid: Tensor, act: Any) -> bool:
    for dtype in (torch.bfloat16, torch.float16):
        x = grid.to(dtype)
        out = _call(module, x, True)
        if out.dtype != dtype or not torch.equal(out, act(x)):
            return False
    return True
