"""What a captured pass has read on the host: a graph holds only as long as all of it stays the same."""

from __future__ import annotations

import random
import sys
from itertools import chain
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn

from nemo_lowprec.compat.modules import all_hooks, global_hooks, makes_cuda_graphs
from nemo_lowprec.compat.tensors import backward_hooks
from nemo_lowprec.compat.transformers import is_checkpointed
from nemo_lowprec.compute.experts.module import LowPrecisionExperts

_PLAIN = (bool, int, float, str, type(None))


class Guard:
    """The state of a block's modules that its forward pass may read: children, parameters, plain attributes, hooks."""

    def __init__(self, block: nn.Module) -> None:
        modules = list(block.modules())
        self._hooks = [hooks for module in modules if module is not block for hooks in all_hooks(module)]
        self._hooks += global_hooks()
        self._tables = [table for m in modules for table in (m._modules, m._parameters, m._buffers)]
        self._states = [module.__dict__ for module in modules]
        names = [[name for name, value in state.items() if type(value) in _PLAIN] for state in self._states]
        self._plain = [(itemgetter(*found), state) for found, state in zip(names, self._states, strict=True) if found]
        self._tensors = [(s, name) for s in self._states for name, value in s.items() if isinstance(value, Tensor)]
        # Also keeps the objects alive, so that no other ones get their ids.
        self._alive = [v for t in self._tables for v in t.values()] + [s[name] for s, name in self._tensors]
        self._seen = self._look()

    def holds(self) -> bool:
        """Whether everything is as it was."""
        try:
            return bool(self._look() == self._seen)
        except KeyError:  # an attribute was deleted
            return False

    def _look(self) -> Any:
        # In each pass of the block: loops in C where there is one.
        return (
            list(map(len, self._hooks)),
            list(map(id, chain.from_iterable([table.values() for table in self._tables]))),
            list(map(len, self._states)),
            [read(state) for read, state in self._plain],
            [id(state[name]) for state, name in self._tensors],
        )


def obstacle(block: nn.Module) -> str | None:
    """The reason for which ``block`` cannot be captured at all; None where it may be."""
    for name, module in block.named_modules():
        if module is not block:
            for hooks in all_hooks(module):
                if any(not _is_ours(hook) for hook in hooks.values()):
                    return f"{name} has a hook"
        if isinstance(module, nn.SyncBatchNorm) or type(module).__module__.startswith("transformer_engine."):
            return f"{name or 'it'} is a {type(module).__name__}"
        if isinstance(module, LowPrecisionExperts) and module.waits:
            return f"{name or 'it'} computes expert by expert, for which the host waits"
        if module is not block and is_checkpointed(module):
            return f"{name} is recomputed in backward"
        if makes_cuda_graphs(module):  # which no capture may hold
            return f"torch.compile makes CUDA graphs of {name or 'it'}"
    for name, param in block.named_parameters():
        if backward_hooks(param)[0]:
            return f"{name} has a gradient hook"
    return None


def _is_ours(hook: Any) -> bool:
    return getattr(hook, "__module__", "").startswith("nemo_lowprec.")


class HostState:
    """State of the host that a pass of a block may change, and a replay of the block would not.

    Args:
        block: the block that is about to run.
    """

    def __init__(self, block: nn.Module) -> None:
        self._random = _random_states()
        self._modules = {name: self._of(module) for name, module in block.named_modules()}

    @staticmethod
    def _of(module: nn.Module) -> dict[str, Any]:
        state = module.__dict__.items()
        sizes = {n: len(v) for n, v in state if type(v) in (list, dict, set)}
        return {n: v if type(v) in _PLAIN else id(v) for n, v in state} | {f"len({n})": s for n, s in sizes.items()}

    def changed(self, block: nn.Module) -> str | None:
        """What the pass has changed, as a reason not to capture ``block``; None for nothing."""
        if self._random != _random_states():
            return "it draws random numbers on the host"
        for name, module in block.named_modules():
            before = self._modules.get(name)
            if before != self._of(module):
                now = self._of(module)
                names = [n for n in now if before is None or before.get(n, self) != now[n]]
                return f"it changes {'.'.join(filter(None, (name, names[0] if names else '')))} in its forward pass"
        return None


def _random_states() -> tuple[Any, ...]:
    """The states of the host's generators of random numbers: torch's, Python's and NumPy's."""
    numpy = sys.modules.get("numpy")
    there = () if numpy is None else numpy.random.get_state()
    of_numpy = [part.tobytes() if hasattr(part, "tobytes") else part for part in there]
    return torch.random.get_rng_state().tolist(), random.getstate(), of_numpy
