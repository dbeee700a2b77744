"""Puts the states of parameters aside that are frozen in mid-run: they wait on the CPU until the parameter is unfrozen.

A parameter is taken to be frozen when its own optimizer steps without a gradient for it. So the networks of a GAN, each
of which is frozen while the other one steps, keep their states where they are.
"""

from __future__ import annotations

from operator import is_
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim import Optimizer

from nemo_lowprec.tensors.dtensor import is_sharded

_ASIDE = "_lowprec_aside"  # attribute of a state that was put aside


class StatesAside:
    """The states of the frozen parameters of some optimizers."""

    def __init__(self) -> None:
        self._seen: WeakKeyDictionary[Optimizer, list[bool]] = WeakKeyDictionary()

    @torch.no_grad()
    def before_step(self, optimizer: Optimizer, *_: Any) -> None:
        """Move the states of frozen parameters to the CPU, and the states of unfrozen parameters back."""
        params = [param for group in optimizer.param_groups for param in group["params"]]
        trained = [param.requires_grad for param in params]
        seen = self._seen.get(optimizer)
        if seen is not None and len(seen) == len(trained) and all(map(is_, seen, trained)):
            return
        for param, is_trained in zip(params, trained, strict=True):
            state = optimizer.state.get(param)
            if not state or is_sharded(param) or (not is_trained and param.grad is not None):
                continue
            for name, value in state.items():
                if not isinstance(value, Tensor) or value.shape != param.shape:
                    continue
                if is_trained and _ASIDE in value.__dict__:
                    state[name] = value.to(param.device)
                elif not is_trained and not value.is_cpu:
                    state[name] = value.to("cpu")
                    state[name].__dict__[_ASIDE] = True
        self._seen[optimizer] = trained
