"""Changes the storage and the class of a parameter, whose identity, attributes and hooks stay."""

from __future__ import annotations

import torch
from torch import nn

from nemo_lowprec.compat.tensors import backward_hooks, set_backward_hooks
from nemo_lowprec.tensors import QuantizedTensor


def swap(param: nn.Parameter, other: nn.Parameter) -> None:
    """Give ``param`` the storage and class of ``other``."""
    if isinstance(other, QuantizedTensor):
        other.copied_in_fp32 = True
    inner = {*getattr(param, "PARTS", ()), *getattr(param, "SETTINGS", ()), "_is_param", "copied_in_fp32"}
    attributes = {n: v for n, v in param.__dict__.items() if n not in inner}
    hooks = backward_hooks(param)
    torch.utils.swap_tensors(param, other)
    param.__dict__.update(attributes)
    set_backward_hooks(param, hooks)


def swap_or_replace(
    model: nn.Module, param: nn.Parameter, other: nn.Parameter, replaced: dict[nn.Parameter, nn.Parameter]
) -> None:
    """``swap``; where a graph holds ``param``, put ``other`` into ``model`` and note the pair in ``replaced``."""
    try:
        swap(param, other)
    except RuntimeError:  # the graph of a step that was broken off holds the parameter
        for module in model.modules():
            for name, own in module._parameters.items():
                if own is param:
                    module._parameters[name] = other
        replaced[param] = other
