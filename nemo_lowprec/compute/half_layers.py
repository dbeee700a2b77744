"""Lets layers with half weights take FP32 input, inside of autocast and outside.

On a GPU autocast casts the input of most layers. A CPU has no autocast rule for norms and for ``Bilinear``, and no
device has a rule for the ``per_sample_weights`` of an ``EmbeddingBag``: these layers get a class that casts.

A CPU's LSTM fails under autocast with FP32 input, whatever its weights are: to FP16 on every CPU, to BF16 on those
without AVX-512. It gets its input in half precision.

Outside of a step autocast is off: a callback that calls the model, or a part of it, would pass FP32 input to half
weights. Modules with parameters of their own open autocast then, by hooks.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from threading import local
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from nemo_lowprec.compat.compiler import outside_graphs
from nemo_lowprec.compat.modules import share_hook_id
from nemo_lowprec.compat.tensors import tree_leaves, tree_map
from nemo_lowprec.compute.class_swap import derive, swap


def _fit(weight: Tensor | None, bias: Tensor | None, x: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Weight and bias in FP32, unless both have the dtype of ``x``: torch's norms take no other mixture."""
    if all(p is None or p.dtype == x.dtype for p in (weight, bias)):
        return weight, bias
    return None if weight is None else weight.float(), None if bias is None else bias.float()


class HalfLayerNorm(nn.LayerNorm):
    def forward(self, input: Tensor) -> Tensor:
        weight, bias = _fit(self.weight, self.bias, input)
        return F.layer_norm(input, self.normalized_shape, weight, bias, self.eps)


class HalfGroupNorm(nn.GroupNorm):
    def forward(self, input: Tensor) -> Tensor:
        weight, bias = _fit(self.weight, self.bias, input)
        return F.group_norm(input, self.num_groups, weight, bias, self.eps)


class HalfBilinear(nn.Bilinear):
    def forward(self, input1: Tensor, input2: Tensor) -> Tensor:
        dtype = torch.promote_types(torch.promote_types(input1.dtype, input2.dtype), self.weight.dtype)
        bias = None if self.bias is None else self.bias.to(dtype)
        return F.bilinear(input1.to(dtype), input2.to(dtype), self.weight.to(dtype), bias)


class HalfEmbeddingBag(nn.EmbeddingBag):
    def forward(self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> Tensor:
        if per_sample_weights is not None:
            per_sample_weights = per_sample_weights.to(self.weight.dtype)
        return super().forward(input, offsets, per_sample_weights)


class HalfLSTM(nn.LSTM):
    def forward(self, input: Any, hx: Any = None) -> Any:
        if torch.is_autocast_enabled("cpu"):
            input, hx = tree_map(partial(_narrow, torch.get_autocast_dtype("cpu")), (input, hx))
        return super().forward(input, hx)


def _narrow(half: torch.dtype, leaf: Any) -> Any:
    narrow = isinstance(leaf, PackedSequence) or (isinstance(leaf, Tensor) and leaf.is_floating_point())
    return leaf.to(half) if narrow else leaf


_CASTING: dict[type[nn.Module], type[nn.Module]] = {
    nn.LayerNorm: HalfLayerNorm,
    nn.GroupNorm: HalfGroupNorm,
    nn.Bilinear: HalfBilinear,
    nn.EmbeddingBag: HalfEmbeddingBag,
}


def take_fp32_input(model: nn.Module, on_cpu: bool) -> None:
    """Let unconverted layers of ``model`` with half weights take FP32 input."""
    for own, cls in _CASTING.items() if on_cpu else ((nn.EmbeddingBag, HalfEmbeddingBag),):
        _swap_all(model, own, cls)


def _swap_all(model: nn.Module, own: type[nn.Module], cls: type[nn.Module]) -> None:
    """Give the modules of the class ``own``, and of subclasses with its forward, the class ``cls`` derived from it."""
    for module in model.modules():
        kind: Any = type(module)
        if isinstance(module, own) and kind.forward is own.forward and "forward" not in module.__dict__:
            swap(module, cls if kind is own else derive(cls, kind))


def take_fp32_input_in_lstm(model: nn.Module) -> None:
    """Let the LSTMs of ``model``, which runs on a CPU, take FP32 input under autocast."""
    _swap_all(model, nn.LSTM, HalfLSTM)


class _Opened(local):
    """A stack of (module that has opened autocast, its context); one stack for each thread."""

    def __init__(self) -> None:
        self.stack: list[tuple[nn.Module, Any]] = []


_HALVES = (torch.float16, torch.bfloat16)
_ENTER_ID, _LEAVE_ID = -1, -2  # ids of the two hooks in every module
_opened = _Opened()


def open_autocast(modules: Iterable[nn.Module]) -> list[Any]:
    """Run ``modules`` with half weights under autocast where their input is FP32 and autocast is off.

    The outputs are then cast to FP32, as FP32 weights would give them.

    Returns:
        The handles of the hooks.
    """
    handles = []
    for module in modules:
        before = module.register_forward_pre_hook(_enter, prepend=True, with_kwargs=True)
        after = module.register_forward_hook(_leave, with_kwargs=True, always_call=True)
        handles += [share_hook_id(before, _ENTER_ID), share_hook_id(after, _LEAVE_ID)]
    return handles


def autocast_forward(model: nn.Module, half: torch.dtype) -> None:
    """Have every forward pass of ``model`` run under autocast to ``half``, unless autocast is on; outputs are FP32."""
    model.register_forward_pre_hook(partial(_enter_half, half), prepend=True, with_kwargs=True)
    model.register_forward_hook(_leave_half, with_kwargs=True, always_call=True)


@outside_graphs
def _enter_half(half: torch.dtype, module: nn.Module, args: Any, kwargs: Any) -> None:
    device = next((leaf.device.type for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)), None)
    if device is not None and not torch.is_autocast_enabled(device):
        context = torch.autocast(device, half)
        context.__enter__()
        _opened.stack.append((module, context))


def _half_of(module: nn.Module) -> torch.dtype | None:
    return next((p.dtype for p in module.parameters() if p.dtype in _HALVES), None)


def _enter(module: nn.Module, args: Any, kwargs: Any) -> None:
    if torch.compiler.is_compiling():
        return
    if args and isinstance(args[0], Tensor) and torch.is_autocast_enabled(args[0].device.type):
        return  # a step; the common case comes first
    for leaf in tree_leaves((args, kwargs)):
        values = leaf.data if isinstance(leaf, PackedSequence) else leaf
        if isinstance(values, Tensor) and values.is_floating_point():
            if torch.is_autocast_enabled(values.device.type):
                return
            if values.dtype == torch.float32 and (half := _half_of(module)) is not None:
                context = torch.autocast(values.device.type, half)
                context.__enter__()
                _opened.stack.append((module, context))
                return


def _leave(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
    if torch.compiler.is_compiling() or not _opened.stack or _opened.stack[-1][0] is not module:
        return None
    _opened.stack.pop()[1].__exit__(None, None, None)
    return widened(output)


@outside_graphs
def _leave_half(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
    return _leave(module, args, kwargs, output)


def widened(output: Any) -> Any:
    """``output``, a tree of tensors, with FP32 for half precision."""
    return tree_map(_widen, output)


def _widen(leaf: Any) -> Any:
    is_half = isinstance(leaf, Tensor) and leaf.dtype in _HALVES
    return leaf.float() if is_half or isinstance(leaf, PackedSequence) else leaf
