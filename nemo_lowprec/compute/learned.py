"""The facts about a model that its training passes have learned, as checkpoints hold them.

Branches of residual blocks: from the second pass on a sum is computed together with the norm behind it, and gradients
are added in another order (``residual.py``). Readers: from the second pass on an activation is computed by the kernel
that quantizes the result, whose last bits may differ from those of torch's operations (``producers.py``). A resumed run
that learned both anew would differ in the last bits of its first step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from nemo_lowprec.compute.convert import gemm_plans
from nemo_lowprec.compute.gemm_plan import GemmPlan
from nemo_lowprec.compute.patterns.norms import LowPrecisionNorm
from nemo_lowprec.compute.producers import Reader


def _plans(model: nn.Module) -> dict[str, GemmPlan]:
    """The plans of the layers, by the names of their weights."""
    named = ((name, gemm_plans(module)) for name, module in model.named_modules())
    return {f"{name}.{weight}": plan for name, plans in named for weight, plan in plans.items()}


def _readers(model: nn.Module) -> dict[str, Reader]:
    """The readers of the results of modules, by the names of the modules."""
    found = ((name, module.__dict__.get("reader")) for name, module in model.named_modules())
    return {name: reader for name, reader in found if isinstance(reader, Reader)}


def learned(model: nn.Module) -> dict[str, dict[str, Any]]:
    """The facts about ``model``, as plain values.

    Returns:
        ``branches``: by the name of the weight of a branch's last layer, the name of the norm that reads the sum behind
        the branch and the dtype that the norm writes, or an empty list for an unknown norm. ``readers``: by the name of
        a module, ``Reader.state_dict``. A key without facts is left out.
    """
    plans = _plans(model)
    norms = {id(m.weight): name for name, m in model.named_modules() if isinstance(m, LowPrecisionNorm)}
    branches: dict[str, Any] = {}
    for name, plan in plans.items():
        if plan.ends_branch:
            norm = None if plan.read_by is None else norms.get(id(plan.read_by.weight))
            branches[name] = [] if norm is None else [norm, str(plan.read_by.out).removeprefix("torch.")]
    inputs = {id(plan.operands["input"]): name for name, plan in plans.items() if "input" in plan.operands}
    states = {name: reader.state_dict(inputs) for name, reader in _readers(model).items()}
    readers = {name: state for name, state in states.items() if state is not None}
    return {kind: facts for kind, facts in (("branches", branches), ("readers", readers)) if facts}


def restore(model: nn.Module, facts: Mapping[str, Mapping[str, Any]]) -> None:
    """Let ``model`` compute as the model of which ``learned`` has returned ``facts``.

    Names that ``model`` has not are left out: its passes learn by themselves.
    """
    plans, modules = _plans(model), dict(model.named_modules())
    for name, of_norm in facts.get("branches", {}).items():
        if (plan := plans.get(name)) is None:
            continue
        plan.ends_branch = True
        norm = modules.get(of_norm[0]) if of_norm else None
        if isinstance(norm, LowPrecisionNorm) and plan.inputs.parameters_stay:
            plan.read_by = norm.call(getattr(torch, of_norm[1]))
    readers = _readers(model)
    for name, state in facts.get("readers", {}).items():
        if name in readers:
            readers[name].load_state_dict(state, plans)
