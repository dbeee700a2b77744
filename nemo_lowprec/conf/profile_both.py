"""``nemo-lowprec profile``: profiles a level, and the same model in BF16, each in a process of its own."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path

from nemo_lowprec.conf.command_line import CommandLine
from nemo_lowprec.conf.profile_line import HALF, ProfileLine
from nemo_lowprec.report.profile.beside import Beside, beside
from nemo_lowprec.report.profile.step_profile import FILE, HALF_FILE, StepProfile, read_profile
from nemo_lowprec.report.profile.table import print_profiles, summary, verdict


def profile_both(line: ProfileLine) -> None:
    """Profile both runs, print them side by side, and write their files where the command line names a folder.

    Raises:
        SystemExit: a run has failed, and has said why; with its exit status.
    """
    with tempfile.TemporaryDirectory() as folder:
        half = _profile(line.half, HALF, Path(folder), line.is_json)
        low = _profile(line.low, line.level, Path(folder), line.is_json)
    found = beside(half, low)
    if line.out is not None:
        low.save(line.out / FILE)
        half.save(line.out / HALF_FILE)
    if line.is_json:
        print(json.dumps(to_json(found)))
    else:
        print()
        print_profiles(found)


def to_json(found: Beside) -> dict[str, object]:
    """Both profiles, the layers that are better left in BF16, and the sentences."""
    return {
        "summary": summary(found),
        "verdict": verdict(found),
        "better_in_bf16": [name for one in found.better_in_half for name in one.low],
        "bf16": asdict(found.half),
        "level": asdict(found.low),
    }


def _profile(line: CommandLine, level: str, folder: Path, is_json: bool) -> StepProfile:
    file = folder / f"{level}.json"
    if not is_json:
        print(f"\nProfile of {level}", flush=True)
    command = [sys.executable, "-m", "nemo_lowprec.cli", "profile", *line.arguments, f"into={file}"]
    quiet = {"KINETO_LOG_LEVEL": "99", **os.environ}  # torch's profiler says when it starts
    done = subprocess.run(command, check=False, stdout=sys.stderr if is_json else None, env=quiet)
    if done.returncode:
        raise SystemExit(done.returncode)
    found = read_profile(file)
    return replace(found, about={**found.about, "command": shlex.join(["nemo-lowprec", "profile", *line.arguments])})
