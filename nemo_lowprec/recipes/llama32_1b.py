"""Llama 3.2 1B, 32k tokens a step, on one GPU.

The text is the Python standard library until ``recipe.data.source`` names your own
(and ``recipe.data.data_dir`` a folder for it).
"""

import nemo_run as run
from lightning.pytorch import LightningModule

from nemo_lowprec.models import CausalLM
from nemo_lowprec.recipes.factories import factory
from nemo_lowprec.recipes.parts import assemble, texts, trainer
from nemo_lowprec.recipes.precision import FACTORIES
from nemo_lowprec.train import pretrain

__all__ = ["model", "pretrain_recipe"]

NAME = "llama32_1b"


@factory(LightningModule, NAME)
def model() -> run.Config[CausalLM]:
    """The model alone."""
    return run.Config(CausalLM, preset="llama32_1b", lr=3e-4, min_lr=3e-5, activation_checkpointing=True)


@factory(pretrain, NAME)
def pretrain_recipe(
    dir: str = "outputs",
    name: str = NAME,
    num_nodes: int = 1,
    num_gpus_per_node: int = 1,
    max_steps: int = 10_000,
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
        texts(seq_length=4096, micro_batch_size=2),
        trainer(
            f"{dir}/{name}",
            plugins=FACTORIES["bf16_mixed"](),
            max_steps=max_steps,
            val_check_interval=2000,
            accumulate_grad_batches=4,
            num_nodes=num_nodes,
            devices=num_gpus_per_node,
        ),
    )
