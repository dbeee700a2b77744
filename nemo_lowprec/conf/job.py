"""The jobs ``nemo-lowprec pretrain`` and ``audit``: from a composed config to ``nemo_lowprec.train.pretrain``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

import hydra
from hydra.utils import instantiate
from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from omegaconf import DictConfig, open_dict
from rich.console import Console

from nemo_lowprec.conf.check import check_config
from nemo_lowprec.conf.command_line import one_sentence
from nemo_lowprec.display import own_display
from nemo_lowprec.extras import MissingPackageError
from nemo_lowprec.quiet import quiet
from nemo_lowprec.report.audit import Audit
from nemo_lowprec.report.findings import AuditReport
from nemo_lowprec.train import PretrainResult, pretrain


def build(cfg: DictConfig) -> dict[str, Any]:
    """Makes ``model``, ``data`` and ``trainer`` of a composed config.

    Raises:
        TypeError: an argument that the level or the Trainer does not take.
        ValueError: a bad value.
        RuntimeError: a strategy that this machine cannot run.
    """
    with own_words():
        plugin = instantiate(cfg.precision)
        processes = _processes(cfg)
        trainer = instantiate(
            cfg.trainer, plugins=[plugin], callbacks=[instantiate(cfg.checkpoint)], _convert_="all", **processes
        )
        return {"model": instantiate(cfg.model), "data": instantiate(cfg.data), "trainer": trainer}


@contextmanager
def own_words() -> Iterator[None]:
    """Raise the exception of a class or function in place of Hydra's InstantiationException around it."""
    try:
        yield
    except hydra.errors.InstantiationException as error:
        cause = error.__cause__
        if isinstance(cause, ValueError | TypeError | MisconfigurationException):
            raise type(cause)(str(cause)) from error
        # The traceback of a RuntimeError tells whether this package or torch raised it.
        if isinstance(cause, RuntimeError | MissingPackageError):
            raise cause from cause.__cause__
        # Objects are only being made: an exception of another library is about the arguments.
        raise ValueError(one_sentence(error if cause is None else cause)) from error


def _processes(cfg: DictConfig) -> dict[str, Any]:
    """The Trainer's ``num_nodes`` and ``devices`` from the settings ``nodes`` and ``gpus``.

    Raises:
        ValueError: several processes with a strategy for one.
    """
    given = {"num_nodes": cfg.nodes, "devices": cfg.gpus}
    several = any(value not in (None, 1) for value in given.values())
    if several and cfg.trainer.get("strategy") == "auto":
        raise ValueError(
            f"nodes={cfg.nodes} and gpus={cfg.gpus} are several processes, and strategy=single_device is one. "
            "Add strategy=lowprec_sharded, lowprec_megatron, lowprec_ddp or ddp."
        )
    return {name: value for name, value in given.items() if value is not None}


def pretrain_job(cfg: DictConfig) -> PretrainResult:
    """Seeds, builds and runs one training."""
    check_config(cfg)
    seed_everything(cfg.seed, verbose=False)
    with own_words():
        monitor = instantiate(cfg.monitor) if cfg.get("monitor") else False
    return pretrain(**build(cfg), ckpt_path=cfg.ckpt_path, monitor=monitor)


def train_shortly(cfg: DictConfig, steps: int, callback: Callback) -> Trainer:
    """Train some steps with one callback. Nothing is written: no log, no checkpoint; nothing is validated."""
    check_config(cfg)
    seed_everything(cfg.seed, verbose=False)
    with open_dict(cfg.trainer):
        cfg.trainer.update(max_steps=steps, num_sanity_val_steps=0, limit_val_batches=0, logger=False)
    parts = build(cfg)
    trainer = parts["trainer"]
    trainer.callbacks = [c for c in trainer.callbacks if not isinstance(c, Checkpoint)] + [callback]
    with quiet(), own_display(trainer):
        trainer.fit(parts["model"], datamodule=parts["data"])
    return trainer  # type: ignore[no-any-return]


def audit_job(cfg: DictConfig, json_to: TextIO | None = None) -> AuditReport:
    """Trains two steps and prints, for each column, the format that the level declares and the format found.

    Args:
        cfg: the composed config.
        json_to: where the report is written as one line of JSON; None prints it as a table.

    Raises:
        LevelDiffersError: a column was found in another format than the chart declares.
    """
    audit = Audit()
    trainer = train_shortly(cfg, audit.STEP + 1, audit)
    report = audit.report
    assert report is not None
    if trainer.is_global_zero and json_to is not None:
        print(json.dumps(report.to_json()), file=json_to, flush=True)
    elif trainer.is_global_zero:
        Console().print(report.table())
    report.check()
    return report
