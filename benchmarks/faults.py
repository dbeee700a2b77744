"""Faults that a run of two processes survives: kills, signals, full disks, damaged checkpoints, gradients of NaN.

python -m benchmarks.faults --jobs 28
python -m benchmarks.faults --device cuda --trials 2 --seconds 480 --out benchmarks/results/faults_h200.jsonl
python -m benchmarks.faults --device cuda --machines 2 --out benchmarks/results/faults_machines_h200.jsonl

Every trial is a run of a small model, over gloo on the CPU or over NCCL on GPUs that all trials share, disturbed at a
random moment and then started again. With ``--machines 2`` each process is on a machine of its own to NCCL, which then
uses the network and needs one GPU only. A trial counts as survived where all processes end, and the restart comes bit
for bit to the end of a run that nothing disturbed. A damaged checkpoint is to be refused in a sentence that names it,
unless the damage is in bytes that carry nothing; with a NaN on one process all skip the same step. Each failure is a
line of its own in the results. Figures of faults and forms that are not tried again stay.
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
from itertools import product
from pathlib import Path
from typing import Any

import torch

from benchmarks.fault_kinds import FAULTS
from benchmarks.fault_tables import FORMS
from benchmarks.fault_trials import Bench, Outcome, levels_of
from benchmarks.processes import FORKING, links
from benchmarks.record import Record, arguments, lines

_Trials = dict[tuple[str, str], list[Outcome]]
ON_GPUS = {  # the environment of processes that are forked to use GPUs
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # otherwise torch.cuda.is_available() starts CUDA, which survives no fork
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
    "NCCL_MAX_NCHANNELS": "2",  # of small messages, and of many pairs on the same GPUs
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "1000",  # after a timeout torch's watchdog waits for four times as long
}
# Whether a process that has imported the modules in sys.argv forks children that can use the GPU.
_FORKS = """
import importlib, os, sys, torch
for name in sys.argv[1:]:
    importlib.import_module(name)
if child := os.fork():
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
torch.zeros(1, device="cuda", dtype=torch.uint8)
os._exit(0)
"""
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


def to_import(device: str, forms: list[str]) -> list[str]:
    """Modules for the fork server. One whose import starts CUDA is left out: each process then imports it anew."""
    modules = ["benchmarks.fault_kinds", "torch.distributed.fsdp"]
    if device == "cpu":
        return [*modules, *(["benchmarks.cpu_for_cuda"] if "megatron" in forms else [])]
    more = "benchmarks.fault_imports"
    tried = subprocess.run([sys.executable, "-c", _FORKS, *modules, more], stderr=subprocess.PIPE, text=True)
    if tried.returncode:
        print(f"{more} is not imported before the fork: {tried.stderr.strip().splitlines()[-1:]}", file=sys.stderr)
    return modules if tried.returncode else [*modules, more]


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
            found = [f for f in figures if f["fault"] == fault and f["form"] == form]
            slowest = [f" {f['seconds_max']:.1f}" for f in found if "seconds_max" in f]
            cells.append("".join([*(f"{f['survived']}/{f['trials']}" for f in found), *slowest]))
        lines.append(f"{fault:32}" + "".join(f"{cell:>12}" for cell in cells))
    return "\n".join(lines)


def run(
    bench: Bench, faults: list[str], forms: list[str], trials: int, jobs: int, seed: int, seconds: float | None = None
) -> tuple[_Trials, list[dict[str, Any]]]:
    """Make all trials that end within ``seconds`` and before SIGINT: outcomes by fault and form, and what failed."""
    outcomes: _Trials = defaultdict(list)
    failures = []
    start = time.monotonic()
    pool, pending = ThreadPoolExecutor(jobs), {}
    for number in range(trials):
        for j, fault in enumerate(faults):
            for form in forms:
                levels = levels_of(form)
                level, name = levels[(number + j) % len(levels)], f"{seed}-{fault}-{form}-{number}"
                pending[pool.submit(bench.trial, FAULTS[fault], form, level, name)] = (fault, form, level, name)
    try:
        for done in as_completed(pending, seconds):
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
    except TimeoutError:
        print(f"\n{seconds:.0f} s are over.", file=sys.stderr)
    except KeyboardInterrupt:
        print("\nInterrupted.", file=sys.stderr)
    finally:
        bench.stop()
        pool.shutdown(wait=False, cancel_futures=True)  # what has been found is written, whatever still hangs
    return outcomes, failures


def main() -> None:
    parser = arguments(__doc__.split("\n")[0], "faults.jsonl")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="cuda: two GPUs, with NCCL")
    parser.add_argument("--machines", type=int, choices=[1, 2], default=1, help="2: one GPU is enough for NCCL")
    parser.add_argument("--trials", type=int, default=6, help="of each fault and form")
    parser.add_argument("--jobs", type=int, help="trials at once; by default by the number of CPUs")
    parser.add_argument("--seed", type=int, default=0, help="of the random moments")
    parser.add_argument("--seconds", type=float, help="after which trials that have not ended are left out")
    parser.add_argument("--faults", nargs="*", choices=FAULTS, default=list(FAULTS))
    parser.add_argument("--forms", nargs="*", choices=FORMS, default=list(FORMS))
    args = parser.parse_args()
    os.environ.setdefault("PYTHONWARNINGS", "ignore")  # of the processes: their outputs are read where one fails
    cpus = os.cpu_count() or 2
    if args.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        jobs = args.jobs or max(1, cpus - 4)
    else:
        os.environ.update(ON_GPUS)
        jobs = args.jobs or max(1, cpus // 2)
        if torch.cuda.device_count() * args.machines < 2:
            parser.error("--device cuda needs two GPUs, or --machines 2.")
    mounts = may_mount()
    FORKING.set_forkserver_preload(to_import(args.device, args.forms))
    again = {(fault, form) for fault in args.faults for form in args.forms}
    earlier = lines(args.out) if args.out.exists() else []
    with tempfile.TemporaryDirectory(prefix="faults-", ignore_cleanup_errors=True) as place:
        bench = Bench(Path(place), mounts, args.device, args.machines)
        outcomes, failures = run(bench, args.faults, args.forms, args.trials, jobs, args.seed, args.seconds)
    record = Record(args.out, [line for line in earlier if (line.get("fault"), line.get("form")) not in again])
    figures = [figure(*key, outcomes[key]) for key in product(args.faults, args.forms) if key in outcomes]
    for one in figures:
        disk = {"disk": "mounted" if mounts else "a limit on the size of files"} if one["fault"] == "disk_full" else {}
        record.add(**one, **disk, **links(args.machines))
    for failure in failures:
        record.add(benchmark="faults_failure", **failure)
    print(table(figures, args.forms))
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
