"""``pretrain`` as an entrypoint of nemo_run: ``nemorun lowprec pretrain`` once the package is installed."""

from __future__ import annotations

import nemo_run as run

from nemo_lowprec.recipes import llama3_8b, llama32_1b, tiny
from nemo_lowprec.recipes.context import RecipeContext
from nemo_lowprec.recipes.megatron import megatron_llama3_8b, megatron_llama3_70b, megatron_llama32_1b, megatron_tiny
from nemo_lowprec.train import pretrain

__all__ = ["RECIPES"]

_ON_MEGATRON = (megatron_tiny, megatron_llama32_1b, megatron_llama3_8b, megatron_llama3_70b)
RECIPES = {recipe.NAME: recipe.pretrain_recipe for recipe in (tiny, llama32_1b, llama3_8b, *_ON_MEGATRON)}

run.cli.entrypoint(
    pretrain,
    namespace="lowprec",
    help="Trains a recipe of nemo_lowprec at a precision level: --factory tiny --yes trainer.plugins=fp16_mixed",
    run_ctx_cls=RecipeContext,
)
