"""The outcome of the tests that need a GPU, by file, with the reasons of those that were skipped.

python -m benchmarks.gpu_tests

Most of their time goes into compiling kernels, so each file has processes of its own, as many files at once as the
GPU's memory has room for. A file whose results depend on times has the GPU to itself, first. Figures are written as
they come. With ``--files``, figures of the others stay.
"""

from __future__ import annotations

import multiprocessing
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from pathlib import Path

import pytest
import torch

from benchmarks.record import Record, arguments, lines

# Their tests compare times, or hold a decision that depends on times: which blocks become graphs.
_ALONE = {"test_auto.py", "test_doctor.py", "test_graphs_recomputed.py", "test_profile.py"}
# Files whose tests compile long, and the number of processes that share the tests of a file. Each of these processes
# runs the file's fixtures.
_PARTS = {"test_compiled.py": 4, "test_families.py": 8, "test_triton_rotary.py": 8}
_BYTES_OF_FILE = 6 * 2**30  # room for the tensors of a file's tests and for CUDA's context


class Outcomes:
    """A pytest plugin that runs a part of the tests and counts their outcomes."""

    def __init__(self, part: int = 0, parts: int = 1) -> None:
        self._mine = slice(part, None, parts)
        self.counts: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = items[self._mine]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or not report.passed:  # set-up and tear-down count where they end a test
            self.counts[report.outcome] += 1
        if report.skipped:
            self.reasons[report.longrepr[2].removeprefix("Skipped: ")] += 1


def outcomes_of(file: Path, part: int, parts: int) -> tuple[int, Outcomes]:
    """Run one of ``parts`` parts of the tests of a file; pytest's exit code and the outcomes."""
    outcomes = Outcomes(part, parts)
    code = pytest.main([str(file), "-q", "--no-header", "-p", "no:cacheprovider"], plugins=[outcomes])
    return int(code), outcomes


def in_processes(file: Path) -> tuple[Path, int, Outcomes]:
    """The file, pytest's worst exit code and the outcomes, from processes that end with the tests of the file."""
    parts, whole = _PARTS.get(file.name, 1), Outcomes()
    with ProcessPoolExecutor(parts, multiprocessing.get_context("spawn")) as pool:
        runs = [pool.submit(outcomes_of, file, part, parts) for part in range(parts)]
        codes, found = zip(*(run.result() for run in runs), strict=True)
    for outcomes in found:
        whole.counts += outcomes.counts
        whole.reasons += outcomes.reasons
    return file, max(codes), whole


def in_turns(files: Sequence[Path]) -> Iterator[tuple[Path, int, Outcomes]]:
    """The results of ``in_processes``, as they come; processes start in the order of ``files``."""
    memory = torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else 0
    for alone, count in ((True, 1), (False, max(1, memory // _BYTES_OF_FILE))):
        with ThreadPoolExecutor(count) as pool:
            runs = [pool.submit(in_processes, file) for file in files if (file.name in _ALONE) == alone]
            yield from (run.result() for run in as_completed(runs))


def main() -> None:
    parser = arguments(__doc__.split("\n")[0], "gpu_tests_h200.jsonl")
    parser.add_argument("--files", nargs="*", type=Path, help="files of tests; all without")
    args = parser.parse_args()
    files = args.files or sorted(Path("tests/gpu").glob("test_*.py"))
    names = {str(file) for file in files}
    others = [f for f in lines(args.out) if f.get("file") not in names] if args.files and args.out.exists() else []
    record, worst = Record(args.out, others), 0
    for file, code, outcomes in in_turns(files):
        worst = max(worst, code)
        record.add(
            benchmark="gpu_tests", file=str(file), **{k: outcomes.counts[k] for k in ("passed", "failed", "skipped")}
        )
        for reason, count in outcomes.reasons.most_common():
            record.add(benchmark="gpu_tests_skipped", file=str(file), reason=reason, tests=count)
    sys.exit(worst)


if __name__ == "__main__":
    main()
