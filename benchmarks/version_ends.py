"""The outcome of tests that need no GPU, at the ends of the version ranges of pyproject.toml.

    python -m benchmarks.version_ends

Run it in an environment of each combination of versions; the outcomes of other combinations stay in the file of
results. The tests are those of private names, of what holds at every level, of settings that become other packages'
configs, and of the files in conf/.
"""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.gpu_tests import in_processes
from benchmarks.record import Record, arguments, lines, versions

_TESTS = (
    "tests/compat/test_private_names.py", "tests/compat/test_accelerate.py", "tests/compat/test_autograd.py",
    "tests/compat/test_lightning.py", "tests/compat/test_megatron.py", "tests/compat/test_tensors.py",
    "tests/compat/test_transformers.py", "tests/plugins/test_invariants.py", "tests/loops/test_fp8_settings.py",
    "tests/megatron/test_settings.py", "tests/megatron/test_nemo.py", "tests/recipes/test_precision_factories.py",
    "tests/cli/test_conf.py",
)  # fmt: skip


def main() -> None:
    parser = arguments(__doc__.split("\n")[0], "version_ends.jsonl")
    parser.add_argument("--files", nargs="*", type=Path, default=[Path(name) for name in _TESTS])
    args = parser.parse_args()
    kept, here = [], False
    for line in lines(args.out) if args.out.exists() else []:
        if "command" in line:
            here = (line["python"], line["versions"]) == (sys.version.split()[0], versions())
        if not here:
            kept.append(line)
    record, worst = Record(args.out, kept), 0
    for file in args.files:
        _, code, outcomes = in_processes(file)
        worst = max(worst, code)
        counts = {name: outcomes.counts[name] for name in ("passed", "failed", "skipped")}
        record.add(benchmark="version_ends", file=str(file), **counts, reasons=list(outcomes.reasons))
    sys.exit(worst)


if __name__ == "__main__":
    main()
