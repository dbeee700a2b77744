"""The main job as a nemo_run recipe: a small Llama on the Python standard library's sources.

nemo-lowprec run --yes --factory tiny trainer.plugins=bf16_with_fp8_mixed trainer.plugins.fp8_margin=1
"""

import nemo_run as run
from lightning.pytorch import LightningModule

from nemo_lowprec.models import CausalLM
from nemo_lowprec.recipes.factories import factory
from nemo_lowprec.recipes.parts import assemble, few_texts, trainer
from nemo_lowprec.recipes.precision import FACTORIES
from nemo_lowprec.train import pretrain

__all__ = ["model", "pretrain_recipe"]

NAME = "tiny"


@factory(LightningModule, NAME)
def model() -> run.Config[CausalLM]:
    """The model alone."""
    return run.Config(CausalLM, preset="llama_tiny", lr=3e-3, min_lr=3e-4)


@factory(pretrain, NAME)
def pretrain_recipe(
    dir: str = "outputs",
    name: str = NAME,
    num_nodes: int = 1,
    num_gpus_per_node: int = 1,
    max_steps: int = 200,
) -> run.Partial[pretrain]:  # type: ignore[valid-type]
    """The recipe, ready to be changed: ``recipe.trainer.plugins = fp16_mixed()``.

    Args:
        dir: the run writes to dir/name/LEVEL.
        name: of the run.
        num_nodes: machines.
        num_gpus_per_node: processes a machine, each on a GPU or (without one) on the CPU.
        max_steps: optimizer steps.
    """
    return assemble(
        model(),
        few_texts(),
        trainer(
            f"{dir}/{name}",
            plugins=FACTORIES["bf16_with_fp8_mixed"](),
            max_steps=max_steps,
            val_check_interval=100,
            accumulate_grad_batches=1,
            num_nodes=num_nodes,
            devices=num_gpus_per_node,
        ),
    )
