"""Figures of whole steps on Megatron-core, of the runs that were made."""

import pytest

from benchmarks.megatron_step import write
from benchmarks.record import read


def run(level, path, seconds, index=0):
    return {"level": level, "path": path, "round": index, "seconds": seconds, "gib": 40.0}


def test_what_was_not_measured_again_stays(tmp_path):
    out = tmp_path / "step.jsonl"
    first = [
        run(level, path, 0.2) for level in ("bf16_mixed", "msamp_o2+fp16") for path in ("bare loop", "transformers")
    ]
    write(out, first, 1)
    write(out, [run("bf16_mixed", "bare loop", 0.4)], 2)
    write(out, [run("bf16_mixed", "bare loop", seconds, index) for index, seconds in enumerate((0.1, 0.3))], 1)
    found = {(f["level"], f["path"], f["gpus"]): f["ms"] for f in read(out)[1]}
    assert len(read(out)[1]) == len(found) == 5
    assert found["bf16_mixed", "bare loop", 1] == found["bf16_mixed", "transformers", 1] == pytest.approx(200)
    assert found["bf16_mixed", "bare loop", 2] == pytest.approx(400)


def test_a_path_is_beside_the_bare_loop_of_its_round(tmp_path):
    times = {"bare loop": (0.2, 0.4, 0.3), "MegatronStrategy": (0.1, 0.4, 0.2)}
    runs = [run("bf16_mixed", path, s, index) for path, of in times.items() for index, s in enumerate(of)]
    write(
        tmp_path / "step.jsonl", [*runs, {"level": "bf16_mixed", "path": "transformers", "round": 0, "error": "why"}], 1
    )
    bare, ours, failed = read(tmp_path / "step.jsonl")[1]
    assert (bare["of_bare"], ours["of_bare"]) == (1.0, 1.5)  # the median of 2, 1 and 1.5
    assert (ours["ms"], ours["ms_min"], ours["ms_max"], ours["rounds"]) == (200.0, 100.0, 400.0, 3)
    assert failed["error"] == "why" and "ms" not in failed
