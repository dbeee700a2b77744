"""The branches of residual blocks that a run has learned (``residual.py``), as checkpoints hold them.

The first pass learns them. From the next pass on a sum and the norm behind it are computed together, and gradients are
added in another order. A resumed run that learned them anew would differ in the last bits of its first step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn

from nemo_lowprec.compute.convert import gemm_plans
from nemo_lowprec.compute.gemm_plan import GemmPlan
from nemo_lowprec.compute.patterns.norms import LowPrecisionNorm


def _plans(model: nn.Module) -> Iterator[tuple[str, GemmPlan]]:
    for name, module in model.named_modules():
        for weight, plan in gemm_plans(module).items():
            yield f"{name}.{weight}", plan


def learned_branches(model: nn.Module) -> dict[str, list[str]]:
    """The last layers of branches.

    Returns:
        By the name of the layer's weight: the name of the norm that reads the sum behind the branch, and the dtype
        that the norm writes; an empty list for an unknown norm.
    """
    norms = {id(m.weight): name for name, m in model.named_modules() if isinstance(m, LowPrecisionNorm)}
    found: dict[str, list[str]] = {}
    for name, plan in _plans(model):
        if plan.ends_branch:
            norm = None if plan.read_by is None else norms.get(id(plan.read_by.weight))
            found[name] = [] if norm is None else [norm, str(plan.read_by.out).removeprefix("torch.")]
    return found


def restore_branches(model: nn.Module, branches: Mapping[str, Sequence[str]]) -> None:
    """Let ``model`` compute as the model of which ``learned_branches`` has returned ``branches``.

    Names that ``model`` has not are left out: its passes learn by themselves.
    """
    modules = dict(model.named_modules())
    for name, plan in _plans(model):
        if name not in branches:
            continue
        plan.ends_branch = True
        norm = modules.get(branches[name][0]) if branches[name] else None
        if isinstance(norm, LowPrecisionNorm) and plan.inputs.parameters_stay:
            plan.read_by = norm.call(getattr(torch, branches[name][1]))
