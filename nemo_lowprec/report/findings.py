"""What an audit comes to: declared beside observed, column by column."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rich.table import Table

from nemo_lowprec.chart import PrecisionLevel

__all__ = ["AuditReport", "Finding"]

_AT = {
    "Computation (GEMM)": "operands, forward and backward",
    "Comm": "gradients sent in a step",
    "Weight": "after the step",
    "Master weight": "after the step",
    "Weight gradient": "after backward, before unscaling",
    "Optimizer states": "after the step",
}


@dataclass
class Finding:
    """One column: what the level declares and what was found.

    Attributes:
        column: title as in the chart.
        part: ``converted`` weights (all linear weights at a level that converts none), the ``rest``, ``vectors`` (fewer
            than two dimensions) at a level that keeps these apart, and ``kept FP32``, what torch computes with in FP32
            only (batch norms, parametrizations; at the MS-AMP levels RNNs). For gradients on the wire, ``matrices`` and
            ``vectors``, or ``all``.
        declared, observed: formats, ``+`` between several, ``–`` for none.
        bytes_per_param: bytes found over the parameters of this part; None where nothing is stored. On the wire, bytes
            that each process sends in a step.
    """

    column: str
    part: str
    declared: str
    observed: str
    bytes_per_param: float | None

    @property
    def agrees(self) -> bool:
        """Whether the observation is what was declared."""
        return self.declared == self.observed


@dataclass
class AuditReport:
    """All columns of one level.

    Attributes:
        places: where the columns were looked at, for those that were not looked at as ever.
    """

    level: PrecisionLevel
    findings: list[Finding] = field(default_factory=list)
    total_bytes: dict[str, int] = field(default_factory=dict)
    places: Mapping[str, str] = field(default_factory=dict)

    @property
    def agrees(self) -> bool:
        """Whether every column is what the chart says."""
        return bool(self.findings) and all(f.agrees for f in self.findings)

    def table(self) -> Table:
        """The report for people."""
        table = Table(title=f"Audit of {self.level.name}", title_justify="left")
        for title in ("Column", "Of", "Declared", "Observed", "Bytes/param", "Looked at", ""):
            table.add_column(title)
        for f in self.findings:
            size = "–" if f.bytes_per_param is None else f"{f.bytes_per_param:.2f}"
            mark = "ok" if f.agrees else "DIFFERS"
            place = {**_AT, **self.places}[f.column]
            table.add_row(f.column, f.part, f.declared.upper(), f.observed.upper(), size, place, mark)
        for name, total in self.total_bytes.items():
            table.add_row(f"{name}, all", "", "", "", f"{total / 2**20:,.1f} MiB", "", "")
        return table
