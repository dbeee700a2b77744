"""The outcome of the tests that need a GPU, by file, with the reasons of those that were skipped.

python -m benchmarks.gpu_tests

Most of their time goes into compiling kernels, so each file has a process of its own, as many at once as the GPU's
memory has room for. A file whose results depend on times has the GPU to itself, first. Figures are written as they
come. With ``--files``, figures of the others stay.
"""

from __future__ import annotations

import multiprocessing
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from benchmarks.record import Record, arguments, lines

# Their tests compare times, or hold a decision that depends on times: which blocks become graphs.
_ALONE = {"test_auto.py", "test_doctor.py", "test_graphs_recomputed.py", "test_profile.py"}
_BYTES_OF_FILE = 6 * 2**30  # room for the tensors of a file's tests and for CUDA's context


class Outcomes:
    """A pytest plugin that counts."""

    def __init__(self) -> None:
        self.by_file: dict[str, Counter[str]] = {}
        self.reasons: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or not report.passed:  # set-up and tear-down count where they end a test
            self.by_file.setdefault(report.location[0], Counter())[report.outcome] += 1
        if report.skipped:
            self.reasons[report.longrepr[2].removeprefix("Skipped: ")] += 1


def outcomes_of(file: Path) -> tuple[int, Outcomes]:
    """Run the tests of a file; pytest's exit code and what it counted."""
    outcomes = Outcomes()
    code = pytest.main([str(file), "-q", "--no-header", "-p", "no:cacheprovider"], plugins=[outcomes])
    return int(code), outcomes


def in_a_process(file: Path) -> tuple[Path, int, Outcomes]:
    """The file, pytest's exit code and the outcomes, from a process that ends with the tests of the file."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return file, *pool.submit(outcomes_of, file).result()


def in_turns(files: Sequence[Path]) -> Iterator[tuple[Path, int, Outcomes]]:
    """The results of ``in_a_process``, in the order of ``files``, and each without waiting for later ones."""
    memory = torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else 0
    for alone, count in ((True, 1), (False, max(1, memory // _BYTES_OF_FILE))):
        with ThreadPoolExecutor(count) as pool:
            yield from pool.map(in_a_process, [file for file in files if (file.name in _ALONE) == alone])


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
        counts = sum(outcomes.by_file.values(), Counter[str]())
        record.add(benchmark="gpu_tests", file=str(file), **{k: counts[k] for k in ("passed", "failed", "skipped")})
        for reason, count in outcomes.reasons.most_common():
            record.add(benchmark="gpu_tests_skipped", file=str(file), reason=reason, tests=count)
    sys.exit(worst)


if __name__ == "__main__":
    main()
