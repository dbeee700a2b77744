"""``examine``: the levels that this machine runs, and whether FP8 pays for a model on it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table
from rich.text import Text
from torch import nn

from nemo_lowprec.lines import bytes_text, pair_lines, text_lines
from nemo_lowprec.plugins import LowPrecision
from nemo_lowprec.report.doctor.gemms import GemmReport, time_gemms
from nemo_lowprec.report.doctor.levels import ENGINES, LevelHere, levels_here
from nemo_lowprec.report.doctor.machine import Machine, look_at_machine
from nemo_lowprec.report.plan.activations import Sample


@dataclass(frozen=True)
class DoctorReport:
    """A machine, the levels that it runs, and the times of a model's GEMMs.

    Attributes:
        machine: GPUs, driver, libraries and packages.
        levels: every level of the chart.
        gemms: times of a model's GEMMs; None without a model.
    """

    machine: Machine
    levels: tuple[LevelHere, ...]
    gemms: GemmReport | None = None

    def to_json(self) -> dict[str, Any]:
        """The report as plain values, under the names of its attributes; GEMMs also with ``ratio``."""
        found = asdict(self)
        if self.gemms is not None:
            found["gemms"]["ratio"] = self.gemms.ratio
            for shape, time in zip(found["gemms"]["times"], self.gemms.times, strict=True):
                shape["ratio"] = time.ratio
        return found

    def table(self) -> Group:
        """The report for people, in 80 columns."""
        machine = _text([*pair_lines(_machine_pairs(self.machine), indent=0), ""])
        return Group(machine, *_levels(self.levels), *([] if self.gemms is None else _gemms(self.gemms)))


def examine(
    model: nn.Module | None = None,
    precision: LowPrecision | None = None,
    micro_batch_size: int | None = None,
    seq_length: int | None = None,
    batch: Any = None,
) -> DoctorReport:
    """Look at this machine and, with a model, measure its GEMMs on the current GPU.

    Args:
        model: see ``time_gemms``; None for a report on the machine alone.
        precision: the level whose FP8 GEMMs are measured; given with ``model``.
        micro_batch_size, seq_length: of a language model of this package.
        batch: an example batch for any other model, as for ``plan_training``.

    Raises:
        ValueError: a model without a level, or the other way round; see ``time_gemms``.
    """
    if (model is None) != (precision is None):
        raise ValueError("model and precision go together: give both, or neither.")
    levels = tuple(levels_here())  # imports Transformer Engine, which has to come before cuDNN is loaded
    gemms = None
    if model is not None and precision is not None:
        gemms = time_gemms(model, precision, Sample(micro_batch_size, seq_length, batch))
    return DoctorReport(look_at_machine(), levels, gemms)


def _machine_pairs(machine: Machine) -> list[tuple[str, str]]:
    gpus = [f"{g.name}, compute capability {g.capability}, {bytes_text(g.bytes)}" for g in machine.gpus]
    counts = {gpu: gpus.count(gpu) for gpu in gpus}
    pairs = [("GPU", f"{count} × {gpu}") for gpu, count in counts.items()] or [("GPU", "none that torch finds")]
    libraries = {"driver": machine.driver, "CUDA": machine.cuda, "cuDNN": machine.cudnn, "NCCL": machine.nccl}
    pairs += [(name, found or "–") for name, found in libraries.items()]
    packages = machine.packages.items()
    return pairs + [(name, found or f"not installed. For {machine.missing[name]}") for name, found in packages]


def _levels(levels: tuple[LevelHere, ...]) -> list[Any]:
    table = Table(box=SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    for heading in ("\nLevel", "one GPU\nor DDP", "lowprec_\nsharded", "lowprec_\nmegatron"):
        table.add_column(heading, no_wrap=True)
    notes: dict[str, int] = {}

    def mark(note: str) -> str:
        return f" [{notes.setdefault(note, len(notes) + 1)}]" if note else ""

    for one in levels:
        backend = f"{one.backend or 'no'}{mark(one.note)}"
        others = (one.engines[name] for name in ENGINES[1:])
        table.add_row(one.level, backend, *(f"no{mark(problem)}" if problem else "yes" for problem in others))
    table.columns[0].min_width = 38
    lines = [line for note, number in notes.items() for line in text_lines(f"[{number}] {note}", hanging=4)]
    return [table, "", _text([*lines, ""])]


def _gemms(gemms: GemmReport) -> list[Any]:
    half = gemms.half.upper()
    title = f"GEMMs of one layer, forward and backward, at {gemms.level} with {gemms.sample}:"
    table = Table(box=SIMPLE_HEAD, show_edge=False)
    for heading in ("Layers", "Rows", "In", "Out", f"{half}, µs", "FP8, µs", f"FP8/{half}"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("FP8")
    for t in gemms.times:
        sizes = (f"{t.layers:,}", f"{t.rows:,}", f"{t.ins:,}", f"{t.outs:,}")
        if t.ratio is None:
            table.add_row(*sizes)
        else:
            table.add_row(*sizes, f"{t.half:,.1f}", f"{t.fp8:,.1f}", f"{t.ratio:.2f}", _verdict(t.ratio))
    if gemms.ratio is None:
        said = f"No GEMM was measured: {gemms.why}."
    else:
        said = (
            f"FP8 {_verdict(gemms.ratio)}: with quantization these GEMMs take {gemms.ratio:.2f} × {half}'s time "
            f"(backend {gemms.backend})."
        )
    return [_text([*text_lines(title), ""]), table, "", _text(text_lines(said))]


def _verdict(ratio: float) -> str:
    return "pays" if ratio < 1 else "does not pay"


def _text(lines: list[str]) -> Text:
    """Lines as they are: rich would read ``[te]`` as markup."""
    return Text("\n".join(lines))
