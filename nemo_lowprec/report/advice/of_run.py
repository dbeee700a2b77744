"""Advice from a monitored run: the layers that low precision has spoiled, and the line that keeps them back."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from nemo_lowprec.lines import pair_lines, text_lines
from nemo_lowprec.report.advice.paste import hydra_line, patterns_of, python_line, with_skip
from nemo_lowprec.report.bounds import MAX_SATURATION, MAX_UNDERFLOW, MIN_SQNR
from nemo_lowprec.report.monitor.runs import Run, read_run
from nemo_lowprec.report.page.said import spoiled
from nemo_lowprec.report.spoiled import crossings

_SHOWN = 12  # layers in the list


@dataclass(frozen=True)
class RunAdvice:
    """Advice about the level of a monitored run.

    Attributes:
        run: the history.
        kept_back: layer to the metrics that lie beyond their bounds, the farthest first. The size of a layer's values
            beside the other layers' is none of them: it is no error of rounding.
        skip: names and globs for ``skip`` that stand for these layers.
    """

    run: Run
    kept_back: dict[str, str]
    skip: tuple[str, ...]

    @property
    def python(self) -> str:
        """The argument of a Trainer that keeps the layers back."""
        return python_line(self.run.about["level"], with_skip(self.run.about["arguments"], self.skip))

    @property
    def hydra(self) -> str:
        """The same as overrides of ``nemo-lowprec pretrain``."""
        return hydra_line(self.run.about["level"], with_skip(self.run.about["arguments"], self.skip))

    def lines(self) -> list[str]:
        """The advice for people, in 80 columns."""
        about, steps = self.run.about, self.run.steps
        found = text_lines(
            f"Advice from {self.run.folder}: {about['level']}, {len(steps)} samples up to step {steps[-1]:,}"
        )
        if not self.kept_back:
            return found + text_lines(
                f"No layer to keep back: SQNR is above {MIN_SQNR:g} dB, underflow below {MAX_UNDERFLOW:g} %, and "
                f"saturation below {MAX_SATURATION:g} % in every GEMM operand."
            )
        low = len(about["layers"]["low"])
        found += text_lines(f"Layers to keep back: {len(self.kept_back)} of {low}")
        found += pair_lines(list(self.kept_back.items())[:_SHOWN])
        found += [f"  and {len(self.kept_back) - _SHOWN} more"] * (len(self.kept_back) > _SHOWN)
        return [*found, "Take", f"  {self.python}", f"  {self.hydra}"]


def advise_run(folder: str | Path) -> RunAdvice:
    """Read the run in ``folder``.

    Raises:
        ValueError: there is no run, no sample in it, or a level without FP8 GEMMs.
    """
    run = read_run(folder)
    if not run.steps:
        raise ValueError(f"{folder} has a run without samples yet: its second step is the first one that is sampled.")
    if not run.operands.rows:
        raise ValueError(f"{folder} is a run at {run.about['level']}, which quantizes no operands.")
    found = [crossing for crossing in crossings(run) if crossing.metric != "amax_ratio"]
    kept = {entry["layer"]: entry["said"] for entry in spoiled(found)}
    return RunAdvice(run, kept, tuple(patterns_of(list(kept), run.about["layers"]["low"])))
