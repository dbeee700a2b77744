"""The Hydra job of ``nemo-lowprec doctor`` with a model."""

from __future__ import annotations

import json
from typing import TextIO

from omegaconf import DictConfig
from rich.console import Console

from nemo_lowprec.conf.check import check_config
from nemo_lowprec.conf.plan_job import build_on_meta, is_on_megatron
from nemo_lowprec.report.doctor import DoctorReport, examine


def doctor_job(cfg: DictConfig, json_to: TextIO | None = None) -> DoctorReport:
    """Looks at this machine, measures the model's GEMMs, and prints both.

    Args:
        cfg: the composed config; its level is the one whose FP8 GEMMs are measured.
        json_to: where the report is written as one line of JSON; None prints it as tables.

    Raises:
        ValueError: a bad value, a level without FP8, or a model that Megatron-core builds.
    """
    check_config(cfg, complete=False)
    if is_on_megatron(cfg):
        raise ValueError(
            f"doctor reads the shapes of a CausalLM's GEMMs, and Megatron-core builds {cfg.model.preset} here. Use the "
            "same model without megatron_: its GEMMs are the same on one GPU."
        )
    model, precision = build_on_meta(cfg)
    found = examine(model, precision, cfg.data.get("micro_batch_size"), cfg.data.get("seq_length"))
    if json_to is not None:
        print(json.dumps(found.to_json()), file=json_to, flush=True)
    else:
        Console().print(found.table())
    return found
