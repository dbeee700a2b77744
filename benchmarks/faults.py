"""Faults that a run of two processes survives: kills, signals, full disks, damaged checkpoints, gradients of NaN.

python -m benchmarks.faults --jobs 28

Needs no GPU. Every trial is a run of a small model over gloo, disturbed at a random moment and then started again; it
counts as survived where all processes end, and the restart comes bit for bit to the end of a run that nothing
disturbed. A damaged checkpoint is to be refused in a sentence that names it, unless the damage is in bytes that carry
nothing; with a NaN on one process all skip the same step. Each failure is a line of its own in the results.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from benchmarks.fault_kinds import FAULTS
from benchmarks.fault_tables import FORMS
from benchmarks.fault_trials import Bench, Outcome, levels_of
from benchmarks.processes import FORKING
from benchmarks.record import Record, arguments

_INSIDE = "NEMO_LOWPREC_FAULTS_MOUNTS"  # 1 inside of the namespace; 0: no disks are to be mounted


def may_mount() -> bool:
    """Whether disks can be mounted, for this process alone: it starts itself anew in a mount namespace of its own."""
    if _INSIDE in os.environ:
        return os.environ[_INSIDE] == "1"
    with tempfile.TemporaryDirectory() as place:
        for unshare in (["unshare", "--mount"], ["unshare", "--user", "--map-root-user", "--mount"]):
            probe = [*unshare, "mount", "-t", "tmpfs", "tmpfs", place]
            if shutil.which("unshare") and not subprocess.run(probe, capture_output=True).returncode:
                os.environ[_INSIDE] = "1"
                os.execvp("unshare", [*unshare, sys.executable, *sys.orig_argv[1:]])
    return False


def figure(fault: str, form: str, outcomes: list[Outcome]) -> dict[str, Any]:
    """What a fault came to."""
    seconds = [o.seconds for o in outcomes if o.seconds is not None]
    lost = [o.lost for o in outcomes if o.lost is not None]
    found: dict[str, Any] = {
        "benchmark": "faults", "fault": fault, "form": form, "trials": len(outcomes),
        "survived": sum(o.survived for o in outcomes),
    }  # fmt: skip
    if seconds:
        found |= {"seconds_median": round(statistics.median(seconds), 3), "seconds_max": max(seconds)}
    if lost:
        found["lost_steps_max"] = max(lost)
    if any(o.refused is not None for o in outcomes):
        found["refused"] = sum(bool(o.refused) for o in outcomes if o.survived)
    return found


def table(figures: list[dict[str, Any]], forms: list[str]) -> str:
    """At most 80 columns wide: survived of trials, and the slowest end in seconds."""
    lines = [f"{'survived / trials, slowest s':32}" + "".join(f"{form:>12}" for form in forms)]
    for fault in dict.fromkeys(f["fault"] for f in figures):
        cells = []
        for form in forms:
            (one,) = (f for f in figures if f["fault"] == fault and f["form"] == form)
            slowest = f" {one['seconds_max']:.1f}" if "seconds_max" in one else ""
            cells.append(f"{one['survived']}/{one['trials']}{slowest}")
        lines.append(f"{fault:32}" + "".join(f"{cell:>12}" for cell in cells))
    return "\n".join(lines)


def run(
    place: Path, faults: list[str], forms: list[str], trials: int, jobs: int, seed: int, mounts: bool
) -> tuple[dict[tuple[str, str], list[Outcome]], list[dict[str, Any]]]:
    """Make all trials: their outcomes by fault and form, and what failed."""
    bench = Bench(place, mounts)
    outcomes: dict[tuple[str, str], list[Outcome]] = defaultdict(list)
    failures = []
    start = time.monotonic()
    with ThreadPoolExecutor(jobs) as pool:
        pending = {}
        for number in range(trials):
            for j, fault in enumerate(faults):
                for form in forms:
                    levels = levels_of(form)
                    level, name = levels[(number + j) % len(levels)], f"{seed}-{fault}-{form}-{number}"
                    pending[pool.submit(bench.trial, FAULTS[fault], form, level, name)] = (fault, form, level, name)
        for done in as_completed(pending):
            fault, form, level, name = pending[done]
            outcome = done.result()
            outcomes[fault, form].append(outcome)
            if not outcome.survived:
                failures.append({"fault": fault, "form": form, "level": level, "trial": name, "said": outcome.said})
                print(f"\n{name} {level}: {outcome.said.splitlines()[0]}", file=sys.stderr)
            made, total = sum(map(len, outcomes.values())), len(pending)
            print(
                f"\r{made}/{total} trials, {made - len(failures)} survived, {time.monotonic() - start:.0f} s",
                end="" if made < total else "\n", file=sys.stderr, flush=True,
            )  # fmt: skip
    return outcomes, failures


def main() -> None:
    parser = arguments(__doc__.split("\n")[0], "faults.jsonl")
    parser.add_argument("--trials", type=int, default=6, help="of each fault and form")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) - 4), help="trials at once")
    parser.add_argument("--seed", type=int, default=0, help="of the random moments")
    parser.add_argument("--faults", nargs="*", choices=FAULTS, default=list(FAULTS))
    parser.add_argument("--forms", nargs="*", choices=FORMS, default=list(FORMS))
    args = parser.parse_args()
    os.environ.setdefault("PYTHONWARNINGS", "ignore")  # of the processes: their outputs are read where one fails
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # processes are forked, which CUDA does not survive
    mounts = may_mount()
    megatron = ["benchmarks.cpu_for_cuda"] if "megatron" in args.forms else []
    FORKING.set_forkserver_preload(["benchmarks.fault_kinds", "torch.distributed.fsdp", *megatron])
    with tempfile.TemporaryDirectory(prefix="faults-", ignore_cleanup_errors=True) as place:
        outcomes, failures = run(Path(place), args.faults, args.forms, args.trials, args.jobs, args.seed, mounts)
    record = Record(args.out)
    figures = [figure(fault, form, outcomes[fault, form]) for fault in args.faults for form in args.forms]
    for one in figures:
        disk = {"disk": "mounted" if mounts else "a limit on the size of files"} if one["fault"] == "disk_full" else {}
        record.add(**one, **disk)
    for failure in failures:
        record.add(benchmark="faults_failure", **failure)
    print(table(figures, args.forms))
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
