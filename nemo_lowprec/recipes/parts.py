"""What the pretrain recipes have in common: data, and a Trainer that checkpoints and logs to a folder of its level."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nemo_run as run
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.strategies import Strategy

from nemo_lowprec.data import TextDataModule
from nemo_lowprec.plugins import LowPrecision
from nemo_lowprec.recipes.level_folder import CheckedTrainer
from nemo_lowprec.recipes.strategies import lowprec_sharded
from nemo_lowprec.train import pretrain

__all__ = ["assemble", "few_texts", "texts", "trainer"]


def texts(seq_length: int, micro_batch_size: int, validation_samples: int = 256) -> run.Config[TextDataModule]:
    """The Python standard library's sources, until ``data.source`` names others and ``data.data_dir`` their folder."""
    return run.Config(
        TextDataModule,
        data_dir="data/stdlib",
        seq_length=seq_length,
        micro_batch_size=micro_batch_size,
        num_workers=2,
        validation_samples=validation_samples,
    )


def few_texts() -> run.Config[TextDataModule]:
    """4 MB of them, in short samples."""
    return run.Config(
        TextDataModule,
        data_dir="data/stdlib_small",
        vocab_size=4096,
        seq_length=128,
        micro_batch_size=8,
        max_bytes=4_000_000,
        validation_samples=64,
        validation_fraction=0.05,
    )


def trainer(
    folder: str | Path,
    plugins: run.Config[LowPrecision],
    max_steps: int,
    val_check_interval: int,
    num_nodes: int = 1,
    devices: int = 1,
    strategy: run.Config[Strategy] | None = None,
    **more: Any,
) -> run.Config[Trainer]:
    """A Trainer that keeps the best and the last checkpoint, and logs to TensorBoard and CSV.

    Args:
        folder: FOLDER/LEVEL is the run's, and gets checkpoints/, tensorboard/ and csv/.
        plugins: the precision level, such as ``bf16_mixed()`` of ``nemo_lowprec.recipes``.
        max_steps: optimizer steps.
        val_check_interval: micro-batches between two validations; the last step is validated anyway.
        num_nodes: machines.
        devices: processes of each.
        strategy: None: ``lowprec_sharded`` for several processes, Lightning's own for one.
        more: further arguments of the Trainer.
    """
    if strategy is None and num_nodes * devices > 1:
        strategy = lowprec_sharded()
    return run.Config(
        CheckedTrainer,
        plugins=plugins,
        max_steps=max_steps,
        val_check_interval=val_check_interval,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=-1,
        gradient_clip_val=1.0,
        log_every_n_steps=10,
        default_root_dir=str(folder),
        callbacks=[
            run.Partial(
                ModelCheckpoint,
                filename="best",
                monitor="val/loss",
                mode="min",
                save_top_k=1,
                save_last=True,
            )
        ],
        logger=[
            run.Partial(TensorBoardLogger, name="tensorboard", version=""),
            run.Partial(CSVLogger, name="csv", version="", flush_logs_every_n_steps=10),
        ],
        num_nodes=num_nodes,
        devices=devices,
        strategy="auto" if strategy is None else strategy,
        **more,
    )


def assemble(model: run.Config[Any], data: run.Config[Any], trainer: run.Config[Trainer]) -> run.Partial[Any]:
    """The recipe: ``nemo_lowprec.train.pretrain`` with everything but the call itself."""
    return run.Partial(pretrain, model=model, data=data, trainer=trainer)
