"""Lays the weights of RNNs side by side in memory, as cuDNN reads them."""

from __future__ import annotations

from torch import nn


def flatten_recurrent(model: nn.Module) -> None:
    """Call ``flatten_parameters`` of each RNN, whose weights were given other memory one by one; on a CPU nothing.

    cuDNN would copy weights that lie apart in every pass, and torch would warn of it.
    """
    for module in model.modules():
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()
