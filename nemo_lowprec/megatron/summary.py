"""What the Trainer shows at the start of a run on Megatron-core: the level, the settings it became, and the layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text
from torch import nn

from nemo_lowprec.compute import Conversion, describe_layers
from nemo_lowprec.megatron.parallel import ParallelLayout
from nemo_lowprec.megatron.settings import MegatronSettings
from nemo_lowprec.options import Recipe

if TYPE_CHECKING:
    from nemo_lowprec.megatron.own_layers import OwnLayers

__all__ = ["layers_tables", "settings_tables"]


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


def layers_tables(
    chunks: Sequence[nn.Module], settings: MegatronSettings, recipe: Recipe | None, own_layers: OwnLayers | None
) -> tuple[list[Table], str | None]:
    """The layers and matrices of this process's parts, and what to warn of; nothing at a level without FP8.

    Args:
        own_layers: of a module whose layers this package has converted; None for Transformer Engine's.
    """
    if recipe is None:
        return [], None
    if own_layers is not None:
        conversion, how = own_layers.conversion, f"{recipe.scaling}, {own_layers.backend.name}"
    else:
        conversion, how = Conversion(), recipe.scaling
        start, end = (settings.model.get(f"num_layers_at_{side}_in_bf16", 0) for side in ("start", "end"))
        how += f"; the first {start} and the last {end} layers in half precision" if start or end else ""
    parts = chunks[0] if len(chunks) == 1 else nn.ModuleList(chunks)
    table, problem = describe_layers(parts, conversion, settings.level, how)
    return [table], problem


def _shown(value: Any) -> str:
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else str(value)
