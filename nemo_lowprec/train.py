"""One pretraining run; Hydra's jobs, nemo_run's recipes and scripts all call ``pretrain``."""

import math
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.precision import Precision

import nemo_lowprec.strategies  # noqa: F401  (a recipe's Trainer finds them by name)
from nemo_lowprec.checkpoint.torch_zip import check_regular
from nemo_lowprec.checkpoint.writing import recover
from nemo_lowprec.checks import check_trainer
from nemo_lowprec.compat.lightning import save_last
from nemo_lowprec.display import own_display
from nemo_lowprec.lines import one_line, pair_lines, path_text
from nemo_lowprec.models.throughput import data_parallel_size
from nemo_lowprec.quiet import quiet
from nemo_lowprec.report.monitor.callback import PrecisionMonitor, check_level

_LIGHTNING_PATHS = ("last", "hpc")  # words that Lightning takes in place of a path without an earlier fit
_IN_FOLDERS = (".metadata", "metadata.json", "meta.pt", "common.pt")  # files of a checkpoint folder


@dataclass(frozen=True)
class PretrainResult:
    """The figures of a finished run.

    Attributes:
        level: precision level (or Lightning's name of another precision).
        steps: optimizer steps at the end, including the steps before a resume.
        val_loss_before: nats a token before the first step; None after a resume, or where the Trainer's
            ``num_sanity_val_steps`` is not -1.
        val_loss: nats a token at the end; None without validation.
        tokens_per_sec: training tokens a second over all ranks; None for a run shorter than two log intervals.
        checkpoint: the best checkpoint, else the last checkpoint; None where no checkpoint was written.
        skipped_steps: optimizer steps that were skipped because a gradient was not finite.
        monitor: the file of the run's monitor; None without a monitor, and on processes that do not write.
    """

    level: str
    steps: int
    val_loss_before: float | None
    val_loss: float | None
    tokens_per_sec: float | None
    checkpoint: str | None
    skipped_steps: int = 0
    monitor: str | None = None

    @property
    def perplexity(self) -> float | None:
        """exp of ``val_loss``."""
        return None if self.val_loss is None else math.exp(self.val_loss)

    def print_table(self) -> None:
        """Prints the result for people."""
        pairs = [
            (name, "-" if value is None else form.format(value))
            for name, value, form in (
                ("Level", self.level, "{}"),
                ("Steps", self.steps, "{:,}"),
                ("Validation loss before", self.val_loss_before, "{:.4f}"),
                ("Validation loss after", self.val_loss, "{:.4f}"),
                ("Perplexity", self.perplexity, "{:.2f}"),
                ("Tokens per second", self.tokens_per_sec, "{:,.0f}"),
                ("Skipped steps", self.skipped_steps, "{:,}: a gradient was not finite"),
                ("Checkpoint", self.checkpoint, "{}"),
                ("Monitor", self.monitor, "{}"),
            )
            if value or name not in ("Skipped steps", "Monitor")
        ]
        print("\n".join(["", "Pretraining", *pair_lines(pairs)]), flush=True)


def pretrain(
    model: LightningModule,
    data: LightningDataModule,
    trainer: Trainer,
    ckpt_path: str | None = None,
    monitor: int | bool | PrecisionMonitor = False,
) -> PretrainResult:
    """Trains ``model`` on ``data``, validates at the last step, and prints the result.

    Args:
        model: logs ``val/loss``, such as ``CausalLM``.
        data: the batches of ``model``.
        trainer: a Trainer of ``lightning.pytorch`` with the precision level among its plugins.
        ckpt_path: a checkpoint to resume from. ``last`` is the last checkpoint in the Trainer's checkpoint folder,
            where there is one; ``hpc`` is the checkpoint of a requeued SLURM job.
        monitor: watches what low precision does to each layer. True, the distance of the samples in steps, or a
            ``PrecisionMonitor``.

    Raises:
        TypeError: an argument is a nemo_run Config that was not built, or a class of ``pytorch_lightning``.
        ValueError: ``ckpt_path`` does not exist or is not complete, the Trainer has a value without a meaning, or
            ``monitor`` has no level to watch.
    """
    _check("model", model, LightningModule)
    _check("data", data, LightningDataModule)
    _check("trainer", trainer, Trainer)
    check_trainer(trainer)
    check_ckpt_path(ckpt_path)
    monitors = _monitors(monitor, trainer)
    record = _Validations()
    ours = [*monitors, record, _KeepsLast()]
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    callbacks += ours
    try:
        with quiet(), own_display(trainer):
            trainer.fit(model, datamodule=data, ckpt_path=ckpt_path)
    finally:
        callbacks[:] = [callback for callback in callbacks if callback not in ours]
    if trainer.interrupted:
        raise KeyboardInterrupt  # Lightning has shut down in order; a half-trained result is no result
    rate = getattr(getattr(model, "token_rate", None), "mean", None)
    result = PretrainResult(
        level=level_name(trainer.precision_plugin),
        steps=trainer.global_step,
        val_loss_before=record.before,
        val_loss=record.last,
        tokens_per_sec=None if rate is None else rate * data_parallel_size(trainer),
        checkpoint=_checkpoint(trainer),
        skipped_steps=getattr(getattr(trainer.precision_plugin, "log", None), "skipped_steps", 0),
        monitor=_monitor_file([*monitors, *callbacks]),
    )
    if trainer.is_global_zero:
        result.print_table()
    return result


def check_ckpt_path(ckpt_path: Any) -> None:
    """Check that ``ckpt_path`` is a checkpoint to resume from, or None.

    Raises:
        ValueError: the checkpoint does not exist, is not complete, or cannot be read from this machine.
    """
    if ckpt_path is None or ckpt_path in _LIGHTNING_PATHS:
        return
    if not isinstance(ckpt_path, str | Path) or not str(ckpt_path) or "\0" in str(ckpt_path):
        raise ValueError(
            f"ckpt_path={ckpt_path!r} must be the path of a checkpoint, or {' or '.join(_LIGHTNING_PATHS)}."
        )
    if ckpt_path in ("best", "registry"):
        raise ValueError(
            f"ckpt_path={ckpt_path!r} is known only after a run: pass the path of a checkpoint, or 'last' for the last "
            "one of the Trainer's checkpoint folder."
        )
    if "://" in str(ckpt_path):
        _check_remote(str(ckpt_path))
        return
    path = Path(ckpt_path)
    try:
        recover(path)
        path.stat()
    except FileNotFoundError:
        raise ValueError(f"ckpt_path={str(path)!r} does not exist.") from None
    except OSError as error:
        raise ValueError(f"ckpt_path={str(path)!r} cannot be read: {error.strerror}.") from error
    if path.is_dir():
        if not any((path / name).is_file() for name in _IN_FOLDERS):
            raise ValueError(
                f"ckpt_path={str(path)!r} is a folder, and no checkpoint of lowprec_sharded or lowprec_megatron: pass "
                "the checkpoint that is in it."
            )
        return
    check_regular(path)
    # The directory of a zip file is written last. The checkpoint's reader compares the checksums.
    if not zipfile.is_zipfile(path):
        raise ValueError(
            f"ckpt_path={str(path)!r} is no complete checkpoint: its writing was cut short, or it is another kind of "
            "file. Resume from an earlier one."
        )


def _check_remote(url: str) -> None:
    import fsspec

    try:
        system, path = fsspec.core.url_to_fs(url)
        found = system.exists(path)
    except Exception as error:  # of the protocol's own library
        raise ValueError(f"ckpt_path={url!r} cannot be read: {one_line(error)}") from error
    if not found:
        raise ValueError(f"ckpt_path={url!r} does not exist.")


class _Validations(Callback):
    """Records the validation losses, and makes Lightning validate the last step whatever ``val_check_interval`` is."""

    def __init__(self) -> None:
        self.before: float | None = None
        self.last: float | None = None

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        # Lightning validates a run that is asked to stop, and not a run that max_steps ends. Checkpoints that monitor
        # val/loss need the validation.
        if 0 < trainer.max_steps <= trainer.global_step:
            trainer.should_stop = True

    def on_validation_end(self, trainer: Trainer, pl_module: Any) -> None:
        loss = trainer.callback_metrics.get("val/loss")
        if loss is None:
            return
        if not trainer.sanity_checking:
            self.last = float(loss)
        elif trainer.num_sanity_val_steps == float("inf"):  # Lightning's form of -1
            self.before = float(loss)


class _KeepsLast(Callback):
    """Writes ``last.ckpt`` after every validation and at the end of the training.

    Lightning's ``ModelCheckpoint(save_last=True)`` writes ``last.ckpt`` only after saving one of the best checkpoints
    (seen in 2.6), so that the weights of a run whose monitored loss rises are in no checkpoint.
    """

    def __init__(self) -> None:
        self._saved: dict[int, int] = {}

    def on_validation_end(self, trainer: Trainer, pl_module: Any) -> None:
        for callback in trainer.checkpoint_callbacks:
            if not isinstance(callback, ModelCheckpoint) or not callback.save_last:
                continue
            if self._saved.get(id(callback)) != trainer.global_step and save_last(callback, trainer):
                self._saved[id(callback)] = trainer.global_step

    on_train_end = on_validation_end


def _monitors(asked: Any, trainer: Trainer) -> list[Callback]:
    """The monitor to add to the Trainer's callbacks; none where nobody asks for one, or the Trainer has it already."""
    if asked is False:
        return []
    if not isinstance(asked, int):
        _check("monitor", asked, PrecisionMonitor)
    check_level(trainer)
    there = [callback for callback in trainer.callbacks if isinstance(callback, PrecisionMonitor)]  # type: ignore[attr-defined]
    if not there:
        return [PrecisionMonitor() if asked is True else PrecisionMonitor(asked) if isinstance(asked, int) else asked]
    if asked is not True and asked not in there:
        raise ValueError("The Trainer has a PrecisionMonitor among its callbacks: leave monitor out.")
    return []


def _monitor_file(callbacks: list[Callback]) -> str | None:
    paths = [callback.path for callback in callbacks if isinstance(callback, PrecisionMonitor)]
    return next((path_text(path) for path in paths if path is not None), None)


def _check(name: str, value: Any, wanted: type) -> None:
    if isinstance(value, wanted):
        return
    origins = {base.__module__.partition(".")[0] for base in type(value).__mro__}
    if origins & {"fiddle", "nemo_run"}:
        raise TypeError(
            f"{name} is a nemo_run Config, not a {wanted.__name__}: hand the whole recipe to nemo_run.run(), "
            f"or build it with fiddle.build()."
        )
    if "pytorch_lightning" in origins:
        raise TypeError(
            f"{name} is a class of pytorch_lightning, whose objects do not work with those of lightning: "
            f"import it from lightning.pytorch."
        )
    raise TypeError(f"{name} must be a {wanted.__name__} of lightning.pytorch, not {type(value).__name__}.")


def level_name(plugin: Precision) -> str:
    """The name of a plugin's level, or Lightning's name of another precision."""
    return str(getattr(getattr(plugin, "level", None), "name", plugin.precision))


def _checkpoint(trainer: Trainer) -> str | None:
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, ModelCheckpoint):
            path = callback.best_model_path or callback.last_model_path
            if path:
                return path_text(path)
    return None
