"""The job of ``nemo-lowprec advise``: model and first batch of a config, at each of the levels to compare."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from hydra.utils import instantiate
from omegaconf import DictConfig
from torch import nn

from nemo_lowprec.conf.check import check_config
from nemo_lowprec.conf.combinations import combinations, described
from nemo_lowprec.conf.command_line import CommandLine
from nemo_lowprec.conf.job import own_words
from nemo_lowprec.conf.plan_job import build_on_meta, is_on_megatron
from nemo_lowprec.lines import one_line
from nemo_lowprec.models.saved_weights import open_checkpoint
from nemo_lowprec.plugins import LowPrecision
from nemo_lowprec.report.advice.advice import Advice
from nemo_lowprec.report.advice.advise import advise, levels_here
from nemo_lowprec.report.plan.gpu_memory import GIB, memory_of

_BYTES = 4  # of a parameter of the model, and of the copy whose operands are looked at


def advise_job(whole: CommandLine, run: Callable[..., Any], gpu_memory: float | str | None = None) -> Advice:
    """Prints which level fits, the expected time of a step, the layers to keep back and the line to paste.

    Args:
        whole: the command line; a list of levels, and none for all levels that can run here.
        run: composes the config of a command line, and calls a job with it.
        gpu_memory: as for ``advise``.

    Raises:
        ValueError: a bad value, or every level refuses its options or the model.
        TypeError: every level refuses its options.
    """
    memory = None if gpu_memory is None else memory_of(gpu_memory) / GIB
    lines = _lines(whole)
    precisions, refused = [], {}
    first: CommandLine | None = None
    failed: Exception | None = None
    for name, line in lines:
        try:
            precisions.append(run(line, _precision))
        except (ValueError, TypeError) as error:
            failed = failed or error
            refused[name] = str(error)
        else:
            first = first or line
    if first is None:
        assert failed is not None
        raise failed
    model, batch = run(first, _model_and_batch)
    found = advise(model, batch, precisions, gpu_memory=memory)
    found = replace(found, refused=refused | found.refused)
    found.print()
    return found


def _lines(whole: CommandLine) -> list[tuple[str, CommandLine]]:
    """The levels to compare, by name, and the command line of each.

    Raises:
        ValueError: processes or a strategy, or a list of anything but levels.
    """
    for override in whole.parsed:
        if override.key_or_group in ("nodes", "gpus", "strategy"):
            raise ValueError(f"advise is about one GPU: nemo-lowprec plan takes {override.key_or_group}, too.")
        if override.is_sweep_override() and override.key_or_group != "precision":
            raise ValueError(f"advise compares levels, and takes one value of {override.key_or_group}.")
    if any(override.key_or_group == "precision" for override in whole.parsed):
        return [(described(line, whole)[0], line) for line in combinations(whole)]
    names = levels_here(_device())
    return [(name, replace(whole, overrides=(f"precision={name}", *whole.overrides))) for name in names]


def _device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def _precision(cfg: DictConfig) -> LowPrecision:
    """The level of a config."""
    check_config(cfg, complete=False)
    with own_words():
        return instantiate(cfg.precision)  # type: ignore[no-any-return]


def _model_and_batch(cfg: DictConfig) -> tuple[nn.Module, Any]:
    """The model of a config, with the weights of its checkpoint where it names one, and the first training batch.

    A model that is too large for the device's memory has no values.
    """
    check_config(cfg)
    if is_on_megatron(cfg):
        raise ValueError("advise has no pass for models that Megatron-core builds. Choose the same model without it.")
    with own_words():
        data = instantiate(cfg.data)
    data.prepare_data()
    data.setup("fit")
    model, _ = build_on_meta(cfg)
    with own_words():
        if _has_room(_BYTES * sum(p.numel() for p in model.parameters())):
            model = instantiate(cfg.model)
            with _device():  # where new weights take less time
                model.configure_model()
            model.cpu()  # leaves the GPU to the copies
            if cfg.ckpt_path is not None:
                _load(model, Path(cfg.ckpt_path))
    return model, next(iter(data.train_dataloader()))


def _has_room(size: int) -> bool:
    """Whether this machine has memory for a model of ``size`` bytes and, on its GPU where it has one, for a copy."""
    host = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if torch.cuda.is_available():
        return size < min(host, torch.cuda.mem_get_info()[0])
    return 2 * size < host


def _load(model: nn.Module, path: Path) -> None:
    saved = open_checkpoint(path)
    try:
        model.load_state_dict(dict(saved.read(saved.tensors)))
    except RuntimeError as error:
        raise ValueError(f"{path} holds no weights of this model: {one_line(error)}") from error
