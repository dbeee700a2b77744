"""The Hydra job: from command-line overrides to ``nemo_lowprec.train.pretrain``."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hydra
from hydra.conf import HydraConf
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import HydraException
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from nemo_lowprec.chart import get_level
from nemo_lowprec.conf.check import check_config
from nemo_lowprec.conf.levels import register_levels
from nemo_lowprec.models.architecture import one_line

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nemo_lowprec.report import AuditReport
    from nemo_lowprec.train import PretrainResult

__all__ = ["CONF_DIR", "audit_job", "build", "one_sentence", "own_words", "pretrain_job", "run_with_overrides"]

CONF_DIR = Path(__file__).parent
_MULTIRUN = {"-m", "--multirun"}
_NOTHING_WRITTEN = ["hydra.run.dir=.", "hydra.output_subdir=null", "hydra/job_logging=stdout"]
_GROUPS = tuple(sorted(p.name for p in CONF_DIR.iterdir() if p.is_dir() and not p.name.startswith("_")))


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
    """Hydra wraps what a class says; the class says it better."""
    from lightning.pytorch.utilities.exceptions import MisconfigurationException

    try:
        yield
    except hydra.errors.InstantiationException as error:
        cause = error.__cause__
        if isinstance(cause, ValueError | TypeError | MisconfigurationException):
            raise type(cause)(str(cause)) from error
        if isinstance(cause, RuntimeError):  # ours or torch's: where it was raised tells
            raise cause from cause.__cause__
        # Nothing has begun yet: what another library says here is about its arguments.
        raise ValueError(one_sentence(error if cause is None else cause)) from error


def _processes(cfg: DictConfig) -> dict[str, Any]:
    """The Trainer's arguments that ``nodes`` and ``gpus`` stand for.

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
    from lightning.pytorch import seed_everything

    from nemo_lowprec.train import pretrain

    check_config(cfg)
    seed_everything(cfg.seed, verbose=False)
    return pretrain(**build(cfg), ckpt_path=cfg.ckpt_path)


def audit_job(cfg: DictConfig) -> AuditReport:
    """Trains two steps and prints what the level declares beside what was found.

    Raises:
        ValueError: something found is not what the chart declares.
    """
    from lightning.pytorch import seed_everything
    from lightning.pytorch.callbacks import Checkpoint
    from rich.console import Console

    from nemo_lowprec.report import Audit

    check_config(cfg)
    seed_everything(cfg.seed, verbose=False)
    audit = Audit()
    with open_dict(cfg.trainer):
        # Nothing is written: no logger, no checkpoint, no validation.
        cfg.trainer.update(max_steps=audit.STEP + 1, num_sanity_val_steps=0, limit_val_batches=0, logger=False)
    parts = build(cfg)
    trainer = parts["trainer"]
    trainer.callbacks = [c for c in trainer.callbacks if not isinstance(c, Checkpoint)] + [audit]
    trainer.fit(parts["model"], datamodule=parts["data"])
    report = audit.report
    assert report is not None
    if trainer.is_global_zero:
        Console(width=None if sys.stdout.isatty() else 140).print(report.table())
    differing = [f for f in report.findings if not f.agrees]
    if differing:
        found = "; ".join(f"{f.column} of {f.part}: {f.declared} declared, {f.observed} found" for f in differing)
        raise ValueError(f"{report.level.name} differs from the chart. {found}.")
    return report


def run_with_overrides(
    overrides: Sequence[str],
    job: Callable[[DictConfig], Any] = pretrain_job,
    command: str = "pretrain",
    writes: bool = True,
) -> None:
    """Runs ``job`` as a Hydra application, once or (with ``-m``) once a combination.

    Args:
        overrides: Hydra's command line: overrides such as ``precision=fp16_mixed``, and its own flags.
        job: takes the composed config.
        command: the subcommand, for Hydra's own messages.
        writes: whether Hydra makes a folder for the run, with its config and log.

    Raises:
        ValueError: an unknown choice of a group, or a malformed or impossible override.
        TypeError: an argument that the level does not take.
    """
    register_levels()
    _check_overrides(overrides)

    failures: list[Exception] = []
    begun: list[DictConfig] = []
    is_multirun = bool(_MULTIRUN & set(overrides))
    if is_multirun and not writes:
        raise ValueError(f"{command} writes nothing, and -m a record of its runs. Call it once for each combination.")
    overrides = list(overrides) if writes else [*_NOTHING_WRITTEN, *overrides]
    # argparse, which Hydra reads its flags with, takes no override before a flag and another one behind it.
    overrides = ["--multirun"] * is_multirun + [o for o in overrides if o not in _MULTIRUN]

    own = sys.argv

    def run(cfg: DictConfig) -> Any:
        begun.append(cfg)
        # Lightning starts its other processes with the command line of this one.
        of_hydra, sys.argv = sys.argv, own
        try:
            return job(cfg)
        except Exception as error:
            # Of several runs Hydra says which one failed; of one run it has nothing to add to our sentence.
            if is_multirun:
                raise
            failures.append(error)
        finally:
            sys.argv = of_hydra

    app = hydra.main(config_path=str(CONF_DIR), config_name="config", version_base="1.3")(run)
    try:
        with _arguments([f"nemo-lowprec {command}", *overrides]):
            app()
        if failures:
            raise failures[0]
    except (HydraException, OmegaConfBaseException) as error:
        raise ValueError(one_sentence(error)) from error
    except Exception as error:
        if begun:
            raise
        # Nothing of ours has run: the folder of the run, or a setting of Hydra's own.
        raise ValueError(f"Hydra cannot begin with these settings of its own (hydra.*): {one_line(error)}") from error


def _check_overrides(overrides: Sequence[str]) -> None:
    """Says in one sentence what Hydra says in many lines, for the mistakes that people make most."""
    plain = [o for o in overrides if "=" in o and not o.startswith("-")]
    try:
        parsed = OverridesParser.create().parse_overrides(plain)
    except HydraException as error:
        raise ValueError(one_sentence(error)) from error
    levels: list[str] = []
    for override in parsed:
        group, _, setting = override.key_or_group.partition(".")
        if group == "hydra" and setting.partition(".")[0] not in HydraConf.__dataclass_fields__:
            raise TypeError(f"hydra.{setting} is no setting of Hydra's.")
        if override.key_or_group == "precision" and override.type is not OverrideType.DEL:
            levels += _choices(override)
        elif override.key_or_group in _GROUPS and override.type is not OverrideType.DEL:
            known = sorted(p.stem for p in (CONF_DIR / override.key_or_group).glob("*.yaml"))
            for choice in _choices(override):
                if choice not in known:
                    raise ValueError(f"Unknown {override.key_or_group} {choice!r}. Choose one of: {', '.join(known)}.")
    for level in levels:
        get_level(level)
    levels = levels or _default_level()
    for override in parsed:
        group, _, argument = override.key_or_group.partition(".")
        if group == "precision" and argument:
            for level in levels:
                _check_argument(level, argument)


def _default_level() -> list[str]:
    defaults = OmegaConf.load(CONF_DIR / "config.yaml").defaults
    return [entry["precision"] for entry in defaults if "precision" in entry]


def _choices(override: Override) -> list[str]:
    if override.is_sweep_override():
        return list(override.sweep_string_iterator())
    value = override.value()
    return [] if value is None else [str(value)]


def _check_argument(level: str, argument: str) -> None:
    from nemo_lowprec.plugins import LEVELS

    if argument not in inspect.signature(LEVELS[level]).parameters:
        LEVELS[level](**{argument: None})  # raises the level's own TypeError


def one_sentence(error: BaseException) -> str:
    """Hydra's message on one line, without the hints that name its internals."""
    lines = [line.strip() for line in str(error).splitlines()]
    kept = [line for line in lines if line and not line.startswith(("full_key:", "object_type=", "See https"))]
    if error.__cause__ is not None and str(error.__cause__):
        kept.append(f"({str(error.__cause__).splitlines()[0]})")
    return " ".join(kept)


@contextmanager
def _arguments(argv: list[str]) -> Iterator[None]:
    """Hydra reads sys.argv; and it prints and exits where an exception is wanted, unless told otherwise."""
    saved, full_error = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    sys.argv = argv
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        yield
    finally:
        sys.argv = saved
        if full_error is None:
            del os.environ["HYDRA_FULL_ERROR"]
        else:
            os.environ["HYDRA_FULL_ERROR"] = full_error
