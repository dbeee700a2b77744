"""The nemo_run face: every level as a factory of ``run.Config``, and the pretrain recipes.

::

    from nemo_lowprec.recipes import fp16_mixed, llama3_8b, lowprec_sharded

    recipe = llama3_8b.pretrain_recipe(dir="outputs", name="fp16")
    recipe.trainer.plugins = fp16_mixed()
    recipe.trainer.strategy = lowprec_sharded()  # of several processes the default
    run.run(recipe, executor=run.LocalExecutor())

and on the command line, with or without nemo_run's own ``nemorun lowprec pretrain``::

    nemo-lowprec run --yes --factory tiny trainer.plugins=bf16_with_fp8_mixed trainer.plugins.fp8_margin=1

These are configs: to train without nemo_run, pass ``nemo_lowprec.fp16_mixed()`` to the Trainer, not this package's.
"""

try:
    import nemo_run  # noqa: F401
except ImportError as error:
    raise ImportError("nemo_lowprec.recipes needs nemo_run: pip install nemo-run leptonai==0.27.3") from error

from nemo_lowprec.recipes import entrypoint, llama3_8b, llama32_1b, tiny  # noqa: F401
from nemo_lowprec.recipes.factories import FACTORIES
from nemo_lowprec.recipes.megatron import megatron_llama3_8b, megatron_llama3_70b, megatron_llama32_1b, megatron_tiny
from nemo_lowprec.recipes.strategies import lowprec_ddp, lowprec_megatron, lowprec_sharded

__all__ = [
    "FACTORIES",
    "llama3_8b",
    "llama32_1b",
    "lowprec_ddp",
    "lowprec_megatron",
    "lowprec_sharded",
    "megatron_llama3_8b",
    "megatron_llama3_70b",
    "megatron_llama32_1b",
    "megatron_tiny",
    "tiny",
    *FACTORIES,
]

globals().update(FACTORIES)
