"""Llama 3 8B, 65k tokens a step.

Weights, masters, gradients and moments take 18 bytes a parameter at bf16_mixed, 145 GB: more than one GPU has. Several
GPUs share them (``num_gpus_per_node=8``); ``nemo-lowprec plan model=llama3_8b gpus=8`` says what each GPU holds.
The text is the Python standard library until ``recipe.data.source`` names your own
(and ``recipe.data.data_dir`` a folder for it).
"""

from functools import partial

import nemo_run as run

from nemo_lowprec.models import CausalLM
from nemo_lowprec.recipes.recipe import make_recipe, texts

_MODEL = partial(run.Config, CausalLM, preset="llama3_8b", lr=3e-4, min_lr=3e-5, activation_checkpointing=True)
NAME, model, pretrain_recipe = make_recipe("llama3_8b", _MODEL, partial(texts, 8192, 1, 128), accumulate=8)
