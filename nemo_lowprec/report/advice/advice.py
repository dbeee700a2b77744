"""The advice: levels in their order, layers to keep back, and the line to paste."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from nemo_lowprec.lines import bytes_text, pair_lines, signed_bytes_text, text_lines
from nemo_lowprec.report.advice.layers import KeptBack
from nemo_lowprec.report.advice.paste import hydra_line, python_line, with_skip
from nemo_lowprec.report.bounds import MAX_SATURATION, MAX_UNDERFLOW, MIN_SQNR
from nemo_lowprec.report.plan.choices import PlanChoice
from nemo_lowprec.report.plan.columns import OF_CHART

_SHOWN = 12  # layers in a list for people


@dataclass(frozen=True)
class LevelAdvice:
    """Memory, time and layers to keep back at one level.

    Attributes:
        choice: its plan, bytes beyond the plan, and the GPU's memory.
        options: arguments of the level.
        kept_back: names of the layers to keep in half precision; none without FP8 GEMMs.
        skip: names and globs for ``skip`` that stand for these layers.
        share: of the layers that the level may convert, those kept back: 0 to 1.
        ms: expected time of a step; None where no time was measured.
    """

    choice: PlanChoice
    options: dict[str, Any] = field(default_factory=dict)
    kept_back: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()
    share: float = 0.0
    ms: float | None = None

    @property
    def name(self) -> str:
        """The level's name, with its options where it has any."""
        return self.choice.name

    @property
    def python(self) -> str:
        """The argument of a Trainer: ``plugins=bf16_with_fp8_mixed(skip=["head"])``."""
        return python_line(self.choice.plan.level.name, with_skip(self.options, self.skip))

    @property
    def hydra(self) -> str:
        """The same as overrides of ``nemo-lowprec pretrain``, as a shell reads them."""
        return hydra_line(self.choice.plan.level.name, with_skip(self.options, self.skip))

    @property
    def _cost(self) -> tuple[float, ...]:
        """The sort key of levels: fit, then time; without times FP8 GEMMs, few layers kept back, precise storage."""
        plan = self.choice.plan
        has_fp8 = plan.level.has_fp8 and self.share <= 0.5
        without = (not has_fp8, self.share, -sum(plan.column(name).bytes for name in OF_CHART))
        return (not self.choice.fits, *(without if self.ms is None else (self.ms,)))


@dataclass(frozen=True)
class Advice:
    """Which level a model should take on a GPU.

    Attributes:
        levels: the levels that can run, the recommended one first.
        kept_back: by way of scaling the layers that cross a bound.
        sqnr: by way of scaling and operand the lowest SQNR of a layer, dB; empty where no operand was looked at.
        notes: sentences about what was measured, and what was not.
        refused: by level, the sentence with which it refuses the model.
    """

    levels: tuple[LevelAdvice, ...]
    kept_back: dict[str, list[KeptBack]] = field(default_factory=dict)
    sqnr: dict[str, dict[str, float]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    refused: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, levels: Sequence[LevelAdvice], **rest: object) -> Advice:
        """The advice of ``levels``, sorted: levels that fit come first, by time; by storage where times are unknown."""
        return cls(tuple(sorted(levels, key=lambda level: level._cost)), **rest)  # type: ignore[arg-type]

    @property
    def best(self) -> LevelAdvice | None:
        """The recommended level; None where none fits."""
        return next((level for level in self.levels if level.choice.fits), None)

    def level(self, name: str) -> LevelAdvice:
        """A level by its name.

        Raises:
            ValueError: it is not among ``levels``.
        """
        for level in self.levels:
            if level.name == name:
                return level
        raise ValueError(f"This advice has no level {name!r}. It has: {', '.join(one.name for one in self.levels)}.")

    def table(self) -> Table:
        """The levels for people; 80 columns where no level has options."""
        first = self.levels[0].choice
        title = f"Advice for {first.plan.model}"
        if first.memory is not None:
            title += f" on a GPU of {bytes_text(first.memory)}"
        table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
        columns: dict[str, list[str]] = {
            "Memory": [bytes_text(level.choice.total) for level in self.levels],
            "Left": ["" if (left := level.choice.left) is None else signed_bytes_text(left) for level in self.levels],
            "ms a step": ["" if level.ms is None else f"{level.ms:,.1f}" for level in self.levels],
            "Kept back": [str(len(level.kept_back) or "") for level in self.levels],
        }
        columns = {heading: cells for heading, cells in columns.items() if any(cells)}
        table.add_column("Level", no_wrap=True)
        for heading in columns:
            table.add_column(heading, justify="right", no_wrap=True)
        for level, *cells in zip(self.levels, *columns.values(), strict=True):
            table.add_row(level.name, *cells)
        return table

    def lines(self) -> list[str]:
        """The lines below the table: errors of operands, layers to keep back, notes, and the line to paste."""
        found = []
        if self.sqnr:
            found.append("Lowest SQNR of a layer, dB")
            found += pair_lines(
                (scaling, ", ".join(f"{kind.replace('_', ' ')} {value:.1f}" for kind, value in operands.items()))
                for scaling, operands in self.sqnr.items()
            )
        found += self._kept_lines()
        for note in self.notes:
            found += text_lines(note)
        for level, reason in self.refused.items():
            found += text_lines(f"Refused: {level}. {reason}", hanging=2)
        best = self.best
        if best is None:
            return [*found, "No level fits. Plan it on several GPUs: nemo-lowprec plan gpus=2,4,8."]
        return [*found, "Take", f"  {best.python}", f"  {best.hydra}"]

    def _kept_lines(self) -> list[str]:
        """The layers to keep back, the layer furthest beyond a bound first."""
        layers: dict[str, list[KeptBack]] = {}
        for kept in self.kept_back.values():
            for one in kept:
                layers.setdefault(one.layer, []).append(one)
        if not layers:
            return []

        worst = sorted(layers.items(), key=lambda item: -max(one.beyond for one in item[1]))
        lines = text_lines(
            f"Layers to keep back: SQNR below {MIN_SQNR:g} dB, underflow above {MAX_UNDERFLOW:g} %, or saturation "
            f"above {MAX_SATURATION:g} %"
        )
        lines += pair_lines(
            (layer, f"{', '.join(one.scaling for one in ones)} ({ones[0].reason})") for layer, ones in worst[:_SHOWN]
        )
        return lines + [f"  and {len(worst) - _SHOWN} more"] * (len(worst) > _SHOWN)

    def print(self) -> None:
        """Print the table and the lines below it."""
        Console().print(self.table())
        print("\n".join(self.lines()))
