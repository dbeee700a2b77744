"""Figures of a comparison of levels, from the folders of its runs.

    python -m benchmarks.compare outputs/compare/llama_100m/*_* --out benchmarks/results/compare_h200.jsonl

The first line names the command of the comparison, the versions, the GPU and the date, all as the runs have noted them;
each line behind it is a level.
"""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from nemo_lowprec.report.compare.comparison import Outcome, compare
from nemo_lowprec.report.compare.groups import read_groups
from nemo_lowprec.report.monitor.runs import Run

__all__ = ["figures", "main"]

_ALIKE = ("device", "processes", "versions")  # of all runs
_OF_COMPARE = ("monitor=on", "ckpt_path=last")  # words that compare gives each training


def figures(folders: Sequence[str | Path]) -> list[dict[str, Any]]:
    """The origin of a comparison, and an object for each level.

    Lists hold a number for each run, in the order of ``seeds``. ``lost_percent`` are the updates that rounding the
    weights has undone at the last sample: the median over the parameters, and of it the mean over the runs.

    Args:
        folders: of runs that ``nemo-lowprec compare`` has trained.

    Raises:
        ValueError: runs that cannot be compared, that ``compare`` has not trained, of several GPUs or versions, or
            without a last validation at the same step.
    """
    comparison = compare(read_groups(folders))
    if not comparison.by_validation:
        raise ValueError("The runs have no validation loss at the same step.")
    runs = [run for outcome in comparison.outcomes for run in outcome.group.runs]
    return [_origin(runs), *map(_figure, comparison.outcomes)]


def _origin(runs: Sequence[Run]) -> dict[str, Any]:
    about = runs[0].about
    for name in _ALIKE:
        if any(run.about[name] != about[name] for run in runs):
            raise ValueError(f"The runs differ in their {name}.")
    return {
        "command": _command(runs),
        "date": min(run.attempts[0]["time"] for run in runs)[:10],
        "gpu": about["device"],
        "gpus": about["processes"],
        "versions": about["versions"],
        "model": about["model"],
        "parameters": about["parameters"],
    }


def _command(runs: Sequence[Run]) -> str:
    """The comparison's command: what the trainings' commands share, all levels and all seeds."""
    lines = [shlex.split(run.about["command"])[1:] for run in runs]
    if any(words[:1] != ["pretrain"] or not set(_OF_COMPARE) <= set(words) for words in lines):
        raise ValueError("nemo-lowprec compare has not trained all of the runs.")
    shared = [word for word in lines[0][1:] if word not in _OF_COMPARE and all(word in words for words in lines)]
    levels, seeds = (dict.fromkeys(str(run.about[name]) for run in runs) for name in ("level", "seed"))
    return shlex.join(["nemo-lowprec", "compare", *shared, f"precision={','.join(levels)}", f"seeds={','.join(seeds)}"])


def _figure(outcome: Outcome) -> dict[str, Any]:
    group = outcome.group
    return {
        "benchmark": "compare",
        "level": group.label,
        "seeds": group.seeds,
        "steps": outcome.steps[-1],
        "val_losses": [run.val_losses[-1][1] for run in group.runs],
        "val_loss": outcome.final,
        "gap": outcome.gap,
        "gap_half_interval": outcome.gap_half,
        "leaves_band": outcome.leaves,
        "tokens_per_second": outcome.tokens_per_second,
        "tokens_per_second_of_runs": [run.tokens_per_second for run in group.runs],
        "peak_bytes": outcome.peak_bytes,
        "bytes_per_param": outcome.bytes_per_param,
        "lost_percent": fmean(float(np.nanmedian(run.params.matrix("lost")[:, -1])) for run in group.runs),
    }


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser("python -m benchmarks.compare", description=__doc__)
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="file of results")
    given = parser.parse_args()
    given.out.write_text("".join(json.dumps(line) + "\n" for line in figures(given.folders)))


if __name__ == "__main__":
    main()
