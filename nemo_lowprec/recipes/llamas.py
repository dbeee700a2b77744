"""The recipes: Llamas on one GPU, sharded over several, or (``megatron_*``) on Megatron-core.

nemo-lowprec run --yes --factory tiny trainer.plugins=bf16_with_fp8_mixed trainer.plugins.fp8_margin=1
nemo-lowprec run --yes --factory "megatron_llama3_8b(num_nodes=2)" trainer.plugins=bf16_with_fp8_mixed

The text is the Python standard library until ``recipe.data.source`` names your own (and ``recipe.data.data_dir`` a
folder for it).
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import nemo_run as run

from nemo_lowprec.models import CausalLM, MegatronGPT
from nemo_lowprec.recipes.factories import lowprec_megatron
from nemo_lowprec.recipes.parsers import register_annotations
from nemo_lowprec.recipes.recipe import PretrainRecipe, few_texts, make_recipe, texts

register_annotations(MegatronGPT)
_SMALL: Any = {"preset": "llama_tiny", "lr": 3e-3, "min_lr": 3e-4}
_SHORT: Any = {"steps": 200, "validate_every": 100}


def _llama(preset: str) -> Any:
    return partial(run.Config, CausalLM, preset=preset, lr=3e-4, min_lr=3e-5, activation_checkpointing=True)


tiny = make_recipe("tiny", partial(run.Config, CausalLM, **_SMALL), few_texts, **_SHORT)
# 32k tokens a step, on one GPU.
llama32_1b = make_recipe("llama32_1b", _llama("llama32_1b"), partial(texts, 4096, 2), accumulate=4)
# 65k tokens a step. Weights, masters, gradients and moments take 18 bytes a parameter at bf16_mixed, 145 GB: more than
# one GPU has. Several GPUs share them (num_gpus_per_node=8); `nemo-lowprec plan model=llama3_8b gpus=8` says what each
# GPU holds.
llama3_8b = make_recipe("llama3_8b", _llama("llama3_8b"), partial(texts, 8192, 1, 128), accumulate=8)


def _published(preset: str, accumulate: int, nodes: int = 1, **sizes: Any) -> PretrainRecipe:
    """The recipe of a published model on nodes of 8 GPUs; ``sizes`` are arguments of ``lowprec_megatron``.

    The parallel sizes, the GPUs and the batch of 512 sequences of 8192 tokens are those of NeMo's recipes (2.5,
    ``nemo.collections.llm.recipes``). On more GPUs the batch grows with the data-parallel processes: lower
    ``trainer.accumulate_grad_batches`` to keep it.
    """
    model = partial(run.Config, MegatronGPT, preset=preset, lr=3e-4, min_lr=3e-5)
    strategy = partial(lowprec_megatron, **sizes)
    return make_recipe(
        f"megatron_{preset}", model, partial(texts, 8192, 1), accumulate, nodes, gpus=8, build_strategy=strategy
    )


megatron_tiny = make_recipe(
    "megatron_tiny", partial(run.Config, MegatronGPT, **_SMALL), few_texts, **_SHORT, build_strategy=lowprec_megatron
)
megatron_llama32_1b = _published("llama32_1b", accumulate=64)
megatron_llama3_8b = _published("llama3_8b", accumulate=128, context_parallel_size=2)
megatron_llama3_70b = _published(
    "llama3_70b",
    accumulate=512,
    nodes=4,
    tensor_model_parallel_size=4,
    pipeline_model_parallel_size=4,
    virtual_pipeline_model_parallel_size=5,
    context_parallel_size=2,
    sequence_parallel=True,
)
_ON_MEGATRON = (megatron_tiny, megatron_llama32_1b, megatron_llama3_8b, megatron_llama3_70b)
RECIPES: dict[str, Callable[..., Any]] = {
    recipe.NAME: recipe.pretrain_recipe for recipe in (tiny, llama32_1b, llama3_8b, *_ON_MEGATRON)
}
