"""``pretrain`` as an entrypoint of nemo_run: ``nemorun lowprec pretrain`` once the package is installed."""

from __future__ import annotations

import nemo_run as run

from nemo_lowprec.recipes import tiny
from nemo_lowprec.train import pretrain

__all__ = ["DEFAULT_RECIPE"]

DEFAULT_RECIPE = tiny.pretrain_recipe

run.cli.entrypoint(pretrain, namespace="lowprec")
