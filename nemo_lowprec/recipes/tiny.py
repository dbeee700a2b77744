"""The main job as a nemo_run recipe: a small Llama on the Python standard library's sources.

nemo-lowprec run --yes --factory tiny trainer.plugins=bf16_with_fp8_mixed trainer.plugins.fp8_margin=1
"""

from functools import partial

import nemo_run as run

from nemo_lowprec.models import CausalLM
from nemo_lowprec.recipes.recipe import few_texts, make_recipe

_MODEL = partial(run.Config, CausalLM, preset="llama_tiny", lr=3e-3, min_lr=3e-4)
NAME, model, pretrain_recipe = make_recipe("tiny", _MODEL, few_texts, steps=200, validate_every=100)
