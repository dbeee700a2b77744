"""Every level as a nemo_run factory, the pretrain recipes, and ``pretrain`` as an entrypoint of nemo_run.

::

    from nemo_lowprec.recipes import fp16_mixed, llama3_8b, lowprec_sharded, precision_monitor

    recipe = llama3_8b.pretrain_recipe(dir="outputs", name="fp16")
    recipe.trainer.plugins = fp16_mixed()
    recipe.trainer.strategy = lowprec_sharded()  # the default of several processes
    recipe.trainer.callbacks.append(precision_monitor(every_n_steps=10))  # or recipe.monitor = 10
    run.run(recipe, executor=run.LocalExecutor())

and on the command line, with or without nemo_run's own ``nemorun lowprec pretrain``::

    nemo-lowprec run --yes --factory tiny trainer.plugins=bf16_with_fp8_mixed trainer.plugins.fp8_margin=1

The factories return configs. To train without nemo_run, pass ``nemo_lowprec.fp16_mixed()`` to the Trainer.
"""

from nemo_lowprec.extras import needs_extras

with needs_extras("nemo_lowprec.recipes"):
    import nemo_run as run

from nemo_lowprec.recipes.context import RecipeContext
from nemo_lowprec.recipes.factories import FACTORIES, lowprec_ddp, lowprec_megatron, lowprec_sharded, precision_monitor
from nemo_lowprec.recipes.llamas import (
    RECIPES,
    llama3_8b,
    llama32_1b,
    megatron_llama3_8b,
    megatron_llama3_70b,
    megatron_llama32_1b,
    megatron_tiny,
    tiny,
)
from nemo_lowprec.train import pretrain

__all__ = [
    "FACTORIES",
    "RECIPES",
    "llama3_8b",
    "llama32_1b",
    "lowprec_ddp",
    "lowprec_megatron",
    "lowprec_sharded",
    "megatron_llama3_8b",
    "megatron_llama3_70b",
    "megatron_llama32_1b",
    "megatron_tiny",
    "precision_monitor",
    "tiny",
    *FACTORIES,
]

globals().update(FACTORIES)
run.cli.entrypoint(
    pretrain,
    namespace="lowprec",
    help="Trains a recipe of nemo_lowprec at a precision level: --factory tiny --yes trainer.plugins=fp16_mixed",
    run_ctx_cls=RecipeContext,
)
