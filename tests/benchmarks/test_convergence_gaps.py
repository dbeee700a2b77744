"""The statistics of benchmarks.convergence, on losses whose gaps are known."""

import json
import random
from pathlib import Path

import pytest

from benchmarks import convergence_tables
from benchmarks.convergence_gaps import chance_of, change_over, gaps_at_length, short_gaps, text_error
from benchmarks.convergence_run import STEPS, VALIDATE, Spec

SHORT = 1024
ENDS = {"bf16_mixed": 0.0, "bf16_with_fp8_mixed": 0.1, "msamp_o2": 0.24}  # gaps in percent


def run(spec: Spec, gap: float) -> dict:
    """A run whose losses lie ``gap`` percent above those of the baseline."""
    times = 1 + gap / 100
    text = random.Random(spec.seed)
    blocks = [times * text.uniform(0.9, 1.3) for _ in range(64)]
    kinds = {"comment": (100, 2.0, 0.5), "keyword": (50, 0.9, 0.7 - gap / 100)}
    return {
        "benchmark": "convergence", "run": str(spec), "text": "a1", "tokens": 32_768 * spec.stop,
        "loss": sum(blocks) / len(blocks),
        "blocks": blocks,
        "validations": {str(s): times * (1 + 9 / s) for s in range(VALIDATE, spec.stop + 1, VALIDATE)},
        "train_loss": [times * (1 + 9 / s) for s in range(128, spec.stop + 1, 128)],
        "by_kind": {k: {"tokens": n, "loss": loss, "accuracy": hits} for k, (n, loss, hits) in kinds.items()},
    }  # fmt: skip


@pytest.fixture(scope="module")
def runs() -> dict[Spec, dict]:
    found = {}
    for level, gap in ENDS.items():
        found[Spec(level, "", 0, STEPS, STEPS)] = run(Spec(level, "", 0, STEPS, STEPS), gap)
        for seed in (1, 2, 3):
            found[Spec(level, "", seed, SHORT, SHORT)] = run(Spec(level, "", seed, SHORT, SHORT), gap * (seed / 2))
    for seed in (1, 2):
        found[Spec("bf16_mixed", "twin", seed, SHORT, SHORT)] = run(
            Spec("bf16_mixed", "twin", seed, SHORT, SHORT), 0.06
        )
    stopped = Spec("bf16_with_fp8_mixed", "coarse", 0, STEPS, 1024)
    return {**found, stopped: run(stopped, 4.0)}


def test_gaps_of_short_runs_are_those_of_pairs(runs: dict[Spec, dict]) -> None:
    found = short_gaps(runs)
    assert found["msamp_o2"] == pytest.approx({1: 0.12, 2: 0.24, 3: 0.36})
    assert found["twin"] == pytest.approx({1: 0.06, 2: 0.06})
    assert set(found) == {"bf16_with_fp8_mixed", "msamp_o2", "twin"}


def test_chance_is_pooled_over_levels(runs: dict[Spec, dict]) -> None:
    chance, freedom = chance_of(short_gaps(runs))
    squares = 2 * 0.05**2 + 2 * 0.12**2 + 2 * 0.06**2  # about each level's mean, and about zero for twins
    assert freedom == 2 + 2 + 2 and chance == pytest.approx((squares / 6) ** 0.5)


def test_the_text_is_a_sample_only_where_blocks_differ_in_their_gaps() -> None:
    base = [1.0 + 0.01 * i for i in range(64)]
    assert text_error([1.003 * loss for loss in base], base) == pytest.approx(0, abs=1e-9)
    uneven = [loss * (1.003 + (0.02 if i % 2 else -0.02)) for i, loss in enumerate(base)]
    assert text_error(uneven, base) == pytest.approx(2 / 8, rel=0.2)  # 2 % of each of 64 blocks


def test_a_gap_that_grows_is_seen_as_a_change() -> None:
    steps = list(range(8192, 16385, 512))
    noise = random.Random(0)
    rise, half = change_over(steps, [0.4 * (s - 8192) / 8192 + noise.gauss(0, 0.02) for s in steps])
    assert rise == pytest.approx(0.4, abs=half) and half < 0.1
    level, half = change_over(steps, [0.2 + noise.gauss(0, 0.02) for _ in steps])
    assert abs(level) < half < 0.1


def test_intervals_hold_chance_and_text(runs: dict[Spec, dict]) -> None:
    found = gaps_at_length(runs)
    assert list(found) == ["bf16_with_fp8_mixed", "msamp_o2"]
    gap = found["msamp_o2"]
    chance, _ = chance_of(short_gaps(runs))
    assert gap.percent == pytest.approx(0.24)
    assert gap.half == pytest.approx(2.447 * chance, rel=1e-3)  # t of 6 degrees of freedom; blocks have equal gaps
    assert gap.change == pytest.approx(0, abs=1e-9)


def test_the_tables_say_what_was_found(runs: dict[Spec, dict], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    origin = {
        "command": "python -m benchmarks.convergence",
        "date": "2026-11-29",
        "gpu": "GPU",
        "gpus": 1,
        "versions": {},
    }
    file = tmp_path / "convergence.jsonl"
    file.write_text("\n".join(json.dumps(line) for line in (origin, *runs.values())))
    monkeypatch.setattr(convergence_tables, "_FILE", file)
    gaps = convergence_tables.gaps()
    assert "at most 0.24 % from ``bf16_mixed``'s (``msamp_o2``); the goal is 0.3 %" in gaps
    assert "+0.10 ± 0.20" in gaps and "python -m benchmarks.convergence" in gaps
    assert "at most 0.24 points from ``bf16_mixed``'s: keyword at ``msamp_o2``" in convergence_tables.by_kind()
    assert "+0.12, +0.24, +0.36" in convergence_tables.short()
    assert "+4.00 % after 1,024 steps, and +0.10 %" in convergence_tables.ablation()
    picture = convergence_tables.curves_picture()
    picture.draw(tmp_path)
    assert picture.data.marks == 5 and (tmp_path / picture.file).stat().st_size > 10_000


def test_runs_of_different_texts_are_not_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    specs = [Spec(level, "", 0, STEPS, STEPS) for level in ENDS]
    lines = [{"command": "python -m benchmarks.convergence"}, *(run(spec, 0.0) for spec in specs)]
    lines[-1]["text"] = "b2"
    file = tmp_path / "convergence.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    monkeypatch.setattr(convergence_tables, "_FILE", file)
    with pytest.raises(ValueError, match="texts a1, b2"):
        convergence_tables.runs()
