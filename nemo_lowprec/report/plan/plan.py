"""What training takes before there is anything to train: bytes of each process by column, and what it sends a step.

Nothing here knows what a format takes: tensors of the project's own classes are made on torch's meta device and asked.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from rich.table import Table
from torch import nn

from nemo_lowprec.chart import PrecisionLevel
from nemo_lowprec.comm.planned import Message
from nemo_lowprec.engine import Engine
from nemo_lowprec.plugins import LowPrecision
from nemo_lowprec.report.found import format_of
from nemo_lowprec.report.plan.columns import KEPT, Holdings, PlannedColumn
from nemo_lowprec.report.plan.layout import Layout
from nemo_lowprec.report.plan.on_meta import settled_on_meta
from nemo_lowprec.report.plan.sharded import plan_sharded
from nemo_lowprec.report.plan.whole import plan_whole
from nemo_lowprec.report.traffic import sent_bytes

__all__ = ["Plan", "PlannedTraffic", "plan_training"]

_PARTS = ("converted", "rest", "vectors", "all")
_NOT_PLANNED = (
    "Not planned: activations (they depend on batch, sequence length and checkpointing), workspaces, what the "
    "allocator keeps. Not counted as sent: amaxes, flags, buffers of the model."
)


@dataclass(frozen=True)
class PlannedTraffic:
    """What each process sends in a step, of one kind and format.

    Attributes:
        kind: ``all_reduce``, ``all_gather``, ``reduce_scatter`` or ``all_to_all``.
        format: of the elements; FP8 with its exponents.
        bytes: sent (and received) by the algorithm that sends the least, as ``Traffic`` counts them.
    """

    kind: str
    format: str
    bytes: int


@dataclass(frozen=True)
class Plan:
    """Memory and traffic of one process (of the one with the largest shards).

    Attributes:
        level: the row, with its options.
        layout: processes and strategy.
        parameters: of the model, tied ones once.
        columns: what is held, and when. Weight gradients are those right after backward; where the loss is scaled,
            unscaling makes FP16 ones FP32, one by one.
        traffic: what is sent in a step.
        padding: part of the shards that is no parameter.
    """

    level: PrecisionLevel
    layout: Layout
    parameters: int
    columns: tuple[PlannedColumn, ...]
    traffic: tuple[PlannedTraffic, ...]
    padding: float = 0.0

    @property
    def total(self) -> int:
        """Bytes of all columns: at most, since not all of them are at their largest at one time."""
        return sum(c.bytes for c in self.columns)

    @property
    def sent(self) -> int:
        """Bytes of all traffic."""
        return sum(t.bytes for t in self.traffic)

    def column(self, name: str) -> PlannedColumn:
        """A column by its name.

        Raises:
            ValueError: there is none of this name.
        """
        for column in self.columns:
            if column.name == name:
                return column
        raise ValueError(f"This plan has no column {name!r}. It has: {', '.join(c.name for c in self.columns)}.")

    def table(self) -> Table:
        """The plan for people."""
        title = f"Plan of {self.level.name}: {_count(self.parameters)} parameters, {self.layout}"
        table = Table(title=title, title_justify="left", caption=_NOT_PLANNED, caption_justify="left")
        parts = [part for part in _PARTS if any(c.parts.get(part) for c in self.columns)]
        for heading in ("Bytes of a process", "When", "Format"):
            table.add_column(heading)
        for heading in [*(p.capitalize() for p in parts if p != "all"), "Sum"]:
            table.add_column(heading, justify="right")
        shown = [p for p in parts if p != "all"]
        for c in self.columns:
            cells = [_size(c.parts.get(part, 0)) for part in shown]
            table.add_row(c.name, c.when, c.formats.upper(), *cells, _size(c.bytes))
        table.add_section()
        empty = [""] * (len(shown) + 1)  # up to the sum
        table.add_row("All", "at most", *empty, _size(self.total))
        if self.padding >= 0.001:
            table.add_row("Padding of shards", "kept", *empty, f"{self.padding:.1%}")
        if self.traffic:
            table.add_section()
            for t in self.traffic:
                table.add_row(f"Sent: {t.kind}", "a step", t.format.upper(), *empty[1:], _size(t.bytes))
            table.add_row("Sent, all", "a step", *empty, _size(self.sent))
        return table


def plan_training(
    model: nn.Module,
    precision: LowPrecision,
    nodes: int = 1,
    gpus: int = 1,
    strategy: str | None = None,
    *,
    accelerator: str = "gpu",
    micro_batches: int = 1,
    **options: Any,
) -> Plan:
    """Plan the training of ``model`` with Adam or AdamW.

    Args:
        model: any module with its parameters, on whatever device (torch's meta device takes no memory); not changed.
        precision: the level.
        nodes, gpus: machines, and processes of each.
        strategy: ``single_device``, ``ddp``, ``lowprec_ddp`` or ``lowprec_sharded``; None for the first with one
            process and the last with several.
        accelerator: ``gpu`` or ``cpu``: GPUs of one machine exchange gradients through memory of their own.
        micro_batches: backward passes of a step.
        options: of the strategy: ``reshard_after_forward`` and ``shard_size``, or ``bucket_cap_mb``.

    Raises:
        ValueError: a bad value, a model without parameters, or one that is converted already.
        TypeError: an option that the strategy does not take.
    """
    layout = Layout.of(nodes, gpus, strategy, options, accelerator=accelerator, micro_batches=micro_batches)
    twin, engine = settled_on_meta(model, precision.engine, layout.is_sharded)
    padding = 0.0
    if layout.is_sharded:
        engine.check_averaging()
        columns, messages, padding = plan_sharded(twin, engine, layout)
    else:
        columns, messages = plan_whole(twin, engine, layout)
    columns.append(_histories(engine))
    traffic = _by_kind(messages)
    count = sum(p.numel() for p in twin.parameters())
    return Plan(engine.level, layout, count, tuple(columns), traffic, padding)


def _histories(engine: Engine) -> PlannedColumn:
    """Amaxes and scales of GEMM operands, for delayed scaling."""
    held = Holdings()
    if engine.histories is not None:
        for table in (engine.histories.history, engine.histories.amax, engine.histories.scale):
            held.add("converted", table)
    return held.column("Amax history", KEPT)


def _by_kind(messages: list[Message]) -> tuple[PlannedTraffic, ...]:
    put_in: dict[tuple[str, str, int], int] = defaultdict(int)
    for m in messages:
        put_in[m.kind, format_of(m.dtype), m.world] += m.bytes
    sent: dict[tuple[str, str], int] = defaultdict(int)
    for (kind, name, world), size in put_in.items():
        sent[kind, name] += sent_bytes(kind, size, world)
    return tuple(PlannedTraffic(kind, name, size) for (kind, name), size in sorted(sent.items()) if size)


def _count(number: int) -> str:
    return f"{number / 1e9:,.2f} B" if number >= 1e9 else f"{number / 1e6:,.2f} M"


def _size(size: int) -> str:
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= factor:
            return f"{size / factor:,.2f} {unit}"
    return f"{size} B" if size else "–"
