"""The tables that the Trainer prints at the start of a run on Megatron-core: the settings, and the layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from nemo_lowprec.compute import Computation, Conversion, describe_layers
from nemo_lowprec.lines import pair_lines
from nemo_lowprec.megatron.parallel import ParallelLayout
from nemo_lowprec.megatron.settings import MegatronSettings


def settings_table(settings: MegatronSettings, layout: ParallelLayout, overlaps: Mapping[str, Any]) -> str:
    """The fields of Megatron-core's three configs that the level and the layout have set."""
    alone = ParallelLayout().fields()
    sizes = {name: value for name, value in layout.fields().items() if value != alone.get(name)}
    lines = []
    for config, values in (
        ("TransformerConfig", {**settings.model, **sizes}),
        ("OptimizerConfig", settings.optimizer),
        ("DistributedDataParallelConfig", {**settings.ddp, **overlaps}),
    ):
        fields = ((name, _shown(value)) for name, value in sorted(values.items()))
        lines += [f"  {config} of Megatron-core", *pair_lines(fields, indent=4)]
    return "\n".join(lines)


def layers_table(
    chunks: Sequence[nn.Module], settings: MegatronSettings, converted: Computation | None
) -> tuple[str | None, str | None]:
    """A table of the layers and matrices of this process's parts, and a warning; None for either that is not needed.

    A level without FP8 has no table. ``converted`` is None for parts that Megatron-core has built.
    """
    recipe = settings.options.recipe
    if recipe is None:
        return None, None
    if converted is not None:
        return converted.describe() or (None, None)
    start, end = (settings.model.get(f"num_layers_at_{side}_in_bf16", 0) for side in ("start", "end"))
    how = recipe.scaling
    how += f"; the first {start} and the last {end} layers in half precision" if start or end else ""
    parts = chunks[0] if len(chunks) == 1 else nn.ModuleList(chunks)
    return describe_layers(parts, Conversion(), settings.level, how)


def _shown(value: Any) -> str:
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else str(value)
