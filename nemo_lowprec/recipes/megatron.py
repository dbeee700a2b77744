"""Llamas on Megatron-core: ``megatron_tiny``, ``megatron_llama32_1b``, ``megatron_llama3_8b``, ``megatron_llama3_70b``.

nemo-lowprec run --yes --factory "megatron_llama3_8b(num_nodes=2)" trainer.plugins=bf16_with_fp8_mixed

The published models' parallel sizes, GPUs and batch of 512 sequences of 8192 tokens are those of NeMo's recipes of them
(2.5, ``nemo.collections.llm.recipes``). On more GPUs the batch grows with the data-parallel processes: lower
``trainer.accumulate_grad_batches`` to keep it.
The text is the Python standard library until ``recipe.data.source`` names your own (and ``recipe.data.data_dir`` a
folder for it).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import nemo_run as run
from lightning.pytorch import LightningModule

from nemo_lowprec.data import TextDataModule
from nemo_lowprec.models import MegatronGPT
from nemo_lowprec.recipes.factories import factory
from nemo_lowprec.recipes.parsers import register_annotations
from nemo_lowprec.recipes.parts import assemble, few_texts, texts, trainer
from nemo_lowprec.recipes.precision import FACTORIES
from nemo_lowprec.recipes.strategies import lowprec_megatron
from nemo_lowprec.train import pretrain

__all__ = ["MegatronRecipe", "megatron_llama3_8b", "megatron_llama3_70b", "megatron_llama32_1b", "megatron_tiny"]


@dataclass(frozen=True)
class MegatronRecipe:
    """What the modules of the other recipes hold: the factories of one name.

    Attributes:
        NAME: of both on the command line.
        model: the model alone.
        pretrain_recipe: takes ``dir``, ``name``, ``num_nodes``, ``num_gpus_per_node`` and ``max_steps``.
    """

    NAME: str
    model: Callable[[], run.Config[MegatronGPT]]
    pretrain_recipe: Callable[..., Any]


def _recipe(
    NAME: str,
    preset: str,
    lr: float = 3e-4,
    min_lr: float = 3e-5,
    data: Callable[[], run.Config[TextDataModule]] = lambda: texts(seq_length=8192, micro_batch_size=1),
    accumulate: int = 1,
    nodes: int = 1,
    gpus: int = 8,
    steps: int = 10_000,
    validate_every: int = 500,
    **sizes: Any,
) -> MegatronRecipe:
    """The factories of one model, known to the command line.

    Args:
        NAME: of the recipe.
        preset: of the model.
        lr, min_lr: learning rate at its peak and at the end.
        data: makes the data.
        accumulate: micro-batches of a step on each data-parallel process.
        nodes, gpus, steps: defaults of the recipe's arguments.
        validate_every: optimizer steps.
        sizes: arguments of ``lowprec_megatron``.
    """

    @factory(LightningModule, NAME)
    def model() -> run.Config[MegatronGPT]:
        """The model alone."""
        return run.Config(MegatronGPT, preset=preset, lr=lr, min_lr=min_lr)

    @factory(pretrain, NAME)
    def pretrain_recipe(
        dir: str = "outputs",
        name: str = NAME,
        num_nodes: int = nodes,
        num_gpus_per_node: int = gpus,
        max_steps: int = steps,
    ) -> run.Partial[pretrain]:  # type: ignore[valid-type]
        """The recipe, ready to be changed: ``recipe.trainer.strategy.tensor_model_parallel_size = 2``.

        Args:
            dir: the run writes to dir/name/LEVEL.
            name: of the run.
            num_nodes: machines.
            num_gpus_per_node: processes a machine, each on a GPU.
            max_steps: optimizer steps.
        """
        return assemble(
            model(),
            data(),
            trainer(
                f"{dir}/{name}",
                plugins=FACTORIES["bf16_mixed"](),
                max_steps=max_steps,
                val_check_interval=validate_every * accumulate,
                accumulate_grad_batches=accumulate,
                num_nodes=num_nodes,
                devices=num_gpus_per_node,
                strategy=lowprec_megatron(**sizes),
            ),
        )

    return MegatronRecipe(NAME, model, pretrain_recipe)


register_annotations(MegatronGPT)
megatron_tiny = _recipe(
    "megatron_tiny", "llama_tiny", lr=3e-3, min_lr=3e-4, data=few_texts, gpus=1, steps=200, validate_every=100
)
megatron_llama32_1b = _recipe("megatron_llama32_1b", "llama32_1b", accumulate=64)
megatron_llama3_8b = _recipe("megatron_llama3_8b", "llama3_8b", accumulate=128, context_parallel_size=2)
megatron_llama3_70b = _recipe(
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
