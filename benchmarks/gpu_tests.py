"""The outcome of the tests that need a GPU, by file, with the reasons of those that were skipped.

python -m benchmarks.gpu_tests

Most of their time goes into compiling kernels, so each file has a process of its own, all at once. With ``--files``,
figures of the others stay.
"""

from __future__ import annotations

import multiprocessing
import sys
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from benchmarks.record import Record, arguments, lines


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


def main() -> None:
    parser = arguments(__doc__.split("\n")[0], "gpu_tests_h200.jsonl")
    parser.add_argument("--files", nargs="*", type=Path, help="files of tests; all without")
    args = parser.parse_args()
    files = args.files or sorted(Path("tests/gpu").glob("test_*.py"))
    names = {str(file) for file in files}
    others = [f for f in lines(args.out) if f.get("file") not in names] if args.files and args.out.exists() else []
    with ProcessPoolExecutor(len(files), multiprocessing.get_context("spawn")) as pool:
        results = list(pool.map(outcomes_of, files))
    record = Record(args.out, others)
    for _, outcomes in results:
        for file, counts in outcomes.by_file.items():
            record.add(benchmark="gpu_tests", file=file, **{k: counts[k] for k in ("passed", "failed", "skipped")})
    for file, (_, outcomes) in zip(files, results, strict=True):
        for reason, count in outcomes.reasons.most_common():
            record.add(benchmark="gpu_tests_skipped", file=str(file), reason=reason, tests=count)
    sys.exit(max(code for code, _ in results))


if __name__ == "__main__":
    main()
