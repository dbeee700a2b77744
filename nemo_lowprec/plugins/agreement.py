"""Compares the settings of a Trainer over its processes: processes with different settings train apart or hang.

A setting is compared by name and value, as text. Paths, devices, workers and callbacks that only report are not
compared: processes may differ there. A model, a data module or a loader adds settings of its own with a method
``agreement() -> dict[str, Any]``, by name.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import wraps
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch import callbacks
from lightning.pytorch.strategies import DDPStrategy, ParallelStrategy, Strategy
from torch import Tensor
from torch.optim import Optimizer

from nemo_lowprec.comm import check_same, meet
from nemo_lowprec.compat import lightning as compat
from nemo_lowprec.plugins import nemo

START_TIMEOUT = timedelta(seconds=30)  # for processes that have just made their process group
_LENGTH = 100  # characters of a value in a message

_TRAINER = (
    "max_steps", "min_steps", "max_epochs", "min_epochs", "num_nodes", "accumulate_grad_batches", "val_check_interval",
    "check_val_every_n_epoch", "limit_train_batches", "limit_val_batches", "limit_test_batches",
    "limit_predict_batches", "overfit_batches", "fast_dev_run", "num_sanity_val_steps", "gradient_clip_val",
    "gradient_clip_algorithm", "reload_dataloaders_every_n_epochs", "log_every_n_steps", "barebones",
)  # fmt: skip

# Callbacks that save, end or change the training; by name, as an older Lightning lacks some of them.
_STEERING = tuple(
    vars(callbacks)[name]
    for name in (
        "Checkpoint", "EarlyStopping", "Timer", "GradientAccumulationScheduler", "StochasticWeightAveraging",
        "WeightAveraging", "BaseFinetuning", "BatchSizeFinder", "LearningRateFinder", "ModelPruning",
    )
    if name in vars(callbacks)
)  # fmt: skip
_OF_CALLBACKS = ("save_top_k", "save_last", "_save_on_train_epoch_end", "patience", "scheduling", "stopping_threshold")


def meet_at_start(strategy: ParallelStrategy, made_group: bool) -> None:
    """Compare the settings before the first collective on the process group of ``strategy``.

    Args:
        strategy: has its process group and its module.
        made_group: whether all processes have just made the group, and arrive within seconds; else they wait for the
            timeout of ``strategy``.

    Raises:
        ValueError: settings differ between processes.
        RuntimeError: a process does not arrive.
    """
    module = strategy.lightning_module
    assert module is not None
    trainer, kind = module.trainer, type(strategy).__name__
    timeout = compat.timeout_of(strategy) or dist.default_pg_timeout
    steering = [callback for callback in trainer.callbacks if isinstance(callback, _STEERING)]  # type: ignore[attr-defined]
    facts: dict[str, Any] = {
        **{f"the strategy's {name}": value for name, value in _of_strategy(strategy).items()},
        **{f"the Trainer's {name}": getattr(trainer, name, None) for name in _TRAINER},
        "the Trainer's use_distributed_sampler": compat.use_distributed_sampler(trainer),
        "the Trainer's sync_batchnorm": compat.sync_batchnorm(trainer),
        "the seed (seed_everything)": os.environ.get("PL_GLOBAL_SEED"),
        "the callbacks that save, end or change the training": sorted(map(_of_callback, steering)),
    }
    facts_at_start = {
        "the Trainer's call": str(trainer.state.fn),
        "the level": _without_addresses(repr(strategy.precision_plugin)),
        "the strategy": kind,
        **{name: _short(value) for name, value in facts.items()},
        **facts_of_data(trainer),
    }
    meet(facts_at_start, f"the start of {kind}", START_TIMEOUT if made_group else timeout)


def facts_of_data(trainer: pl.Trainer) -> dict[str, str]:
    """The settings that ``agreement()`` of the model and of the data returns; after its setup, also the corpus."""
    facts = {}
    data = compat.train_data(trainer) if trainer.state.fn == "fit" else None
    for what, owner in (("model", trainer.lightning_module), ("data", getattr(trainer, "datamodule", None) or data)):
        agreement = getattr(owner, "agreement", None)
        for name, value in agreement().items() if callable(agreement) else ():
            facts[f"the {what}'s {name}"] = _short(value)
    return facts


def facts_of_resume(trainer: pl.Trainer) -> dict[str, str]:
    """The loaded checkpoint's file name and step, for a strategy that loads before its setup; folders may differ."""
    path, content = compat.loaded_checkpoint(trainer)
    return {"ckpt_path": name_of(path), "the checkpoint's step": _short(content.get("global_step"))}


def name_of(path: Any) -> str:
    """The name of a checkpoint, for comparison."""
    return "None" if path is None else os.path.basename(os.path.normpath(str(path)))


def check_batches(trainer: pl.Trainer) -> None:
    """Raise ValueError where processes have different numbers of batches in the epoch that begins, up to ``max_steps``.

    Called before the first step.
    """
    if trainer.world_size == 1:
        return
    batches, progress = trainer.num_training_batches, trainer.fit_loop.epoch_loop.batch_progress
    if trainer.max_steps != -1:
        if not trainer.lightning_module.automatic_optimization:
            return  # manual optimization may take any number of steps with a batch
        left = (trainer.max_steps - trainer.global_step) * trainer.accumulate_grad_batches
        batches = min(batches, progress.current.completed + left)
    check_same({"the number of batches in an epoch (limit_train_batches cuts them alike)": str(batches)})


def check_evaluation(trainer: pl.Trainer) -> None:
    """Raise ValueError where processes have different numbers of batches in an evaluation loader.

    Called before each step of an evaluation that calls collectives; compares before a loader's first batch.
    """
    loop = compat.active_loop(trainer)
    if trainer.world_size == 1 or loop.batch_progress.current.started != 1:
        return
    how = "limit_test_batches" if trainer.testing else "limit_val_batches"
    how = "limit_predict_batches" if trainer.predicting else how
    check_same({f"the number of batches in an evaluation ({how} cuts them alike)": _short(loop.max_batches)})


def check_optimizers(optimizers: Sequence[Optimizer], schedulers: Sequence[Any], by_defaults: bool = False) -> None:
    """Raise ValueError where processes have different classes or settings of optimizers or schedulers.

    ``schedulers`` are Lightning's ``LRSchedulerConfig``s. With ``by_defaults`` the optimizers' defaults are compared,
    and not their groups, for processes with different parameters.
    """
    facts: dict[str, str] = {"the optimizers": _short([type(o).__name__ for o in optimizers])}
    for index, optimizer in enumerate(optimizers):
        groups = [optimizer.defaults] if by_defaults else optimizer.param_groups
        whose = "the optimizer's" if len(optimizers) == 1 else f"optimizer {index}'s"
        for name in sorted({name for group in groups for name in group} - {"params", "param_names"}):
            values = [_plain(group.get(name)) for group in groups]
            same = all(value == values[0] for value in values)
            facts[f"{whose} {name}"] = _short(values[0] if same else values)
    facts["the schedulers"] = _short(
        [
            (type(c.scheduler).__name__, c.interval, c.frequency, c.monitor, _numbers(c.scheduler.state_dict()))
            for c in schedulers
        ]
    )
    check_same(facts)


def _short(value: Any) -> str:
    """A value as text; a long text is cut, and ends with a digest of the whole text."""
    text = _without_addresses(repr(_plain(value)))
    if len(text) <= _LENGTH:
        return text
    return f"{text[:_LENGTH]}… ({hashlib.sha256(text.encode()).hexdigest()[:12]})"


def _without_addresses(text: str) -> str:
    return re.sub(r" at 0x[0-9a-f]+", "", text)


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.tolist() if value.numel() <= 8 else tuple(value.shape)
    return getattr(value, "__qualname__", value)


def _numbers(state: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in state.items() if isinstance(value, bool | int | float | str | list | tuple)}


def _of_strategy(strategy: Strategy) -> dict[str, Any]:
    agreement = getattr(strategy, "agreement", None)
    if callable(agreement):
        return agreement()  # type: ignore[no-any-return]
    return dict(compat.ddp_options(strategy)) if isinstance(strategy, DDPStrategy) else {}


def _of_callback(callback: Any) -> str:
    more = {name: vars(callback)[name] for name in _OF_CALLBACKS if name in vars(callback)}
    return f"{callback.state_key} {more}"


# The comparison comes before the first collective of callbacks, data and loggers, in which processes with different
# settings would wait for each other. No hook of a Precision plugin runs so early: DDPStrategy's own method is wrapped.

_setup_environment = DDPStrategy.setup_environment


@wraps(_setup_environment)
def _setup_environment_and_meet(self: DDPStrategy) -> None:
    made_group = not dist.is_initialized()
    _setup_environment(self)
    has_level = getattr(self.precision_plugin, "meets_at_start", False) and not nemo.runs(self)
    if has_level or hasattr(self, "agreement"):
        meet_at_start(self, made_group)


DDPStrategy.setup_environment = _setup_environment_and_meet  # type: ignore[method-assign]
