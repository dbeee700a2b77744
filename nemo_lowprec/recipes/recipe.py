"""Makes a pretrain recipe of nemo_run: a model, its data, and a Trainer that writes to a folder of the level's name."""

from collections.abc import Callable
from typing import Any, NamedTuple

import nemo_run as run
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.strategies import Strategy

from nemo_lowprec.data import TextDataModule
from nemo_lowprec.recipes.factories import FACTORIES, factory, lowprec_sharded
from nemo_lowprec.recipes.level_folder import CheckedTrainer
from nemo_lowprec.run_arguments import RECIPES
from nemo_lowprec.train import pretrain


class PretrainRecipe(NamedTuple):
    """The two factories of one recipe.

    Attributes:
        NAME: name of both factories on the command line.
        model: returns the ``run.Config`` of the model.
        pretrain_recipe: takes ``dir``, ``name``, ``num_nodes``, ``num_gpus_per_node``, ``max_steps`` and ``monitor``,
            and returns the ``run.Partial`` of ``nemo_lowprec.train.pretrain``.
    """

    NAME: str
    model: Callable[[], Any]
    pretrain_recipe: Callable[..., Any]


def texts(seq_length: int, micro_batch_size: int, validation_samples: int = 256) -> run.Config[TextDataModule]:
    """The Python standard library's sources, until ``data.source`` and ``data.data_dir`` name a user's own texts."""
    return run.Config(TextDataModule, data_dir="data/stdlib", num_workers=2, **locals())


def few_texts() -> run.Config[TextDataModule]:
    """4 MB of the standard library's sources, in samples of 128 tokens."""
    return run.Config(
        TextDataModule,
        data_dir="data/stdlib_small",
        vocab_size=4096,
        seq_length=128,
        micro_batch_size=8,
        max_bytes=4_000_000,
        validation_samples=64,
        validation_fraction=0.05,
    )


def make_recipe(
    name: str,
    build_model: Callable[[], Any],
    build_data: Callable[[], run.Config[TextDataModule]],
    accumulate: int = 1,
    nodes: int = 1,
    gpus: int = 1,
    steps: int = 10_000,
    validate_every: int = 500,
    build_strategy: Callable[[], run.Config[Strategy]] | None = None,
) -> PretrainRecipe:
    """Make the factories of one recipe and register them with nemo_run's command line.

    Args:
        name: a key of ``RECIPES``, whose entry names the level.
        build_model, build_data, build_strategy: make the configs. Without a strategy a recipe for several processes
            gets ``lowprec_sharded``, and one process gets Lightning's own.
        accumulate: micro-batches of an optimizer step on each data-parallel process.
        nodes, gpus, steps: defaults of the recipe's arguments.
        validate_every: optimizer steps between two validations; the last step is validated anyway.
    """
    recipe = name

    @factory(LightningModule, recipe)
    def model() -> Any:
        """The model alone."""
        return build_model()

    @factory(pretrain, recipe)
    def pretrain_recipe(
        dir: str = "outputs",
        name: str = recipe,
        num_nodes: int = nodes,
        num_gpus_per_node: int = gpus,
        max_steps: int = steps,
        monitor: int | bool = False,
    ) -> run.Partial[pretrain]:  # type: ignore[valid-type]
        """The recipe, ready to be changed: ``recipe.trainer.plugins = fp16_mixed()``.

        Args:
            dir: the run writes checkpoints/, tensorboard/ and csv/ to dir/name/LEVEL.
            name: of the run.
            num_nodes: machines.
            num_gpus_per_node: processes of a machine, each on a GPU or (without one) on the CPU.
            max_steps: optimizer steps.
            monitor: True, or the distance of the samples, to watch what low precision does to each layer.
        """
        strategy: Any = "auto" if num_nodes * num_gpus_per_node == 1 else lowprec_sharded()
        trainer = run.Config(
            CheckedTrainer,
            plugins=FACTORIES[RECIPES[recipe][0]](),
            max_steps=max_steps,
            val_check_interval=validate_every * accumulate,
            check_val_every_n_epoch=None,
            num_sanity_val_steps=-1,
            accumulate_grad_batches=accumulate,
            gradient_clip_val=1.0,
            log_every_n_steps=10,
            default_root_dir=f"{dir}/{name}",
            callbacks=[
                run.Partial(
                    ModelCheckpoint, filename="best", monitor="val/loss", mode="min", save_top_k=1, save_last=True
                )
            ],
            logger=[
                run.Partial(TensorBoardLogger, name="tensorboard", version=""),
                run.Partial(CSVLogger, name="csv", version="", flush_logs_every_n_steps=10),
            ],
            num_nodes=num_nodes,
            devices=num_gpus_per_node,
            strategy=strategy if build_strategy is None else build_strategy(),
        )
        return run.Partial(pretrain, model=model(), data=build_data(), trainer=trainer, monitor=monitor)

    return PretrainRecipe(recipe, model, pretrain_recipe)
