"""The plan of a training: bytes of each process by column, and messages of a step, before any weight is made.

Sizes are those of tensors of the package's own classes on torch's meta device; no format's size is written down.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from rich.table import Table
from torch import nn

from nemo_lowprec.chart import PrecisionLevel
from nemo_lowprec.comm.planned import Message
from nemo_lowprec.engine import Engine
from nemo_lowprec.lines import bytes_text, count_text
from nemo_lowprec.plugins import LowPrecision
from nemo_lowprec.report.plan.activations import Sample, plan_activations
from nemo_lowprec.report.plan.columns import OF_CHART, PlannedColumn, PlannedProcess
from nemo_lowprec.report.plan.layout import MEGATRON, Layout
from nemo_lowprec.report.plan.megatron import plan_megatron
from nemo_lowprec.report.plan.on_meta import copy_on_meta, settle_on_meta
from nemo_lowprec.report.plan.sharded import plan_sharded
from nemo_lowprec.report.plan.tracing import Traced
from nemo_lowprec.report.plan.whole import UNSCALED, plan_whole
from nemo_lowprec.report.tensor_storage import format_of
from nemo_lowprec.report.traffic import sent_bytes

NOT_PLANNED = (
    "Not planned: CUDA graphs, workspaces of libraries, what the allocator keeps. Not counted as sent: amaxes, flags, "
    "buffers of the model."
)
_CHOICES = {True: "with recomputation", False: "without recomputation"}


@dataclass(frozen=True)
class PlannedTraffic:
    """The messages of one kind and format that each process sends in a step.

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
        model: the preset, the model type or the class.
        parameters: of the model, tied ones once.
        columns: what is held, and when. Weight gradients are those right after backward. Activations are those of one
            micro-batch; temporaries are what is alive beside them at the worst point of forward and backward.
        traffic: what is sent in a step.
        padding: elements that pad the shards, over the model's parameters.
        sample: the micro-batch; None where activations are not planned.
        recomputes: whether blocks are recomputed in backward; None where that is no choice of the model.
        peak: bytes at the worst point of forward and backward, where not all columns are at their largest; None where
            activations are not planned.
        other_choice: bytes of (activations, all) with the other choice; None where there is none, or nobody asked.
        without: why activations are not planned; empty where they are.
        stage: the pipeline stage with the largest share; empty without a pipeline.
    """

    level: PrecisionLevel
    layout: Layout
    model: str
    parameters: int
    columns: tuple[PlannedColumn, ...]
    traffic: tuple[PlannedTraffic, ...]
    padding: float = 0.0
    sample: Sample | None = None
    recomputes: bool | None = None
    peak: int | None = None
    other_choice: tuple[int, int] | None = None
    without: str = ""
    stage: str = ""

    @property
    def total(self) -> int:
        """Bytes of all columns at most: where activations are planned at the worst point of a step, else their sum."""
        return sum(c.bytes for c in self.columns) if self.peak is None else self.peak

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
        """The plan for people, in 80 columns."""
        title = f"Plan of {self.model} at {self.level.name}\n{count_text(self.parameters)} parameters, {self.layout}"
        if self.stage:
            title += f"\nthe process with the largest share: {self.stage} of the pipeline"
        if self.sample is not None:
            choice = "" if self.recomputes is None else f", {_CHOICES[self.recomputes]}"
            title += f"\nmicro-batches: {self.sample}{choice}"
        table = Table(title=title, title_justify="left", caption=self.caption(), caption_justify="left")
        for heading, width in (("Bytes of a process", 24), ("When", 14), ("Format", 18)):
            table.add_column(heading, no_wrap=True, min_width=width)
        table.add_column("Size", justify="right", no_wrap=True, min_width=9)
        for c in self.columns:
            if not c.bytes and c.name not in OF_CHART:
                continue
            table.add_row(c.name, c.when, c.formats.upper(), bytes_text(c.bytes))
        table.add_section()
        table.add_row("All", "at most", "", bytes_text(self.total))
        if self.padding >= 0.001:
            table.add_row("Padding of shards", "kept", "", f"{self.padding:.1%}")
        if self.traffic:
            table.add_section()
            for t in self.traffic:
                table.add_row(f"Sent: {t.kind}", "a step", t.format.upper(), bytes_text(t.bytes))
            table.add_row("Sent, all", "a step", "", bytes_text(self.sent))
        return table

    def caption(self) -> str:
        """The sum of the table, and the bytes that are not planned."""
        lines = [f"All: {bytes_text(self.total)} of each process."]
        if self.other_choice is not None:
            activations, total = self.other_choice
            lines.append(
                f"{_CHOICES[not self.recomputes].capitalize()} activations would be {bytes_text(activations)}, and all "
                f"{bytes_text(total)}."
            )
        if self.without:
            lines.append(f"Activations are not planned: {self.without}.")
        return "\n".join([*lines, NOT_PLANNED])


def plan_training(
    model: nn.Module,
    precision: LowPrecision,
    nodes: int = 1,
    gpus: int = 1,
    strategy: str | None = None,
    *,
    accelerator: str = "gpu",
    micro_batches: int = 1,
    micro_batch_size: int | None = None,
    seq_length: int | None = None,
    batch: Any = None,
    both_choices: bool = True,
    **options: Any,
) -> Plan:
    """Plan the training of ``model`` with Adam or AdamW, or with the optimizer that a ``CausalLM`` names.

    Activations are planned for a language model of this package by ``micro_batch_size`` and ``seq_length``, and for any
    other module by an example ``batch``: one forward and backward pass is traced on tensors without memory.

    Args:
        model: any module with its parameters, on whatever device (torch's meta device takes no memory); not changed.
        precision: the level.
        nodes, gpus: machines, and processes of each.
        strategy: ``single_device``, ``ddp``, ``lowprec_ddp``, ``lowprec_sharded``, or ``lowprec_megatron`` for a
            ``MegatronGPT``; None for the first with one process and the last with several (but one) that fits.
        accelerator: ``gpu`` or ``cpu``: GPUs of one machine exchange gradients through memory of their own.
        micro_batches: backward passes of a step.
        micro_batch_size: sequences of a micro-batch.
        seq_length: tokens of a sequence.
        batch: an example of what ``training_step`` takes, on any device; of a module without one, the argument of its
            forward pass, or a tuple or a dict of them. None: the module's ``example_input_array``, where it has one.
        both_choices: whether activations are planned with and without recomputation, where the model has the choice,
            and not only as the model is set up. It takes twice as long.
        options: of the strategy: ``reshard_after_forward`` and ``shard_size``, or ``bucket_cap_mb``, or Megatron-core's
            parallel sizes.

    Raises:
        ValueError: a bad value, a model without parameters, or one that is converted already.
        TypeError: an option that the strategy does not take.
    """
    sample = Sample(micro_batch_size, seq_length, batch)
    by_megatron = callable(getattr(model, "build_chunk", None))  # Megatron-core builds the model
    _check_strategy(type(model).__name__, by_megatron, strategy, accelerator)
    strategy = MEGATRON if by_megatron else strategy
    layout = Layout.of(nodes, gpus, strategy, options, accelerator=accelerator, micro_batches=micro_batches)
    if by_megatron:
        processes, count = plan_megatron(model, precision.megatron(), layout, sample)
    else:
        twin = copy_on_meta(model)
        engine = settle_on_meta(twin, precision.engine, layout.is_sharded)
        process = (plan_sharded if layout.is_sharded else plan_whole)(twin, engine, layout)
        process.columns.append(_histories(engine))
        keeps_weights = engine.amaxes.weights.keeps
        process.activations = plan_activations(model, precision.engine, layout, sample, keeps_weights, both_choices)
        processes, count = [process], sum(p.numel() for p in twin.parameters())
    plans = [_plan_of(process, precision.level, layout, name_of(model), count, sample) for process in processes]
    largest = max(plans, key=lambda plan: plan.total)
    return largest if both_choices else replace(largest, other_choice=None)


def _check_strategy(model: str, by_megatron: bool, strategy: str | None, accelerator: str) -> None:
    """Raise ValueError where Megatron-core builds a model and does not train it, or the other way round."""
    if strategy == MEGATRON and not by_megatron:
        raise ValueError(
            f"{model} is not built by Megatron-core, and has no plan with strategy='{MEGATRON}': each "
            "process has all of it, as with strategy='lowprec_ddp'. Plan that one, or a MegatronGPT."
        )
    if by_megatron and strategy not in (None, MEGATRON):
        raise ValueError(
            f"{model} is trained with strategy='{MEGATRON}', and not with {strategy!r}. Leave the "
            "strategy out, or plan a CausalLM."
        )
    if by_megatron and accelerator != "gpu":
        raise ValueError(f"accelerator={accelerator!r}: Megatron-core trains on GPUs. Use accelerator='gpu'.")


def _plan_of(
    process: PlannedProcess, level: PrecisionLevel, layout: Layout, model: str, count: int, sample: Sample
) -> Plan:
    """The plan of ``process``, with its activations where they are planned, or the reason for which they are not."""
    plan = Plan(
        level, layout, model, count, tuple(process.columns), _by_kind(process.messages), process.padding,
        stage=process.stage,
    )  # fmt: skip
    if isinstance(process.activations, str):
        return replace(plan, without=process.activations)
    there = sum(c.bytes for c in plan.columns if c.when != "at most" or c.name == UNSCALED)

    def peak(traced: Traced) -> int:
        return there + max(0, *map(sum, zip(traced.alive, process.beside, strict=True)))

    (recomputes, traced), *others = process.activations.items()
    kept = PlannedColumn("Activations", "after forward", Counter(all=traced.kept), traced.formats)
    beside = PlannedColumn("Temporaries", "at most", Counter(all=max(0, max(traced.alive) - traced.kept)))
    return replace(
        plan, columns=(*plan.columns, kept, beside), peak=peak(traced), sample=sample, recomputes=recomputes,
        other_choice=(others[0][1].kept, peak(others[0][1])) if others else None,
    )  # fmt: skip


def name_of(model: nn.Module) -> str:
    """The preset or the model type of a language model of this package; else the class."""
    known = vars(model).get("_hparams") or {}
    return str(known.get("preset") or known.get("model_type") or type(model).__name__)


def _histories(engine: Engine) -> PlannedColumn:
    """Amaxes and scales of GEMM operands, for delayed scaling."""
    held = PlannedColumn("Amax history", "kept")
    histories = engine.amaxes.histories
    if histories is not None:
        for table in (histories.history, histories.amax, histories.scale):
            held.add("converted", table)
    return held


def _by_kind(groups: Mapping[str, list[Message]]) -> tuple[PlannedTraffic, ...]:
    found = []
    for group, messages in groups.items():
        put_in: Counter[tuple[str, str, int]] = Counter()
        for m in messages:
            put_in[m.kind, format_of(m.dtype), m.world] += m.bytes
        sent: Counter[tuple[str, str]] = Counter()
        for (kind, name, world), size in put_in.items():
            sent[kind, name] += sent_bytes(kind, size, world)
        suffix = f", {group}" if group else ""
        found += [PlannedTraffic(kind + suffix, name, size) for (kind, name), size in sorted(sent.items()) if size]
    return tuple(found)
