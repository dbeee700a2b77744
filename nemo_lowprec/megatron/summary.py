"""What the Trainer shows at the start of a run on Megatron-core: the level, and the settings it became."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from nemo_lowprec.megatron.parallel import ParallelLayout
from nemo_lowprec.megatron.settings import MegatronSettings

__all__ = ["settings_tables"]


def settings_tables(
    settings: MegatronSettings, title: object, layout: ParallelLayout, overlaps: Mapping[str, Any]
) -> list[Text | Table]:
    """The chart's row, then the fields of Megatron-core's three configs."""
    row = Table(show_header=False, box=SIMPLE_HEAD)
    for column, cell in settings.level.columns(settings.fp8_weights).items():
        if column != "Level":
            row.add_row(column, cell)
    fields = Table("Megatron-core", "Field", "Value", box=SIMPLE_HEAD)
    alone = ParallelLayout().fields()
    sizes = {name: value for name, value in layout.fields().items() if value != alone.get(name)}
    for config, values in (
        ("TransformerConfig", {**settings.model, **sizes}),
        ("OptimizerConfig", settings.optimizer),
        ("DistributedDataParallelConfig", {**settings.ddp, **overlaps}),
    ):
        for index, (name, value) in enumerate(sorted(values.items())):
            fields.add_row("" if index else config, name, _shown(value))
    return [Text(f"Precision: {title}", style="bold"), row, fields]


def _shown(value: Any) -> str:
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else str(value)
