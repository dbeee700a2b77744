"""Steps FP32 masters of torch's own Adam and AdamW, and writes their half copies, in one pass.

torch's fused step reads and writes the masters; a second pass would read them again, round them and measure the amaxes
of the copies. Here the kernel of this package's own optimizers does all of it. The optimizer stays torch's, with its
state: the numbers differ from those of torch's fused step by roundings of FP32.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim import Optimizer

from nemo_lowprec.optim.fused import FusedStep
from nemo_lowprec.optim.reference import StepInputs, Update

_HALF = (torch.float16, torch.bfloat16)
_PLAIN = (Tensor, torch.nn.Parameter)
Pair = tuple[Any, Tensor]


class MasterStep:
    """The steps of the masters of one model.

    Args:
        measures: whether the step leaves the amax of each matrix in the matrix' attribute ``amax_of_step``.
    """

    def __init__(self, measures: bool) -> None:
        self._measures, self._fused = measures, FusedStep()
        # (copy, master, exp_avg, exp_avg_sq, step) that the kernel takes, by the master's id, of each optimizer.
        self._taken: WeakKeyDictionary[Optimizer, dict[int, tuple[Any, ...]]] = WeakKeyDictionary()

    @torch.no_grad()
    def step(self, optimizer: Optimizer, pairs: Sequence[Pair]) -> list[Pair]:
        """Step those of ``pairs`` that the kernel takes.

        A first step is left to torch, which makes the states. ``grad_scale`` and ``found_inf`` of the optimizer count,
        as for torch's fused step.

        Args:
            pairs: half copies and their masters. The masters have the gradients, and the copies' places in the
                optimizer's groups and state.

        Returns:
            The pairs that were stepped. Their masters have no gradient any more, so that torch's step leaves them.
        """
        if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW):
            return []
        copies = {id(master): param for param, master in pairs}
        known = self._taken.setdefault(optimizer, {})
        scale, found = (getattr(optimizer, name, None) for name in ("grad_scale", "found_inf"))
        stepped: list[Pair] = []
        for group in optimizer.param_groups:
            if not _is_plain(group):
                continue
            updates: list[Update] = []
            for master in group["params"]:
                param, state = copies.get(id(master)), optimizer.state.get(master)
                if param is not None and state and _fits(param, master, state, known):
                    measured = self._measures and param.ndim > 1
                    updates.append(
                        Update(
                            param.detach(), master.grad, state["step"], state["exp_avg"], state["exp_avg_sq"],
                            master.detach(), len(stepped) + len(updates), measured,
                        )
                    )  # fmt: skip
                    stepped.append((param, master))
            if updates:
                self._fused.step(updates, StepInputs(group, scale, found))
            for update, (param, _) in zip(updates, stepped[len(stepped) - len(updates) :], strict=True):
                if update.measures:
                    param.amax_of_step = update.param.amax_of_step  # type: ignore[attr-defined]
        for _, master in stepped:
            master.grad = None
        torch.autograd.graph.increment_version([tensor for pair in stepped for tensor in pair])
        return stepped


def _is_plain(group: dict[str, Any]) -> bool:
    """Whether the step of ``group`` is one that the kernel computes."""
    special = ("amsgrad", "differentiable", "foreach")
    return not any(group[name] for name in special) and not any(isinstance(b, Tensor) for b in group["betas"])


def _fits(param: Any, master: Tensor, state: dict[str, Any], known: dict[int, tuple[Any, ...]]) -> bool:
    """Whether the kernel takes a half copy, its master, the master's gradient and ``state``."""
    grad = master.grad
    if grad is None or type(grad) is not Tensor or grad.dtype != torch.float32 or grad.shape != master.shape:
        return False
    device = grad.get_device()
    if not grad.is_contiguous() or param.get_device() != device or master.get_device() != device:
        return False
    tensors = param, master, state.get("exp_avg"), state.get("exp_avg_sq"), state.get("step")
    there = known.get(id(master))
    if there is None or not all(map(is_, there, tensors)) or param.dtype not in _HALF:
        if not _are_taken(*tensors) or "max_exp_avg_sq" in state:
            return False
        known[id(master)] = tensors
    return True


def _are_taken(param: Any, master: Tensor, exp_avg: Any, exp_avg_sq: Any, step: Any) -> bool:
    if type(param) not in _PLAIN or param.dtype not in _HALF or not param.is_cuda or not param.numel():
        return False
    for t in (master, exp_avg, exp_avg_sq):
        if type(t) not in _PLAIN or t.dtype != torch.float32 or t.shape != param.shape or t.device != param.device:
            return False
    same = all(t.is_contiguous() for t in (param, master, exp_avg, exp_avg_sq))
    return same and isinstance(step, Tensor) and step.is_cuda and step.dtype == torch.float32
