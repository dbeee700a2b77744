"""Give a parameter another storage and class: its identity, attributes and hooks stay."""

from __future__ import annotations

import torch
from torch import nn

from nemo_lowprec.tensors import QuantizedTensor


def swap(param: nn.Parameter, other: nn.Parameter) -> None:
    """Give ``param`` the storage and class of ``other``."""
    if isinstance(other, QuantizedTensor):
        other.copied_in_fp32 = True
    inner = {*getattr(param, "PARTS", ()), *getattr(param, "SETTINGS", ()), "_is_param", "copied_in_fp32"}
    attributes = {n: v for n, v in param.__dict__.items() if n not in inner}
    hooks, post_hooks = param._backward_hooks, getattr(param, "_post_accumulate_grad_hooks", None)
    torch.utils.swap_tensors(param, other)
    param.__dict__.update(attributes)
    param._backward_hooks = hooks  # assigning makes autograd call them for the new storage
    param._post_accumulate_grad_hooks = post_hooks  # type: ignore[assignment]


def replace(model: nn.Module | None, old: nn.Parameter, new: nn.Parameter) -> None:
    """Put ``new`` in the place of ``old`` throughout ``model``."""
    assert model is not None
    for module in model.modules():
        for name, param in module._parameters.items():
            if param is old:
                module._parameters[name] = new


def swap_or_replace(
    model: nn.Module | None, param: nn.Parameter, other: nn.Parameter, replaced: dict[nn.Parameter, nn.Parameter]
) -> None:
    """``swap``, or ``replace`` where a graph holds the parameter, which is then noted in ``replaced``."""
    try:
        swap(param, other)
    except RuntimeError:  # in the graph of a step that was broken off, and cannot be swapped
        replace(model, param, other)
        replaced[param] = other
