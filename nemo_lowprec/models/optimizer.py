"""The optimizer: parameter groups of weight decay and of Muon, linear warm-up, then cosine decay."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from nemo_lowprec.compute.filters import find_heads
from nemo_lowprec.optim import Lion, Muon

_NOT_HIDDEN = (
    nn.Embedding, nn.EmbeddingBag, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d,
    nn.ConvTranspose3d,
)  # fmt: skip


def decay_groups(module: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Two parameter groups: weight decay applies to matrices, and not to parameters of one dimension (biases, norms).

    This is the rule of Megatron-LM, so weight decay applies to embeddings, too. A tied parameter is listed once. Frozen
    parameters and empty groups are left out.
    """
    params = [p for p in module.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in params if p.dim() >= 2], "weight_decay": weight_decay, "name": "decay"},
        {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0, "name": "no_decay"},
    ]
    return [group for group in groups if group["params"]]


def muon_groups(module: nn.Module) -> list[dict[str, Any]]:
    """The parameter groups of ``nemo_lowprec.optim.Muon`` for a model: hidden matrices, and what AdamW steps.

    Muon takes weights of two dimensions and stacks of them, as experts are stored. AdamW takes embeddings, the head
    (the layer that computes the model's output), convolutions, and parameters of one dimension (biases, norms), which
    do not decay. A tied parameter is listed once. Frozen parameters and empty groups are left out.

    Raises:
        ValueError: the model has no hidden matrix that is trained.
    """
    weighted = {name: m for name, m in module.named_modules() if isinstance(getattr(m, "weight", None), nn.Parameter)}
    apart = [m for m in module.modules() if isinstance(m, _NOT_HIDDEN)] + [
        weighted[name] for name in find_heads(module, weighted)
    ]
    ids = {id(param) for m in apart for param in m.parameters(recurse=False)}
    groups: dict[str, list[nn.Parameter]] = {"muon": [], "adamw": [], "adamw_no_decay": []}
    for name, param in module.named_parameters():
        if not param.requires_grad:
            continue
        stacked = param.dim() == 3 and param.shape[0] > 1  # positions and class tokens have one
        is_hidden = (param.dim() == 2 or stacked) and id(param) not in ids and "embed" not in name.rpartition(".")[2]
        groups["muon" if is_hidden else "adamw" if param.dim() >= 2 else "adamw_no_decay"].append(param)
    if not groups["muon"]:
        raise ValueError(f"{type(module).__name__} has no hidden matrix that is trained, and Muon nothing to do.")
    settings: dict[str, dict[str, Any]] = {
        "muon": {"use_muon": True}, "adamw": {"use_muon": False},
        "adamw_no_decay": {"use_muon": False, "weight_decay": 0.0},
    }  # fmt: skip
    return [{"params": params, "name": name, **settings[name]} for name, params in groups.items() if params]


def make_optimizer(
    name: str,
    module: nn.Module,
    lr: float,
    weight_decay: float,
    betas: tuple[float, float],
    eps: float,
    fused: bool | None = None,
) -> Optimizer:
    """An optimizer of the parameters of ``module``; ``weight_decay`` is that of matrices.

    Args:
        name: ``adamw``, ``muon``, ``lion`` or ``sgd``.
        betas: AdamW's and Lion's; of SGD the first is the momentum.
        fused: torch's fused AdamW; None: where the parameters are on a GPU.
    """
    if name == "muon":
        return Muon(
            muon_groups(module), lr, weight_decay, adjust_lr_fn="match_rms_adamw", adamw_betas=betas, adamw_eps=eps,
            adamw_weight_decay=weight_decay,
        )  # fmt: skip
    groups = decay_groups(module, weight_decay)
    if name == "lion":
        return Lion(groups, lr, betas)
    if name == "sgd":
        return torch.optim.SGD(groups, lr, momentum=betas[0])
    if fused is None:
        fused = all(p.device.type == "cuda" for p in module.parameters())
    return torch.optim.AdamW(groups, lr=lr, betas=betas, eps=eps, fused=fused or None)


def default_warmup(total_steps: int) -> int:
    """A tenth of the run, at most 2,000 optimizer steps."""
    return min(2000, total_steps // 10)


def warmup_cosine(warmup_steps: int, total_steps: int, floor: float) -> Callable[[int], float]:
    """Factor of the peak learning rate at an optimizer step, for ``LambdaLR``.

    The factor rises linearly to 1 over ``warmup_steps`` (the first step has 1/warmup_steps of the peak), falls along
    half a cosine to ``floor`` at ``total_steps``, and stays at ``floor``.

    Args:
        warmup_steps: optimizer steps of the warm-up, 0 for none.
        total_steps: optimizer steps of the run.
        floor: factor at the end, min_lr / lr.

    Raises:
        ValueError: the warm-up is negative or does not end before the run.
    """
    if warmup_steps < 0 or (warmup_steps and warmup_steps >= total_steps):
        raise ValueError(f"warmup_steps={warmup_steps} must be at least 0 and less than the run's {total_steps} steps.")

    # Not a callable object: LambdaLR would save its attributes, and a resumed run keep the old number of steps.
    def factor(step: int) -> float:
        if step < warmup_steps:
            return (step + 1) / warmup_steps
        progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
        return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress))

    return factor
