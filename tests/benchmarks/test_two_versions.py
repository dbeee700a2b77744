"""A benchmark with two versions of the package: which package runs, in which order, and what is recorded."""

import json
import sys

import pytest

from benchmarks import two_versions


def test_the_package_of_the_folder_runs(tmp_path):
    package = tmp_path / "nemo_lowprec"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('an earlier version')")
    with pytest.raises(RuntimeError, match=r"(?s)everyday has no times: .*an earlier version"):
        two_versions.run(tmp_path, "everyday", ["--models", "Llama 100M"])


def test_versions_take_turns_and_medians_are_compared(tmp_path, monkeypatch):
    times = {tmp_path: iter([12.0, 14.0, 10.0]), two_versions._ROOT: iter([6.0, 5.0, 7.0])}
    order = []

    def run(package, benchmark, words):
        assert (benchmark, words) == ("everyday", ["--models", "8B"])
        order.append(package)
        return {json.dumps({"benchmark": "everyday", "name": "msamp_o2"}): {"ms": next(times[package]), "gpu_ms": None}}

    monkeypatch.setattr(two_versions, "run", run)
    out = tmp_path / "out.jsonl"
    words = ["--out", str(out), "--turns", "3", str(tmp_path), "everyday", "--models", "8B"]
    monkeypatch.setattr(sys, "argv", ["two_versions", *words])
    two_versions.main()
    first, second = tmp_path, two_versions._ROOT
    assert order == [first, second, second, first, first, second]
    other, this = [json.loads(line) for line in out.read_text().splitlines()[1:]]
    assert other == {"benchmark": "two_versions", "of": "everyday", "version": "other", "name": "msamp_o2", "ms": 12.0,
                     "turns": 3}  # fmt: skip
    assert this == other | {"version": "this", "ms": 6.0, "of_other": 2.0}
