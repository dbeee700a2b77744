"""Llama 3.2 1B on one GPU, 32k tokens a step.

The text is the Python standard library until ``recipe.data.source`` names your own
(and ``recipe.data.data_dir`` a folder for it).
"""

from functools import partial

import nemo_run as run

from nemo_lowprec.models import CausalLM
from nemo_lowprec.recipes.recipe import make_recipe, texts

_MODEL = partial(run.Config, CausalLM, preset="llama32_1b", lr=3e-4, min_lr=3e-5, activation_checkpointing=True)
NAME, model, pretrain_recipe = make_recipe("llama32_1b", _MODEL, partial(texts, 4096, 2), accumulate=4)
