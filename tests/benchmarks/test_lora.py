"""The benchmark of LoRA on a small model on the CPU."""

import json

import pytest

from benchmarks import lora


def test_figures_and_errors(monkeypatch, tmp_path):
    monkeypatch.setattr(lora, "WARMUP", 1)
    monkeypatch.setattr(lora, "ROUND", 1)
    monkeypatch.setitem(lora.CONTESTANTS, "broken", {"level": "bf16_with_fp8_mixed", "frozen": "int4"})
    names = [lora.BF16, "broken", "nemo_lowprec bf16_with_fp8_mixed"]
    words = ["lora", "--out", str(tmp_path / "lora.jsonl"), "--batches", "1", "--rounds", "1", "--sequence", "16"]
    monkeypatch.setattr("sys.argv", [*words, "--contestants", *names])
    lora.main()
    _, *figures = [json.loads(line) for line in (tmp_path / "lora.jsonl").read_text().splitlines()]
    assert [(f["name"], f["recomputes"]) for f in figures] == [(n, again) for again in (False, True) for n in names]
    for figure in figures:
        if figure["name"] == "broken":
            assert figure["error"].startswith("ValueError: frozen='int4' must be one of")
            continue
        assert "error" not in figure and figure["tokens_per_s"] > 0 and figure["x"] > 0
        assert figure["loss"] == pytest.approx(figures[0]["loss"], abs=0.05)
        assert 0 < figure["trained"] < figure["parameters"]
