"""The findings of an audit: for each column, the format that a level declares beside the format that was found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table

from nemo_lowprec.chart import PrecisionLevel
from nemo_lowprec.report.tensor_storage import Bytes

_AT = {
    "Computation (GEMM)": "operands, forward and backward",
    "Comm": "gradients sent in a step",
    "Weight": "after the step",
    "Master weight": "after the step",
    "Weight gradient": "after backward, before unscaling",
    "Optimizer states": "after the step",
}


class LevelDiffersError(AssertionError):
    """A column was found in another format than the level declares.

    Attributes:
        exit_status: of a command that raises the error.
    """

    exit_status = 1


@dataclass
class Finding:
    """One column of one part of a model: what the level declares and what was found.

    Attributes:
        column: title as in the chart.
        part: a part of ``parts.py``. For gradients on the wire ``matrices`` and ``vectors``, or ``all``.
        declared, observed: formats, ``+`` between several, ``–`` for none.
        bytes_per_param: bytes found over the elements of this part; None where nothing is stored. On the wire, bytes
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
        level: the row.
        findings: by column and part, in the order in which they are printed.
        total_bytes: of all parts, by column; and of tensors that no column of the chart names.
        places: the point of the step at which a column was read, for columns that were not read where ``_AT`` says.
    """

    level: PrecisionLevel
    findings: list[Finding] = field(default_factory=list)
    total_bytes: dict[str, int] = field(default_factory=dict)
    places: Mapping[str, str] = field(default_factory=dict)

    def add(self, column: str, part: str, declared: str | None, found: Bytes, over: int) -> None:
        """Add what a column stores of a part; no finding where this process has no elements (``over``) of the part."""
        if over:
            self.findings.append(Finding(column, part, declared or "–", found.formats, found.per_param(over)))
        self.total_bytes[column] = self.total_bytes.get(column, 0) + found.total

    @property
    def agrees(self) -> bool:
        """Whether every column is what the chart says."""
        return bool(self.findings) and all(f.agrees for f in self.findings)

    def check(self) -> None:
        """Raise LevelDiffersError, naming column, part, declared and found format, where a finding differs."""
        differing = [f for f in self.findings if not f.agrees]
        if differing or not self.findings:
            found = "; ".join(f"{f.column} of {f.part}: {f.declared} declared, {f.observed} found" for f in differing)
            raise LevelDiffersError(f"{self.level.name} differs from the chart. {found or 'Nothing was found'}.")

    def to_json(self) -> dict[str, Any]:
        """``record`` with the name of the level and whether all columns agree."""
        return {"level": self.level.name, "agrees": self.agrees, **self.record()}

    def record(self) -> dict[str, Any]:
        """The report as plain values: ``findings``, ``total_bytes`` by column, and the ``places`` of columns."""
        return {
            "findings": [{**asdict(finding), "agrees": finding.agrees} for finding in self.findings],
            "total_bytes": dict(self.total_bytes),
            "places": {**_AT, **self.places},
        }

    def table(self) -> Group:
        """The report for people, in 80 columns: the findings; then where and how large each column was found."""
        found = Table(title=f"Audit of {self.level.name}", title_justify="left", box=SIMPLE_HEAD)
        for title in ("Column", "Of", "Declared", "Found"):
            found.add_column(title)
        found.add_column("Bytes/param", justify="right", no_wrap=True)
        found.add_column("")
        for f in self.findings:
            size = "–" if f.bytes_per_param is None else f"{f.bytes_per_param:.2f}"
            formats = f.declared.upper(), f.observed.upper()
            found.add_row(f.column, f.part, *formats, size, "ok" if f.agrees else "DIFFERS")
        places = {**_AT, **self.places}
        totals = Table(box=SIMPLE_HEAD)
        totals.add_column("Column")
        totals.add_column("Looked at")
        totals.add_column("All bytes", justify="right", no_wrap=True)
        for name in dict.fromkeys([*(f.column for f in self.findings), *self.total_bytes]):
            total = self.total_bytes.get(name)
            totals.add_row(name, places.get(name, ""), "" if total is None else f"{total / 2**20:,.1f} MiB")
        return Group(found, totals)
