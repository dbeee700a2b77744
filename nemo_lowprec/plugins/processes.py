"""The plugin's part in a Trainer of several processes: checks, and who averages the gradients."""

from __future__ import annotations

import hashlib
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.strategies import DDPStrategy, ParallelStrategy, Strategy
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import UninitializedParameter

from nemo_lowprec.chart import PrecisionLevel
from nemo_lowprec.comm import check_same, leave_to_ddp, take_from_ddp
from nemo_lowprec.compat.lightning import ddp_hook, ddp_options
from nemo_lowprec.engine import Engine
from nemo_lowprec.plugins.agreement import facts_of_data, facts_of_resume

_HOOKS = ("ddp_comm_hook", "ddp_comm_state", "ddp_comm_wrapper", "model_averaging_period")


def prepare(module: pl.LightningModule, strategy: Strategy, engine: Engine) -> None:
    """Check the strategy and the processes before the strategy wraps ``module`` for training.

    Raises:
        ValueError: the level does not train with the strategy, an option has no effect at the level, or processes
            have different models, data, checkpoints or versions.
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
            "the model's parameters": parameters_digest(module),
        }
    )
    engine.columns.comm.check_averaging()
    if not isinstance(strategy, DDPStrategy) or not _replaces_ddp(strategy, engine):
        return
    for name in _HOOKS:
        if ddp_hook(strategy, name) is not None:
            raise ValueError(
                f"{name} would have no effect: {level.name} averages gradients in {level.comm.upper()} itself. "
                "Leave it out, or use fp16_amp or te_fp8, whose gradients torch's DDP averages."
            )
    if ddp_options(strategy).get("mixed_precision") is not None:
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
    """The versions of the packages that must be the same on all processes."""
    found = {}
    for name in ("nemo-lowprec", "torch", "lightning", "transformer-engine", "triton", "megatron-core"):
        try:
            found[f"the version of {name}"] = version(name)
        except PackageNotFoundError:
            found[f"the version of {name}"] = "none"
    return found


def parameters_digest(module: nn.Module) -> str:
    """The number of parameters, and a digest of their names, dtypes and shapes."""
    named = [(n, p, isinstance(p, UninitializedParameter)) for n, p in module.named_parameters()]
    shapes = [(n, str(p.dtype), p.requires_grad, *(() if shapeless else p.shape)) for n, p, shapeless in named]
    return f"{len(shapes)} tensors ({hashlib.sha256(repr(shapes).encode()).hexdigest()[:12]})"


def average_gradients(model: nn.Module, strategy: Strategy, engine: Engine) -> None:
    """Average the gradients of ``model`` over the processes, and broadcast the weights of the first process.

    Called when ``model`` is wrapped, and its weights are stored in the level's formats.
    """
    if not isinstance(strategy, DDPStrategy):
        return
    ddp = model if isinstance(model, DistributedDataParallel) else None
    group = None if ddp is None else ddp.process_group
    if not _replaces_ddp(strategy, engine):
        engine.columns.comm.share_amaxes(group)
        return
    megabytes = ddp_options(strategy).get("bucket_cap_mb")
    engine.columns.comm.average_over(group, None if megabytes is None else int(megabytes * 2**20))
    engine.broadcast()


def release_ddp(model: nn.Module, strategy: Strategy, engine: Engine) -> None:
    """Take the parameters out of torch's DDP around ``model``, at a level that averages gradients itself."""
    if isinstance(model, DistributedDataParallel) and _replaces_ddp(strategy, engine):
        take_from_ddp(model)


def averages(strategy: Strategy, engine: Engine) -> bool:
    """Whether only backward passes of the plugin average gradients; FSDP2 reduces gradients in every backward pass."""
    if not isinstance(strategy, ParallelStrategy) or strategy.world_size == 1:
        return False
    return engine.sharding is None or engine.level.is_low_bit


def synchronizes(strategy: Strategy) -> bool:
    """Whether the next backward pass averages gradients; else it only accumulates them."""
    wrapper: Any = strategy.model if isinstance(strategy.model, DistributedDataParallel) else strategy
    return getattr(wrapper, "require_backward_grad_sync", True)


def wraps(strategy: DDPStrategy) -> bool:
    """Whether the strategy wraps the model in torch's DDP; ``lowprec_ddp`` does not."""
    return not hasattr(strategy, "require_backward_grad_sync")


def leaves_ddp(level: PrecisionLevel) -> bool:
    """Whether our reducer averages the level's gradients: DDP's sends gradients in the parameter's dtype only."""
    return level.has_half_weights or level.comm != "fp32"


def _replaces_ddp(strategy: Strategy, engine: Engine) -> bool:
    """Whether our reducer averages the gradients."""
    return isinstance(strategy, DDPStrategy) and (leaves_ddp(engine.level) or not wraps(strategy))
