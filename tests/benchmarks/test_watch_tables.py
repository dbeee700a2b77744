"""Tables of the monitor's cost, of profiles and of advice: what the sentence above says, and one row a figure."""

import json

import pytest

from benchmarks import watch_tables
from nemo_lowprec.report.profile.step_profile import PARTS as NAMES

ORIGIN = {"command": "python -m benchmarks.x", "date": "2026-01-02", "gpu": "A", "gpus": 1, "versions": {"torch": "2"}}
PARTS = dict.fromkeys(NAMES, 0.0)


@pytest.fixture
def table(tmp_path):
    """The table that a function makes of figures: its sentence, and the cells of its rows."""

    def made(make, *figures, done="Measured"):
        path = tmp_path / "results.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in (ORIGIN, *figures)))
        sentence, lines, measured, _, command = make(path).split("\n\n")
        assert measured == f"{done} on A, 2026-01-02, torch 2:" and command.strip() == ORIGIN["command"]
        return sentence, [line.split() for line in lines.splitlines()[3:-1]]

    return made


def test_the_cost_of_the_monitor_is_the_largest_at_each_interval(table):
    memory = {"benchmark": "monitor_memory", "peak_mib": {"plain": 1024.0, "watched": 1536.0}}
    costs = {("A", 50): 0.5, ("A", 10): 2.0, ("B", 50): 0.25, ("B", 10): 2.5}
    figures = [
        {"benchmark": "monitor", "model": model, "level": "x", "every": every, "ms": 3.0, "gpu_percent": cost,
         "overhead_percent": -1.0}
        for (model, every), cost in costs.items()
    ]  # fmt: skip
    sentence, rows = table(watch_tables.monitor, *({**memory, "model": m, "level": "x"} for m in "AB"), *figures)
    assert sentence.startswith("The kernels of the monitor take up to 0.5 % at every 50 and 2.5 % at every 10 steps ")
    assert rows == [
        ["A", "x", "0.50", "-1.0", "2.00", "-1.0", "1.0", "0.5"],
        ["B", "x", "0.25", "-1.0", "2.50", "-1.0", "1.0", "0.5"],
    ]


def test_profiles_have_one_row_of_bf16_a_case_and_no_column_of_a_part_that_takes_no_time(table):
    bf16, low = ({"ms": ms, "parts": {**PARTS, "gemm": ms - 1, "waits": 1.0}} for ms in (6.0, 4.0))
    case = {"benchmark": "profile", "preset": "llama", "batch": 1, "sequence": 8, "bf16": bf16}
    other = {**bf16, "ms": 8.0}  # the BF16 run beside the second level
    runs = {**case, "level": "one", "low": low}, {**case, "level": "two", "low": low, "bf16": other}
    sentence, rows = table(watch_tables.profiles, *runs)
    assert sentence.startswith("A step is 1.50 × to 2.00 × as fast as in BF16")
    assert rows == [
        ["llama,", "1", "×", "8", "6.0", "5.0", "1.0"],
        ["one", "4.0", "6.0", "1.50", "3.0", "1.0"],
        ["two", "4.0", "8.0", "2.00", "3.0", "1.0"],
    ]


def test_operands_of_the_longest_run_are_named_in_the_sentence(table):
    def run(level, steps, sqnr):
        numbers = {"sqnr": sqnr, "underflow": 0.5, "saturation": 0.25}
        operand = numbers | {f"{name}_step": 1234 for name in numbers}
        return {
            "benchmark": "watched", "level": level, "parameters": 2_000_000, "device": "CPU", "steps": steps,
            "samples": 4, "operands": {"input": operand, "grad_output": operand | {"sqnr": sqnr - 6}},
        }  # fmt: skip

    sentence, rows = table(watch_tables.watched, run("one", 100, 20.0), run("two", 2000, 31.0), done="Summed up")
    assert "In 4 samples of 2,000 steps of a model of 2 M parameters (CPU)" in sentence.replace("\n", " ")
    assert "31.0 dB or more" in sentence.replace("\n", " ") and "25.0 dB or more" in sentence.replace("\n", " ")
    assert [row[:5] for row in rows] == [
        ["``one``,", "2", "M", "input", "20.0"],
        ["``one``,", "2", "M", "gradient", "14.0"],
        ["``two``,", "2", "M", "input", "31.0"],
        ["``two``,", "2", "M", "gradient", "25.0"],
    ]


def test_lost_updates_are_those_of_the_longest_runs(tmp_path):
    def run(level, steps, most):
        return {
            "benchmark": "watched", "level": level, "steps": steps,
            "lost": {str(step): most * step / steps for step in range(10, steps + 1, 10)},
        }  # fmt: skip

    path = tmp_path / "results.jsonl"
    figures = run("zero", 30, 9.0), run("one", 300, 0.0), run("two", 300, 45.0)
    path.write_text("\n".join(map(json.dumps, (ORIGIN, *figures))))
    sentence, lines = watch_tables.lost(path).split("\n\n")
    assert sentence.startswith("At ``two`` an update does not change 2 % of the median weight's")
    assert "and 45 % in the last step" in sentence.replace("\n", " ")
    rows = [line.split() for line in lines.splitlines()[3:-1]]
    assert rows == [["``one``", *["0.0"] * 5], ["``two``", "1.5", "15.0", "30.0", "37.5", "45.0"]]


def test_every_part_of_a_profile_has_a_heading():
    assert set(watch_tables._PARTS) == set(PARTS)


def test_advice_is_off_by_the_largest_difference_of_either_sign(table):
    told = {"benchmark": "advise_level", "case": "llama_8b", "batch": 1, "sequence": 8}
    told |= {"expected_gib": 9.8, "expected_ms": 110.0}
    real = {"ms": 100.0, "peak_gib": 10.0, "bytes_of_real": 0.98, "time_of_real": 1.1}
    error = {"error": "not run: does not fit by the plan"}
    other = {**told, "case": "llama_100m", "level": "a", **real, "bytes_of_real": 0.5}
    figures = other, {**told, "level": "a", **real}, {**told, "level": "b", **error}
    sentence, rows = table(watch_tables.advice, *figures)
    assert sentence.startswith("Of llama_8b, 1 × 8, ``advise`` was at most 2.0 % off in bytes and 10 % off in time.")
    assert rows == [
        ["a", "9.8", "10.0", "0.980", "110", "100", "1.100"],
        ["b", "9.8", "not", "run", "110", "not", "run"],
    ]
