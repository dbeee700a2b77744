"""What all processes of a Trainer must have the same of, by name and as text: those that differ train apart or hang.

Compared by value, and not compared where processes may rightly differ: paths, devices, workers, callbacks that only
report. A model, a data module or a loader may add to it: ``agreement() -> dict[str, Any]`` returns its settings by
name.
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
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import DDPStrategy, Strategy
from torch import Tensor
from torch.optim import Optimizer

from nemo_lowprec.comm import meet
from nemo_lowprec.plugins import nemo

START_TIMEOUT = timedelta(seconds=30)  # between processes that have made their process group just now
_LENGTH = 100  # characters of a value in a message

_TRAINER = (
    "max_steps", "min_steps", "max_epochs", "min_epochs", "num_nodes", "accumulate_grad_batches", "val_check_interval",
    "check_val_every_n_epoch", "limit_train_batches", "limit_val_batches", "limit_test_batches",
    "limit_predict_batches", "overfit_batches", "fast_dev_run", "num_sanity_val_steps", "gradient_clip_val",
    "gradient_clip_algorithm", "reload_dataloaders_every_n_epochs", "log_every_n_steps", "barebones",
)  # fmt: skip

# Those that save, end or change the training; by name, as not every version of Lightning has all.
_STEERING = tuple(
    vars(callbacks)[name]
    for name in (
        "Checkpoint", "EarlyStopping", "Timer", "GradientAccumulationScheduler", "StochasticWeightAveraging",
        "WeightAveraging", "BaseFinetuning", "BatchSizeFinder", "LearningRateFinder", "ModelPruning",
    )
    if name in vars(callbacks)
)  # fmt: skip
_OF_CALLBACKS = ("save_top_k", "save_last", "_save_on_train_epoch_end", "patience", "scheduling", "stopping_threshold")


def meet_at_start(strategy: Strategy, made_group: bool, timeout: timedelta | None) -> None:
    """Compare the settings, for a strategy that has its process group and has called no collective yet.

    Args:
        made_group: whether the process group was made just now, so that all processes are here within seconds.
        timeout: of the process group, for processes that had it before; None for torch's own.

    Raises:
        ValueError: processes that differ.
        RuntimeError: a process does not come.
    """
    module = strategy.lightning_module
    assert module is not None
    facts = facts_at_start(module.trainer, strategy.precision_plugin)
    meet(
        facts,
        f"the start of {type(strategy).__name__}",
        START_TIMEOUT if made_group else timeout or dist.default_pg_timeout,
    )


def facts_at_start(trainer: pl.Trainer, plugin: Precision) -> dict[str, str]:
    """What is known before anything is set up."""
    strategy, connector = trainer.strategy, trainer._accelerator_connector
    facts: dict[str, Any] = {
        "the Trainer's call": trainer.state.fn,
        "the level": re.sub(r" at 0x[0-9a-f]+", "", repr(plugin)),
        "the strategy": type(strategy).__name__,
        **{f"the strategy's {name}": value for name, value in _of_strategy(strategy).items()},
        **{f"the Trainer's {name}": getattr(trainer, name, None) for name in _TRAINER},
        "the Trainer's use_distributed_sampler": connector.use_distributed_sampler,
        "the Trainer's sync_batchnorm": connector._layer_sync is not None,
        "the seed (seed_everything)": os.environ.get("PL_GLOBAL_SEED"),
        "the callbacks that save, end or change the training": sorted(map(_of_callback, _steering(trainer))),
    }
    plain = {"the Trainer's call", "the level", "the strategy"}
    return {name: str(value) if name in plain else _short(value) for name, value in facts.items()} | facts_of_data(
        trainer
    )


def facts_of_data(trainer: pl.Trainer) -> dict[str, str]:
    """The settings that the model and its data state; once a data module is set up, the corpus is among them."""
    facts = {}
    data = trainer.fit_loop._data_source.instance if trainer.state.fn == "fit" else None
    for what, owner in (("model", trainer.lightning_module), ("data", getattr(trainer, "datamodule", None) or data)):
        agreement = getattr(owner, "agreement", None)
        for name, value in agreement().items() if callable(agreement) else ():
            facts[f"the {what}'s {name}"] = _short(value)
    return facts


def facts_of_resume(trainer: pl.Trainer) -> dict[str, str]:
    """The checkpoint that a strategy has loaded which restores before it sets up: by name, as folders may differ."""
    connector = trainer._checkpoint_connector
    step = connector._loaded_checkpoint.get("global_step")
    return {"ckpt_path": name_of(connector._ckpt_path), "the checkpoint's step": _short(step)}


def name_of(path: Any) -> str:
    """The name of a checkpoint, for comparison."""
    return "None" if path is None else os.path.basename(os.path.normpath(str(path)))


def facts_of_batches(trainer: pl.Trainer) -> dict[str, str]:
    """How many batches the epoch that begins has, as far as ``max_steps`` lets it run."""
    batches, progress = trainer.num_training_batches, trainer.fit_loop.epoch_loop.batch_progress
    if trainer.max_steps != -1:
        if not trainer.lightning_module.automatic_optimization:
            return {}  # a batch may make any number of steps
        left = (trainer.max_steps - trainer.global_step) * trainer.accumulate_grad_batches
        batches = min(batches, progress.current.completed + left)
    return {"the number of batches in an epoch (limit_train_batches cuts them alike)": str(batches)}


def facts_of_evaluation(trainer: pl.Trainer) -> dict[str, str] | None:
    """How many batches each loader of an evaluation has, when a loop begins with one of them; else None."""
    loop: Any = trainer._active_loop
    if loop.batch_progress.current.started != 1:
        return None
    limit = {"validate": "limit_val_batches", "test": "limit_test_batches", "predict": "limit_predict_batches"}
    how = limit.get(str(getattr(trainer.state.stage, "value", "")), "limit_val_batches")
    return {f"the number of batches in an evaluation ({how} cuts them alike)": _short(loop.max_batches)}


def facts_of_optimizers(
    optimizers: Sequence[Optimizer], schedulers: Sequence[Any], by_defaults: bool = False
) -> dict[str, str]:
    """Classes and settings of optimizers and of learning-rate schedulers.

    Args:
        optimizers: those of the Trainer.
        schedulers: its ``LRSchedulerConfig``s.
        by_defaults: whether processes have different parameters, and therefore perhaps other groups of them.
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
    return facts


def _short(value: Any) -> str:
    """A value as text, cut where it is long, with a digest of the whole then."""
    text = re.sub(r" at 0x[0-9a-f]+", "", repr(_plain(value)))
    if len(text) <= _LENGTH:
        return text
    return f"{text[:_LENGTH]}… ({hashlib.sha256(text.encode()).hexdigest()[:12]})"


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
    return dict(strategy._ddp_kwargs) if isinstance(strategy, DDPStrategy) else {}


def _steering(trainer: pl.Trainer) -> list[Any]:
    every: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    return [callback for callback in every if isinstance(callback, _STEERING)]


def _of_callback(callback: Any) -> str:
    more = {name: vars(callback)[name] for name in _OF_CALLBACKS if name in vars(callback)}
    return f"{callback.state_key} {more}"


def is_grouped() -> bool:
    """Whether there is a process group already."""
    return dist.is_available() and dist.is_initialized()


# No hook of a Precision plugin comes before the collectives of callbacks, data and loggers, in which processes that
# disagree would wait for each other (a ModelCheckpoint on one of them: at once): only the strategy's own method does.

_setup_environment = DDPStrategy.setup_environment


@wraps(_setup_environment)
def _setup_environment_and_meet(self: DDPStrategy) -> None:
    made_group = not is_grouped()
    _setup_environment(self)
    has_level = getattr(self.precision_plugin, "meets_at_start", False) and not nemo.runs(self)
    if has_level or hasattr(self, "agreement"):
        meet_at_start(self, made_group, self._timeout)


DDPStrategy.setup_environment = _setup_environment_and_meet  # type: ignore[method-assign]
