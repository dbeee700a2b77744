"""``nemo-lowprec compare``: trains each level with each seed, one after the other, and compares the runs."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from nemo_lowprec.checkpoint.writing import file_in_place
from nemo_lowprec.conf.compare_line import CompareLine
from nemo_lowprec.lines import abbreviate
from nemo_lowprec.report.compare.comparison import compare
from nemo_lowprec.report.compare.groups import read_groups
from nemo_lowprec.report.compare.page import comparison_page
from nemo_lowprec.report.compare.table import print_comparison
from nemo_lowprec.report.monitor.run_writer import FILE, RunWriter
from nemo_lowprec.report.monitor.runs import read_run
from nemo_lowprec.report.page.page import check_packages, write_page

_PAGE = "compare.html"
_SETTINGS = "compare.json"  # of the trainings in the folder


@dataclass(frozen=True)
class Training:
    """One training of a comparison.

    Attributes:
        level, seed: of the training.
        folder: of the run.
        arguments: of ``nemo-lowprec``. A training that was cut short resumes from its last checkpoint.
    """

    level: str
    seed: int
    folder: Path
    arguments: tuple[str, ...]

    @property
    def command(self) -> list[str]:
        """The command line."""
        return [sys.executable, "-m", "nemo_lowprec.cli", *self.arguments]

    @property
    def has_run(self) -> bool:
        """Whether the run has begun."""
        return (self.folder / FILE).is_file()

    @property
    def has_ended(self) -> bool:
        """Whether the run has ended in order."""
        return self.has_run and read_run(self.folder).ended


def compare_job(found: CompareLine) -> None:
    """Train what is missing, print the table, and write the page.

    Raises:
        ValueError: the folder holds a comparison with other settings, or a run cannot be compared.
        RuntimeError: trainings have failed; the others are compared first.
        MissingPackageError: a package that the page needs is not installed.
    """
    if found.folders:
        _show(found.folders, found.out or Path(_PAGE))
        return
    trainings = trainings_of(found)
    _check_settings(found)
    missing = [training for training in trainings if not training.has_ended]
    check_packages()  # before hours of training
    done = len(trainings) - len(missing)
    if done:
        print(f"{done} of {len(trainings)} runs in {found.output_dir} have ended and are not trained again.")
    try:
        (_by_nemo_run if found.by_nemo_run else _one_after_the_other)(missing)
    except KeyboardInterrupt:
        print(f"\nThe same command with output_dir={found.output_dir} goes on where it was.", file=sys.stderr)
        raise
    failed = [training for training in trainings if not training.has_ended]
    ended = [training.folder for training in trainings if training not in failed]
    if len(ended) > 1:
        _show(ended, found.out or found.output_dir / _PAGE)
    if failed:
        names = abbreviate(training.folder.name for training in failed)
        raise RuntimeError(
            f"{len(failed)} of {len(trainings)} runs have not ended: {names}. The same command with "
            f"output_dir={found.output_dir} trains them again."
        )


def trainings_of(found: CompareLine) -> list[Training]:
    """All trainings; of each seed all levels, so that a comparison that is cut short has as many runs of each level."""
    trainings = []
    for seed in found.seeds:
        for level in found.levels:
            folder = found.output_dir / f"{level}_{seed}"
            own = (f"precision={level}", f"seed={seed}", f"output_dir={folder}", f"hydra.run.dir={folder}")
            # The word "last" starts afresh where there is no checkpoint yet.
            words = ("pretrain", *found.line.flags, *found.line.overrides, *own, "monitor=on", "ckpt_path=last")
            trainings.append(Training(level, seed, folder, words))
    return trainings


def _check_settings(found: CompareLine) -> None:
    """Note the settings in a new folder; refuse a folder whose runs have others."""
    path = found.output_dir / _SETTINGS
    settings = sorted([*found.line.flags, *found.line.overrides])
    if not path.exists():
        with file_in_place(path) as file:
            file.write(json.dumps(settings).encode())
        return
    before = json.loads(path.read_text())
    if before != settings:
        words = " ".join(before) or "no settings"
        raise ValueError(f"{found.output_dir} holds a comparison with {words}: name another output_dir.")


def _one_after_the_other(trainings: Sequence[Training]) -> None:
    for index, training in enumerate(trainings):
        print(f"\nRun {index + 1} of {len(trainings)}: {training.level}, seed {training.seed}", flush=True)
        done = subprocess.run(training.command, check=False)  # its own process: memory and peak begin anew
        if done.returncode == 0 and training.has_run and not training.has_ended:
            # It was killed behind its last checkpoint: nothing was left to train, and so nothing to note.
            writer = RunWriter(training.folder)
            writer.write("end", step=read_run(training.folder).last_step)
            writer.close()


def _by_nemo_run(trainings: Sequence[Training]) -> None:
    """The trainings as tasks of one nemo_run experiment, on this machine."""
    import nemo_run as run

    if not trainings:
        return
    with run.Experiment("compare") as experiment:
        for training in trainings:
            # nemo_run starts a task in a folder of its own.
            inline = f"cd {shlex.quote(str(Path.cwd()))} && {shlex.join(training.command)}"
            experiment.add(run.Script(inline=inline), executor=run.LocalExecutor(), name=training.folder.name)
        experiment.run(sequential=True, detach=False, tail_logs=True)


def _show(folders: Sequence[str | Path], out: Path) -> None:
    comparison = compare(read_groups(folders))
    print()
    print_comparison(comparison)
    write_page(out, comparison_page(comparison))
    print(f"\n{out}")
