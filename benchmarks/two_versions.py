"""A benchmark of this folder with two versions of the package, in turn.

    python -m benchmarks.two_versions ../earlier everyday --models 'Llama 100M' 8B --contestants nemo_lowprec
    python -m benchmarks.two_versions ../earlier parallel_step --only lowprec_sharded
    python -m benchmarks.two_versions ../earlier megatron_step --paths MegatronStrategy --rounds 1

The folder holds the other version's ``nemo_lowprec``; the benchmark is this version's. Each turn is one run of the
benchmark with either version, and the order changes from turn to turn: the host's speed differs between processes by
more than two versions do. A figure is the median over turns; ``of_other`` is the other version's time over this one's,
above 1 where this one is faster, and ``gpu_ms`` the time that kernels take in a step, where the benchmark has it.
Figures of other benchmarks stay in the file of results.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

from benchmarks.record import Record, arguments, earlier, read

_ROOT = Path(__file__).parents[1]
_TIMES = ("ms", "gpu_ms")


def run(package: Path, benchmark: str, words: list[str]) -> dict[str, dict[str, Any]]:
    """The figures of one run of ``benchmark`` with the ``nemo_lowprec`` in the folder ``package``, by what they are of.

    Raises:
        RuntimeError: the benchmark has failed, or has no times.
    """
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "nemo_lowprec").symlink_to(package.resolve() / "nemo_lowprec")
        out = Path(folder) / "out.jsonl"
        path = os.pathsep.join([folder, str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        # -P: or the folder of this process would come first.
        command = [sys.executable, "-P", "-m", f"benchmarks.{benchmark}", *words, "--out", str(out)]
        done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True)
        figures = [line for line in read(out)[1] if "ms" in line] if out.exists() else []
    if done.returncode or not figures:
        raise RuntimeError(f"{package}: {benchmark} has no times: {(done.stderr or done.stdout)[-2000:]}")
    return {_named(line): line for line in figures}


def _named(figure: dict[str, Any]) -> str:
    """What a figure is of: its names, and how many GPUs."""
    return json.dumps({k: v for k, v in figure.items() if isinstance(v, str) or k == "gpus"})


def main() -> None:
    parser = arguments(__doc__.split("\n")[0], "two_versions_h200.jsonl")
    parser.add_argument("other", type=Path, help="folder of the other version")
    parser.add_argument("benchmark", help="a module of this folder, whose figures have ms")
    parser.add_argument("words", nargs=argparse.REMAINDER, help="its arguments")
    parser.add_argument("--turns", type=int, default=2, help="runs of each version; stands before the others")
    args = parser.parse_args()
    versions = {"other": args.other, "this": _ROOT}
    found: dict[str, dict[str, list[dict[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    for turn in range(args.turns):
        for version in list(versions)[:: 1 if turn % 2 == 0 else -1]:
            for name, figure in run(versions[version], args.benchmark, args.words).items():
                found[name][version].append(figure)
    kept = [line for line in earlier(args.out, "two_versions") if line.get("of") != args.benchmark]
    record = Record(args.out, kept)
    for name, of in found.items():
        medians = {version: _medians(of[version]) for version in versions if version in of}
        ratio = medians["other"]["ms"] / medians["this"]["ms"] if len(medians) == len(versions) else None
        for version, times in medians.items():
            beside = {"of_other": round(ratio, 4)} if ratio is not None and version == "this" else {}
            about = json.loads(name) | {"of": args.benchmark, "benchmark": "two_versions"}
            record.add(version=version, **about, **times, **beside, turns=len(of[version]))


def _medians(figures: list[dict[str, Any]]) -> dict[str, float]:
    """Medians of the times that all of ``figures`` have."""
    return {
        k: round(statistics.median(f[k] for f in figures), 3)
        for k in _TIMES
        if all(f.get(k) is not None for f in figures)
    }


if __name__ == "__main__":
    main()
