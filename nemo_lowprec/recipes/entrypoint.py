"""``pretrain`` as an entrypoint of nemo_run: ``nemorun lowprec pretrain`` once the package is installed."""

from __future__ import annotations

import nemo_run as run

from nemo_lowprec.recipes import llama3_8b, llama32_1b, tiny
from nemo_lowprec.recipes.megatron import megatron_llama3_8b, megatron_llama3_70b, megatron_llama32_1b, megatron_tiny
from nemo_lowprec.train import pretrain

__all__ = ["DEFAULT_RECIPE", "RECIPES"]

_ON_MEGATRON = (megatron_tiny, megatron_llama32_1b, megatron_llama3_8b, megatron_llama3_70b)
RECIPES = {recipe.NAME: recipe.pretrain_recipe for recipe in (tiny, llama32_1b, llama3_8b, *_ON_MEGATRON)}
DEFAULT_RECIPE = RECIPES["tiny"]

run.cli.entrypoint(pretrain, namespace="lowprec")
