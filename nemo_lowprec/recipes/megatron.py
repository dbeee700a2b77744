"""Llamas on Megatron-core: ``megatron_tiny``, ``megatron_llama32_1b``, ``megatron_llama3_8b``, ``megatron_llama3_70b``.

nemo-lowprec run --yes --factory "megatron_llama3_8b(num_nodes=2)" trainer.plugins=bf16_with_fp8_mixed

The published models have the parallel sizes, the GPUs and the batch of 512 sequences of 8192 tokens of NeMo's recipes
(2.5, ``nemo.collections.llm.recipes``). On more GPUs the batch grows with the data-parallel processes: lower
``trainer.accumulate_grad_batches`` to keep it.
The text is the Python standard library until ``recipe.data.source`` names your own (and ``recipe.data.data_dir`` a
folder for it).
"""

from functools import partial
from typing import Any

import nemo_run as run

from nemo_lowprec.models import MegatronGPT
from nemo_lowprec.recipes.parsers import register_annotations
from nemo_lowprec.recipes.recipe import PretrainRecipe, few_texts, make_recipe, texts
from nemo_lowprec.recipes.strategies import lowprec_megatron


def _published(name: str, preset: str, accumulate: int, nodes: int = 1, **sizes: Any) -> PretrainRecipe:
    """The recipe of a published model on nodes of 8 GPUs; ``sizes`` are arguments of ``lowprec_megatron``."""
    model = partial(run.Config, MegatronGPT, preset=preset, lr=3e-4, min_lr=3e-5)
    strategy = partial(lowprec_megatron, **sizes)
    return make_recipe(name, model, partial(texts, 8192, 1), accumulate, nodes, gpus=8, build_strategy=strategy)


register_annotations(MegatronGPT)
megatron_tiny = make_recipe(
    "megatron_tiny",
    partial(run.Config, MegatronGPT, preset="llama_tiny", lr=3e-3, min_lr=3e-4),
    few_texts,
    steps=200,
    validate_every=100,
    build_strategy=lowprec_megatron,
)
megatron_llama32_1b = _published("megatron_llama32_1b", "llama32_1b", accumulate=64)
megatron_llama3_8b = _published("megatron_llama3_8b", "llama3_8b", accumulate=128, context_parallel_size=2)
megatron_llama3_70b = _published(
    "megatron_llama3_70b",
    "llama3_70b",
    accumulate=512,
    nodes=4,
    tensor_model_parallel_size=4,
    pipeline_model_parallel_size=4,
    virtual_pipeline_model_parallel_size=5,
    context_parallel_size=2,
    sequence_parallel=True,
)
