"""``inspect_checkpoint``: level, formats and bytes by column, and amax histories of one checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table
from rich.text import Text
from torch import Tensor

from nemo_lowprec.chart import CHART, PrecisionLevel
from nemo_lowprec.compat.tensors import tree_leaves
from nemo_lowprec.compute.choice import CHOICE
from nemo_lowprec.lines import abbreviate, bytes_text, count_text, pair_lines, text_lines
from nemo_lowprec.models.export import source_of
from nemo_lowprec.report.inspection.amaxes import AmaxHistory, histories_of, options_of
from nemo_lowprec.report.inspection.heatmap import heatmaps
from nemo_lowprec.report.inspection.saved import (
    GRADIENT,
    MASTER,
    MEGATRON,
    STATES,
    WEIGHT,
    SavedCheckpoint,
    SavedTensor,
    open_saved,
)

_HISTORIES, _REST = "Amax histories, scales", "Everything else"
_ORDER = (WEIGHT, MASTER, GRADIENT, STATES)


@dataclass(frozen=True)
class SavedColumn:
    """One column of the chart, or one other part of a checkpoint, as saved.

    Attributes:
        column: title as in the chart; or the amax histories, or everything else.
        part: the moment of optimizer states, such as ``exp_avg``; empty for other columns.
        formats: of the saved tensors, ``+`` between several; ``–`` for none.
        elements: of the saved tensors, with buffers for weights. Tied weights count once in a file, and under each
            of their names in a folder. None where nothing counts them.
        bytes: in the checkpoint.
        in_training: the format that the level declares for training; ``–`` for none, empty where the chart has none.
    """

    column: str
    part: str
    formats: str
    elements: int | None
    bytes: int
    in_training: str


@dataclass(frozen=True)
class Inspection:
    """The content of one checkpoint.

    Attributes:
        path: of the file or the folder.
        form: kind of file or folder.
        level: name of the level; None for a checkpoint that names no level.
        options: arguments of the level that the checkpoint shows; others are not saved.
        model: preset, model type or class where the hyperparameters name it; else empty.
        epoch, step: Lightning's counters; None where they are not saved.
        skipped_steps: steps that were skipped for a gradient that was not finite; None where they are not saved.
        loss_scale: scale and counters of FP16 loss scaling; empty without it.
        left: layers that ``convert="auto"`` has left in half precision, with the reason.
        source: the column of the level that the weights were saved from.
        columns: in the order of the chart, then histories, then everything else.
        bytes: of the file, or of all files of the folder.
        histories: amax histories, in the model's order; empty without delayed scaling.
    """

    path: str
    form: str
    level: str | None
    options: Mapping[str, Any]
    model: str
    epoch: int | None
    step: int | None
    skipped_steps: int | None
    loss_scale: Mapping[str, Any]
    left: Mapping[str, str]
    source: str
    columns: tuple[SavedColumn, ...]
    bytes: int
    histories: Sequence[AmaxHistory]

    def to_json(self) -> dict[str, Any]:
        """The inspection as plain values, under the names of its attributes."""
        return asdict(self)

    def table(self, all_rows: bool = False) -> Group:
        """The inspection for people, in 80 columns.

        Args:
            all_rows: see ``heatmaps``.
        """
        table = Table(box=SIMPLE_HEAD, show_edge=False)
        for heading in ("Saved", "Format", "Elements", "Bytes", "In training"):
            table.add_column(heading, justify="right" if heading in ("Elements", "Bytes") else "left", no_wrap=True)
        for c in self.columns:
            elements = "" if c.elements is None else f"{c.elements:,}"
            name = f"{c.column}: {c.part}" if c.part else c.column
            table.add_row(name, c.formats.upper(), elements, bytes_text(c.bytes), c.in_training)
        table.add_section()
        table.add_row("All", "", "", bytes_text(self.bytes), "")
        lines = [*pair_lines(self._pairs(), indent=0), ""]
        source = text_lines(f"Weights were saved from: {self.source}.")
        maps: list[Any] = [heatmaps(self.histories, all_rows)] if self.histories else self._without_histories()
        # As text: rich would read brackets of a path as markup.
        return Group(Text("\n".join(lines)), table, "", Text("\n".join(source)), "", *maps)

    def _pairs(self) -> list[tuple[str, str]]:
        options = ", ".join(f"{name}={value!r}" for name, value in self.options.items())
        weights = sum(c.elements or 0 for c in self.columns if c.column == WEIGHT)
        pairs = [
            ("Checkpoint", f"{self.path}, {self.form}"),
            ("Level", f"{self.level}({options})" if self.level else "none: plain Lightning's, or weights only"),
            ("Model", f"{self.model + ', ' if self.model else ''}{count_text(weights)} elements"),
        ]
        if self.step is not None:
            skipped = f", {self.skipped_steps:,} skipped" if self.skipped_steps is not None else ""
            epoch = "" if self.epoch is None else f", epoch {self.epoch}"
            pairs.append(("Step", f"{self.step:,}{epoch}{skipped}"))
        if self.loss_scale:
            pairs.append(("Loss scale", f"{self.loss_scale['scale']:,.0f}"))
        if self.left:
            pairs.append(("Left in half", f"{len(self.left)} layers by convert='auto': {abbreviate(self.left)}"))
        return pairs

    def _without_histories(self) -> list[str]:
        if self.level is None:
            return []
        scaling = CHART[self.level].scaling if self.level in CHART else "delayed"
        reasons = {None: "its GEMMs are in half precision", "delayed": "no layer has run in FP8"}
        why = reasons.get(scaling, f"its scaling is {scaling}")
        return text_lines(f"No amax histories: {self.level} has none here, as {why}.")


def inspect_checkpoint(path: str | Path) -> Inspection:
    """Inspect a checkpoint of any level, without a GPU, a process group or the model's class.

    Weights and optimizer states are not read: their sizes come from the file's index.

    Args:
        path: a ``.ckpt`` file, or a folder that ``lowprec_sharded`` or ``lowprec_megatron`` wrote.

    Raises:
        ValueError: ``path`` does not exist, is incomplete or damaged, is no checkpoint of a LightningModule, or holds
            objects that may run code.
    """
    saved = open_saved(Path(path))
    name = saved.state.get("level")
    row = CHART.get(str(name))
    options = options_of(saved.state)
    if row is not None and row.half and "loss_scale" in saved.state:
        options["half"] = "fp16"
    hparams = saved.rest.get("hyper_parameters")
    hparams = hparams if isinstance(hparams, Mapping) else {}
    columns = [*_columns(saved, row), *_others(saved)]
    return Inspection(
        path=str(path),
        form=saved.form,
        level=name,
        options=options,
        model=str(hparams.get("preset") or hparams.get("model_type") or ""),
        epoch=saved.rest.get("epoch"),
        step=saved.rest.get("global_step"),
        skipped_steps=saved.state.get("skipped_steps"),
        loss_scale=saved.state.get("loss_scale", {}),
        left=saved.state.get(CHOICE, {}).get("left", {}),
        source=_source(saved, row),
        columns=tuple(columns),
        bytes=saved.bytes,
        histories=histories_of(saved.state),
    )


def _source(saved: SavedCheckpoint, row: PrecisionLevel | None) -> str:
    if saved.form == MEGATRON:
        return "the weights of the GEMMs; master weights, where the level has some, are saved beside them"
    return source_of(row)


def _columns(saved: SavedCheckpoint, row: PrecisionLevel | None) -> list[SavedColumn]:
    def place(tensor: SavedTensor) -> tuple[int, str]:
        return _ORDER.index(tensor.column), tensor.part

    columns = []
    for (index, part), group in groupby(sorted(saved.tensors, key=place), key=place):
        tensors, column = list(group), _ORDER[index]
        formats = "+".join(sorted({t.format for t in tensors}))
        elements, size = sum(t.elements for t in tensors), sum(t.bytes for t in tensors)
        columns.append(SavedColumn(column, part, formats, elements, size, _in_training(row, column, part)))
    return columns


def _in_training(row: PrecisionLevel | None, column: str, part: str) -> str:
    if row is None or part == "other":
        return ""
    if column == STATES:
        return row.optimizer_states[part == "exp_avg_sq"].upper()
    if column == WEIGHT:
        return f"{row.weight.upper()}{' or FP8' if row.fp8_params else ''}"
    return row.columns()[column]


def _others(saved: SavedCheckpoint) -> list[SavedColumn]:
    """The histories where there are some, and everything else."""
    leaves = tree_leaves([saved.state.get("fp8"), saved.state.get("te")])
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    size = sum(t.nbytes for t in tensors)
    rest = saved.bytes - size - sum(t.bytes for t in saved.tensors)
    found = [SavedColumn(_REST, "", "–", None, rest, "")]
    if tensors:
        found.insert(0, SavedColumn(_HISTORIES, "", "fp32", sum(t.numel() for t in tensors), size, ""))
    return found
