"""What the plugin does where a Trainer has several processes."""

from __future__ import annotations

import hashlib
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.strategies import DDPStrategy, ParallelStrategy, Strategy
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from nemo_lowprec.comm import check_same, leave_to_ddp, take_from_ddp
from nemo_lowprec.engine import Engine
from nemo_lowprec.plugins.agreement import (
    facts_of_batches,
    facts_of_data,
    facts_of_evaluation,
    facts_of_optimizers,
    facts_of_resume,
)

_HOOKS = ("ddp_comm_hook", "ddp_comm_state", "ddp_comm_wrapper", "model_averaging_period")


def prepare(module: pl.LightningModule, strategy: Strategy, engine: Engine) -> None:
    """Before the strategy wraps ``module`` for training.

    Raises:
        ValueError: a strategy that the level does not train with, an option that has no effect at it, or processes
            that are about to train something else.
    """
    if not isinstance(strategy, ParallelStrategy):
        return
    level, trainer = engine.level, module.trainer
    if not isinstance(strategy, DDPStrategy) and engine.sharding is None:
        raise ValueError(
            f"{level.name} does not train with {type(strategy).__name__}. "
            "Use strategy='ddp', 'lowprec_ddp' or 'lowprec_sharded'."
        )
    check_same(
        {
            **facts_of_data(trainer),
            **({} if strategy.restore_checkpoint_after_setup else facts_of_resume(trainer)),
            **versions(),
            "the model's parameters": _parameters(module),
        }
    )
    engine.columns.comm.check_averaging()
    if not isinstance(strategy, DDPStrategy) or not _replaces_ddp(strategy, engine):
        return
    for name in _HOOKS:
        if getattr(strategy, f"_{name}", None) is not None:
            raise ValueError(
                f"{name} would have no effect: {level.name} averages gradients in {level.comm.upper()} itself. "
                "Leave it out, or use fp16_amp or te_fp8, whose gradients torch's DDP averages."
            )
    if strategy._ddp_kwargs.get("mixed_precision") is not None:
        raise ValueError(f"mixed_precision of DDP cannot go with {level.name}, which is one. Leave it out.")
    for name, child in module.named_modules():
        if isinstance(child, nn.Embedding | nn.EmbeddingBag) and child.sparse and child.weight.requires_grad:
            raise ValueError(
                f"{name} has sparse gradients, which {level.name} does not average over processes. "
                "Build it with sparse=False."
            )
    if wraps(strategy):
        leave_to_ddp(module)


def versions() -> dict[str, str]:
    """Versions of what processes that train together must have the same of."""
    found = {}
    for name in ("nemo-lowprec", "torch", "lightning", "transformer-engine", "triton", "megatron-core"):
        try:
            found[f"the version of {name}"] = version(name)
        except PackageNotFoundError:
            found[f"the version of {name}"] = "none"
    return found


def _parameters(module: nn.Module) -> str:
    """A short name for what parameters there are."""
    shapes = [(n, str(p.dtype), p.requires_grad, *_shape(p)) for n, p in module.named_parameters()]
    return f"{len(shapes)} tensors ({hashlib.sha256(repr(shapes).encode()).hexdigest()[:12]})"


def _shape(param: nn.Parameter) -> tuple[int, ...]:
    return () if isinstance(param, nn.parameter.UninitializedParameter) else tuple(param.shape)


def check_optimizers(optimizers: list[Optimizer], schedulers: list[Any], strategy: Strategy) -> None:
    """Raise ValueError where processes are about to step with something else."""
    if isinstance(strategy, ParallelStrategy):
        check_same(facts_of_optimizers(optimizers, schedulers))


def check_batches(trainer: pl.Trainer) -> None:
    """Before the first step: raise ValueError where a process has fewer batches in an epoch than another one."""
    if trainer.world_size > 1:
        check_same(facts_of_batches(trainer))


def check_evaluation(trainer: pl.Trainer) -> None:
    """Before each step of an evaluation with collectives: raise ValueError where a process has fewer batches."""
    facts = facts_of_evaluation(trainer) if trainer.world_size > 1 else None
    if facts is not None:
        check_same(facts)


def average_gradients(model: nn.Module, strategy: Strategy, engine: Engine) -> None:
    """Once ``model`` is wrapped, and its weights are stored: average its gradients, and let all start from the same."""
    if not isinstance(strategy, DDPStrategy):
        return
    ddp = model if isinstance(model, DistributedDataParallel) else None
    group = None if ddp is None else ddp.process_group
    if not _replaces_ddp(strategy, engine):
        engine.columns.comm.share_amaxes(group)
        return
    megabytes = strategy._ddp_kwargs.get("bucket_cap_mb")
    engine.columns.comm.average_over(group, None if megabytes is None else int(megabytes * 2**20))
    engine.broadcast()


def release_ddp(model: nn.Module, strategy: Strategy, engine: Engine) -> None:
    """Once ``model`` is wrapped: DDP lets go of the parameters of a level that averages by itself."""
    if isinstance(model, DistributedDataParallel) and _replaces_ddp(strategy, engine):
        take_from_ddp(model)


def averages(strategy: Strategy, engine: Engine) -> bool:
    """Whether gradients are averaged in the backward passes that a plugin runs only; FSDP2 reduces them in all."""
    if not isinstance(strategy, ParallelStrategy) or strategy.world_size == 1:
        return False
    return engine.sharding is None or engine.level.is_low_bit


def synchronizes(strategy: Strategy) -> bool:
    """Whether the next backward pass is the one whose gradients are averaged, and not one that accumulates."""
    wrapper: Any = strategy.model if isinstance(strategy.model, DistributedDataParallel) else strategy
    return getattr(wrapper, "require_backward_grad_sync", True)


def wraps(strategy: DDPStrategy) -> bool:
    """Whether the strategy wraps the model in torch's DDP; ``lowprec_ddp`` does not."""
    return not hasattr(strategy, "require_backward_grad_sync")


def _replaces_ddp(strategy: Strategy, engine: Engine) -> bool:
    """Whether gradients are averaged by our reducer: DDP's own holds a parameter's dtype only."""
    return isinstance(strategy, DDPStrategy) and (
        engine.level.has_half_weights or engine.level.comm != "fp32" or not wraps(strategy)
    )
