"""Convergence at length: Llamas of 100M parameters, each trained on 503 M tokens of source code at one level.

    python -m benchmarks.convergence --data data/convergence --runs bf16_mixed:0 msamp_o2:0 msamp_o2+coarse:0@3072
    python -m benchmarks.convergence --at-once 2 --runs bf16_mixed:1~1024 msamp_o2:1~1024    # 34 M tokens a run

``LEVEL[+VARIANT]:SEED[~STEPS][@STOP]`` is one run on one GPU: its schedule has 15,360 steps or ``STEPS``, and it ends
with the schedule or after ``STOP`` steps. Runs of one seed share initial weights and the order of the data. Each GPU
takes the next run of the list that has not ended. At ``--seconds`` every run writes a checkpoint to
``--state``; the same command goes on from there, bit for bit, and results in ``--out`` are kept.

docs/convergence.rst has the protocol, and says what is compared.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
import time
from pathlib import Path

import torch

from benchmarks.convergence_run import Spec, train
from benchmarks.record import Record, arguments, earlier

_WORTH = 45  # seconds: a run that has less until the end is not started


def main() -> None:
    parser = arguments(__doc__.split("\n")[0], "convergence_h200.jsonl")
    parser.add_argument("--data", type=Path, default=Path("data/convergence"), help="see benchmarks.convergence_text")
    parser.add_argument("--state", type=Path, default=Path("data/convergence_state"), help="checkpoints of the runs")
    parser.add_argument("--runs", nargs="+", type=Spec.parse, required=True, help="LEVEL[+VARIANT]:SEED[~STEPS][@STOP]")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="runs stop after so many seconds")
    parser.add_argument("--at-once", type=int, default=1, help="runs that share a GPU; a run starts beside another")
    parser.add_argument("--one", type=float, help="the deadline: train the only run in this process")
    args = parser.parse_args()
    if args.one is not None:
        train(args.runs[0], args.data, args.state, args.one)
        return

    deadline = time.time() + args.seconds
    args.state.mkdir(parents=True, exist_ok=True)
    kept = earlier(args.out, "convergence")
    have = {line["run"] for line in kept if "command" not in line}
    record = Record(args.out, kept)
    waiting: queue.SimpleQueue[Spec] = queue.SimpleQueue()
    for spec in args.runs:
        if str(spec) not in have:
            waiting.put(spec)

    def work(gpu: int) -> None:
        while time.time() < deadline - _WORTH:
            try:
                spec = waiting.get_nowait()
            except queue.Empty:
                return
            options = {"data": args.data, "state": args.state, "runs": spec, "one": deadline}
            command = [sys.executable, "-m", "benchmarks.convergence"]
            command += [word for name, value in options.items() for word in (f"--{name}", str(value))]
            environment = {**os.environ, "CUDA_VISIBLE_DEVICES": str(gpu)}
            result = subprocess.run(command, stderr=subprocess.PIPE, text=True, env=environment)
            done = args.state / f"{spec}.json"
            if done.exists():
                record.add(**json.loads(done.read_text()))
            elif result.returncode:
                print(result.stderr[-3000:], flush=True)
                record.add(benchmark="convergence_failure", run=str(spec), error=result.stderr[-300:])

    gpus = range(max(1, torch.cuda.device_count()))
    threads = [threading.Thread(target=work, args=(gpu,)) for gpu in gpus for _ in range(args.at_once)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main()
