"""The Hydra job of ``nemo-lowprec plan``."""

from __future__ import annotations

from typing import Any

import torch
from hydra.utils import instantiate
from omegaconf import DictConfig, open_dict
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console

from nemo_lowprec.conf.check import check_config
from nemo_lowprec.conf.command_line import one_sentence
from nemo_lowprec.conf.job import own_words
from nemo_lowprec.models import get_preset
from nemo_lowprec.report.plan.choices import PlanChoice
from nemo_lowprec.report.plan.gpu_memory import GIB, memory_here, memory_of
from nemo_lowprec.report.plan.layout import STRATEGIES
from nemo_lowprec.report.plan.plan import Plan, plan_training

_MEGATRON_MODEL = "nemo_lowprec.models.MegatronGPT"
_PLANNED = "single_device, ddp, lowprec_ddp or lowprec_sharded"


def plan_job(cfg: DictConfig, fits: float | str | None = None) -> Plan:
    """Prints bytes of a process by column and traffic of a step; makes no weights and reads no data.

    Args:
        cfg: the composed config.
        fits: as for ``plan_choices``; a sentence then says whether the plan fits.

    Raises:
        ValueError: a bad value, or an unknown number of processes.
    """
    memory = None if fits is None else memory_of(fits)
    found = planned(cfg)
    console = Console()
    console.print(found.table())
    there = memory_here()
    if memory is not None:
        console.print(PlanChoice(found.level.name, found, memory).sentence())
    elif there is not None:
        console.print(f"A GPU of this machine has {there / GIB:.1f} GiB.")
    return found


def planned(cfg: DictConfig, both_choices: bool = True) -> Plan:
    """The plan of a composed config.

    Args:
        cfg: the composed config.
        both_choices: as for ``plan_training``.

    Raises:
        ValueError: a bad value, or an unknown number of processes.
    """
    check_config(cfg, complete=False)
    on_megatron = is_on_megatron(cfg)
    model, precision = build_on_meta(cfg)
    name, options = _strategy(cfg, on_megatron)
    nodes = cfg.trainer.get("num_nodes", 1) if cfg.nodes is None else cfg.nodes
    gpus = cfg.trainer.get("devices", 1) if cfg.gpus is None else cfg.gpus
    if not isinstance(gpus, int):
        raise ValueError(f"A plan needs the number of processes of a node: add gpus=8 (trainer.devices is {gpus!r}).")
    return plan_training(
        model,
        precision,
        nodes,
        gpus,
        name,
        accelerator="cpu" if cfg.trainer.accelerator == "cpu" else "gpu",
        micro_batches=cfg.trainer.accumulate_grad_batches,
        micro_batch_size=cfg.data.get("micro_batch_size"),
        seq_length=cfg.data.get("seq_length"),
        both_choices=both_choices,
        **options,
    )


def is_on_megatron(cfg: DictConfig) -> bool:
    """Whether Megatron-core builds the model of ``cfg``."""
    return bool(cfg.model["_target_"] == _MEGATRON_MODEL)


def build_on_meta(cfg: DictConfig) -> tuple[Any, Any]:
    """Makes the model of a composed config on torch's meta device, and its level.

    A ``MegatronGPT`` is left without parameters.

    Raises:
        ValueError: a bad value, or a vocabulary that neither the model nor the data know.
    """
    if cfg.model.vocab_size is None:
        with open_dict(cfg.model):
            cfg.model.vocab_size = _vocab_size(cfg)
    with own_words():
        model, precision = instantiate(cfg.model), instantiate(cfg.precision)
    if not is_on_megatron(cfg):
        with torch.device("meta"):
            model.configure_model()
    return model, precision


def _vocab_size(cfg: DictConfig) -> int | None:
    """The vocabulary size of the data where the model's architecture has none; None for other architectures.

    Raises:
        ValueError: the data have no vocabulary size yet.
    """
    if "vocab_size" in cfg.model.config or (
        cfg.model.get("preset") is None or "vocab_size" in get_preset(cfg.model.preset).config
    ):
        return None
    try:
        with own_words():
            size: int = instantiate(cfg.data).vocab_size
    except (ValueError, OmegaConfBaseException) as error:
        raise ValueError(
            f"{cfg.model.preset} takes its vocabulary from the data, which do not say: {one_sentence(error)} "
            "Choose data=..., or add model.vocab_size=32000."
        ) from error
    return size


def _strategy(cfg: DictConfig, on_megatron: bool) -> tuple[str, dict[str, Any]]:
    """The name of the strategy in a plan, and the strategy's options that change a plan."""
    chosen: Any = cfg.trainer.get("strategy")
    if isinstance(chosen, str):
        return ("single_device" if chosen == "auto" else chosen), {}
    classes = {
        "nemo_lowprec.strategies.MegatronStrategy": "lowprec_megatron",
        "nemo_lowprec.strategies.LowPrecisionShardedStrategy": "lowprec_sharded",
        "nemo_lowprec.strategies.LowPrecisionDDPStrategy": "lowprec_ddp",
    }
    if chosen["_target_"] not in classes:
        raise ValueError(f"No plan for {chosen['_target_']}. Choose strategy={_PLANNED}.")
    name = classes[chosen["_target_"]]
    if name == "lowprec_megatron" and not on_megatron:
        raise ValueError(
            "A model that Megatron-core does not build has no plan with strategy=lowprec_megatron: each process has "
            f"all of it there. Choose strategy={_PLANNED}, or a model megatron_*."
        )
    return name, {k: chosen[k] for k in STRATEGIES[name] if chosen.get(k) is not None}
