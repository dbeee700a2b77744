"""One of the two runs of ``nemo-lowprec profile``."""

from __future__ import annotations

from omegaconf import DictConfig

from nemo_lowprec.conf.job import train_shortly
from nemo_lowprec.report.profile.callback import StepProfiler


def profile_job(cfg: DictConfig, into: str) -> None:
    """Train as many steps as a profile takes.

    Args:
        cfg: the composed config.
        into: the file of the profile.
    """
    train_shortly(cfg, StepProfiler.steps(), StepProfiler(into))
