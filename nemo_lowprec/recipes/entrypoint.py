"""``pretrain`` as an entrypoint of nemo_run: ``nemorun lowprec pretrain`` once the package is installed."""

from __future__ import annotations

import nemo_run as run

from nemo_lowprec.recipes import llama3_8b, llama32_1b, tiny
from nemo_lowprec.train import pretrain

__all__ = ["DEFAULT_RECIPE", "RECIPES"]

RECIPES = {recipe.NAME: recipe.pretrain_recipe for recipe in (tiny, llama32_1b, llama3_8b)}
DEFAULT_RECIPE = RECIPES["tiny"]

run.cli.entrypoint(pretrain, namespace="lowprec")
