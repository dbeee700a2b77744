"""The outcome of the tests that need a GPU, by file, with the reasons of those that were skipped.

python -m benchmarks.gpu_tests
"""

from __future__ import annotations

import sys
from collections import Counter

import pytest

from benchmarks.record import Record, arguments


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


def main() -> None:
    args = arguments(__doc__.split("\n")[0], "gpu_tests_h200.jsonl").parse_args()
    outcomes = Outcomes()
    code = pytest.main(["tests/gpu", "-q", "--no-header", "-p", "no:cacheprovider"], plugins=[outcomes])
    record = Record(args.out)
    for file, counts in outcomes.by_file.items():
        record.add(benchmark="gpu_tests", file=file, **{k: counts[k] for k in ("passed", "failed", "skipped")})
    for reason, count in outcomes.reasons.most_common():
        record.add(benchmark="gpu_tests_skipped", reason=reason, tests=count)
    sys.exit(code)


if __name__ == "__main__":
    main()
