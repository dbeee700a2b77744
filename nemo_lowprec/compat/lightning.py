"""Lightning's Trainer: its loops, connectors, callbacks and modules.

``*_METHOD`` and ``*_ATTRIBUTE`` are names that are replaced while a Trainer runs.
"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.fabric.strategies.model_parallel import _materialize_distributed_module as materialize
from lightning.fabric.strategies.strategy import _validate_keys_for_strict_loading as check_keys
from lightning.fabric.utilities.optimizer import _optimizers_to_device as optimizers_to_device
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.overrides.distributed import _sync_module_states as broadcast_states
from lightning.pytorch.trainer import call
from torch import nn
from torch.optim import Optimizer

__all__ = ["broadcast_states", "check_keys", "materialize", "optimizers_to_device"]

HPARAMS_ATTRIBUTE = "_hparams_initial"  # of a module: what the Trainer logs
LOGS_HPARAMS_ATTRIBUTE = "_log_hyperparams"  # of a module
SUMMARY_METHOD = "_summary"  # of ModelSummary
SWAP_METHOD, AVERAGE_METHOD = "_swap_models", "_copy_average_to_current"  # of WeightAveraging
SIGTERM_METHOD = "_sigterm_notifier_fn"  # of the signal connector: the handler of SIGTERM
REQUEUE_METHOD = "_slurm_sigusr_handler_fn"  # of the signal connector: the handler of SLURM's signal
EXCHANGE_METHOD = "_broadcast_sigterm_tensor"  # of the training loop


def trainer_of(module: Any) -> Any:
    """The Trainer of a LightningModule; None without one, where ``module.trainer`` raises."""
    return getattr(module, "_trainer", None)


def is_mid_step(trainer: pl.Trainer) -> bool:
    """Whether gradients of the batch that comes will be added to those of earlier batches."""
    return trainer.fit_loop.epoch_loop._should_accumulate()


def is_first_of_step(trainer: pl.Trainer) -> bool:
    """Whether the batch is the first one of an optimizer step: the Trainer zeroes gradients after its forward pass."""
    return trainer.fit_loop.epoch_loop.batch_idx % trainer.accumulate_grad_batches == 0


def steps_of_epoch(trainer: pl.Trainer) -> int:
    """How many steps of the loggers' count were taken."""
    return trainer.fit_loop.epoch_loop._batches_that_stepped


def train_data(trainer: pl.Trainer) -> Any:
    """What the Trainer takes its training loaders from: a datamodule, a module or loaders; None before a fit."""
    return trainer.fit_loop._data_source.instance


def train_loaders(trainer: pl.Trainer) -> list[Any]:
    """The training loaders, each once."""
    combined = trainer.fit_loop._combined_loader
    return [] if combined is None else combined.flattened


def active_loop(trainer: pl.Trainer) -> Any:
    """The loop that runs now."""
    return trainer._active_loop


def use_distributed_sampler(trainer: pl.Trainer) -> bool:
    """The Trainer's argument ``use_distributed_sampler``."""
    return trainer._accelerator_connector.use_distributed_sampler


def sync_batchnorm(trainer: pl.Trainer) -> bool:
    """The Trainer's argument ``sync_batchnorm``."""
    return trainer._accelerator_connector._layer_sync is not None


def seconds_between_validations(trainer: pl.Trainer) -> float | None:
    """``val_check_interval`` as a time; None where it counts batches."""
    return trainer._val_check_time_interval  # type: ignore[attr-defined]


def loaded_checkpoint(trainer: pl.Trainer) -> tuple[Any, dict[str, Any]]:
    """(path, content) of the checkpoint that the Trainer resumes from."""
    connector = trainer._checkpoint_connector
    return connector._ckpt_path, connector._loaded_checkpoint


def signal_connector(trainer: pl.Trainer) -> Any:
    """The owner of the signal handlers, and of ``received_sigterm``."""
    return trainer._signal_connector


def timeout_of(strategy: Any) -> Any:
    """The argument ``timeout`` or ``process_group_timeout`` of a strategy of several processes."""
    return strategy._timeout


def ddp_options(strategy: Any) -> dict[str, Any]:
    """The arguments of DDPStrategy for torch's DDP."""
    options: dict[str, Any] = strategy._ddp_kwargs
    return options


def ddp_hook(strategy: Any, name: str) -> Any:
    """The argument ``ddp_comm_hook``, ``ddp_comm_state`` or ``ddp_comm_wrapper`` of DDPStrategy."""
    return getattr(strategy, f"_{name}")


def is_in_hook(module: pl.LightningModule) -> bool:
    """Whether Lightning runs a hook of ``module``, in which the module can log."""
    return module._current_fx_name is not None


def call_before_optimizer_step(trainer: pl.Trainer, optimizer: Optimizer) -> None:
    """Call ``on_before_optimizer_step`` of the callbacks and of the module."""
    call._call_callback_hooks(trainer, "on_before_optimizer_step", optimizer)
    call._call_lightning_module_hook(trainer, "on_before_optimizer_step", optimizer)


def averaged_model(callback: Any) -> nn.Module:
    """The model that a WeightAveraging callback holds."""
    return callback._average_model.module


def max_depth(callback: Any) -> int:
    """The argument ``max_depth`` of ModelSummary."""
    depth: int = callback._max_depth
    return depth


def summarize(callback: Any, trainer: pl.Trainer, module: pl.LightningModule) -> Any:
    """The summary of ModelSummary's own method."""
    return getattr(type(callback), SUMMARY_METHOD)(callback, trainer, module)


def set_bytes_per_parameter(summary: Any, size: float) -> None:
    """Make ``summary`` count ``size`` bytes for a parameter."""
    summary._precision_megabytes = 1e-6 * size


def saves_by_time(callback: ModelCheckpoint) -> bool:
    """Whether ``train_time_interval`` was given."""
    return callback._train_time_interval is not None


def save_last(callback: ModelCheckpoint, trainer: pl.Trainer) -> bool:
    """Write ``last.ckpt`` now, a file and no link; the callback still saves its best checkpoint later.

    Returns:
        False where the callback saves nothing now, in a sanity check for example.
    """
    if callback._should_skip_saving_checkpoint(trainer):
        return False
    step, wanted = callback._last_global_step_saved, callback.save_last
    callback.save_last = True  # save_last="link" would link to one of the best checkpoints
    try:
        callback._save_last_checkpoint(trainer, callback._monitor_candidates(trainer))
    finally:
        callback.save_last, callback._last_global_step_saved = wanted, step
    return True


# Fabric


def saves_a_folder(strategy: Any) -> bool:
    """The argument ``save_distributed_checkpoint`` of ModelParallelStrategy."""
    return strategy._save_distributed_checkpoint


def states_of(strategy: Any, state: dict[str, Any], filter: dict[str, Any] | None = None) -> dict[str, Any]:
    """``state`` with the ``state_dict`` of each object in the object's place, entries chosen by ``filter``."""
    states: dict[str, Any] = strategy._convert_stateful_objects_in_state(state, filter=filter or {})
    return states
