"""The benchmark of whole training steps: what it compiles, who takes part, and its table and picture."""

import pytest
from torch import nn

from benchmarks import everyday, everyday_models, everyday_tables
from benchmarks.everyday_contestants import CONTESTANTS, EAGER, OURS, TE_LAYERS, names, repeated_blocks
from benchmarks.everyday_models import MODELS
from benchmarks.record import Record

LLAMA, LARGEST = "Llama 100M, 8 x 2048", "Llama 8B-shaped, 2 x 4096"


def figure(name, x):
    return {"name": name, "ms": 100 / x, "x": x, "gpu_ms": 80.0, "gpu_x": 1.25}


@pytest.fixture
def results(tmp_path, monkeypatch):
    path = tmp_path / "everyday.jsonl"
    monkeypatch.setattr(everyday_tables, "_RESULTS", path)
    record = Record(path)
    for model in ("timm ViT-L, batch 64", "BERT-large, 32 x 512"):
        for name, x in ((EAGER, 1.0), (f"{EAGER}, blocks compiled", 1.2), (f"{OURS}msamp_o2", 1.8)):
            record.add(benchmark="everyday", model=model, **figure(name, x))
        record.add(benchmark="everyday", model=model, **figure(f"{OURS}bf16_with_fp8_mixed", 0.5 * len(model) / 10))
        record.add(benchmark="everyday", model=model, name="te.Linear, FP8", error="OutOfMemoryError: 80 GiB")
    return path


def test_blocks_are_the_innermost_repeated_children():
    stages = nn.Sequential(
        *[nn.ModuleDict({"blocks": nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))}) for _ in range(3)]
    )
    model = nn.ModuleDict({"stages": stages, "mixed": nn.Sequential(nn.Linear(4, 4), nn.ReLU())})
    assert repeated_blocks(model) == [m for s in stages for m in s["blocks"]]


def test_only_who_was_asked_for_takes_part():
    assert not any(CONTESTANTS[name].compiles for name in names(MODELS[LLAMA], None, compiled=False))
    everybody = names(MODELS[LARGEST], None, compiled=True)
    assert everybody == list(CONTESTANTS)
    of_large_models = {name for name in everybody if name == TE_LAYERS or "FP8 head" in name or "fast_accum" in name}
    assert len(of_large_models) == 7
    assert set(everybody) - set(names(MODELS[LLAMA], None, compiled=True)) == of_large_models
    compiled = f"{OURS}msamp_o2, blocks compiled"
    assert names(MODELS[LLAMA], ["msamp_o2, blocks"], False) == [compiled, f"{compiled}, reduce-overhead"]


@pytest.mark.skipif(not everyday_models.SMALL, reason="models are small without a GPU only")
def test_a_contestant_that_fails_leaves_the_others(monkeypatch):
    def fail(task):
        raise RuntimeError("no memory")

    monkeypatch.setitem(CONTESTANTS, "broken", everyday.Contestant(fail))
    ours = f"{OURS}bf16_with_fp8_mixed"
    found = {f["name"]: f for f in everyday.measure(LLAMA, [EAGER, "broken", ours], rounds=2, steps=1)}
    assert list(found) == ["broken", ours, EAGER]
    assert found["broken"] == {"name": "broken", "error": "RuntimeError: no memory"}
    assert found[ours]["x"] == pytest.approx(found[ours]["beside_ms"] / found[ours]["ms"], abs=2e-3)
    assert all(0 < found[name]["passes_ms"] < found[name]["ms"] for name in (ours, EAGER))
    assert found[ours]["loss"] == pytest.approx(found[EAGER]["loss"], rel=1e-2)
    assert found[ours]["rounds"] == found[EAGER]["rounds"] == 2


@pytest.mark.skipif(not everyday_models.SMALL, reason="models are small without a GPU only")
def test_a_contestant_whose_loss_is_not_finite_has_no_figures(monkeypatch):
    def diverged(task):
        training = CONTESTANTS[EAGER].make(task)
        training.optimizer.param_groups[0]["lr"] = float("nan")
        return training

    monkeypatch.setitem(CONTESTANTS, "diverged", everyday.Contestant(diverged))
    (found,) = everyday.measure(LLAMA, ["diverged"], rounds=1, steps=1)
    assert found == {"name": "diverged", "error": "ArithmeticError: the loss is nan after 16 steps"}


def test_the_tables_have_gains_and_errors(results):
    sentence, table, *_ = everyday_tables.everyday().split("\n\n")
    assert "``msamp_o2`` with default arguments is 1.80 ×" in " ".join(sentence.split())
    header, *rows = (line for line in table.splitlines() if "===" not in line)
    assert header.split() == ["Model", "BF16,", "ms", "(GPU)", "bf16_with_fp8_mixed", "msamp_o2"] and len(rows) == 2
    assert rows[0].split("  ")[0] == "timm ViT-L, batch 64" and rows[0].endswith("1.80 (1.25)")
    sentence, table, *_ = everyday_tables.others().split("\n\n")
    assert "between 1.50 and 1.50 × as fast as the fastest of BF16 autocast" in " ".join(sentence.split())
    assert table.splitlines()[3].split()[-2:] == ["1.80", "–"]
    assert "1.20" in table and "out of memory" in table


def test_compiled_contestants_have_a_column(results):
    record, compiled = Record(results), f"{OURS}msamp_o2, blocks compiled, reduce-overhead"
    for model in ("timm ViT-L, batch 64", "BERT-large, 32 x 512"):
        for name, x in ((EAGER, 1.0), (f"{EAGER}, blocks compiled", 1.2), (f"{OURS}msamp_o2", 1.8)):
            record.add(benchmark="everyday", model=model, **figure(name, x))
    record.add(benchmark="everyday", model="timm ViT-L, batch 64", **figure(compiled, 2.4))
    record.add(benchmark="everyday", model="BERT-large, 32 x 512", name=compiled, error="ValueError: no")
    sentence, table, *_ = everyday_tables.others().split("\n\n")
    assert "between 1.50 and 2.00 × as fast as the fastest of BF16 autocast" in " ".join(sentence.split())
    rows = [line.split() for line in table.splitlines()[3:5]]
    assert rows[0][-2:] == ["1.80", "2.40"] and "1.80" in rows[1] and "2.40" not in rows[1]


def test_the_table_of_the_8b_shape_has_passes(results):
    record = Record(results)
    for name, passes in ((EAGER, 200.0), (TE_LAYERS, 110.0), (f"{OURS}msamp_o2, FP8 head", 95.0)):
        more = {"passes_ms": passes, "passes_x": 200.0 / passes, "gpu_kinds": {"other": 13.0}}
        record.add(benchmark="everyday", model=LARGEST, **figure(name, 200.0 / passes), **more)
    sentence, table, *_ = everyday_tables.large().split("\n\n")
    expected = "Forward and backward take 95.0 ms at msamp_o2, FP8 head, and 110.0 where the model is rewritten"
    assert expected in " ".join(sentence.split())
    assert table.splitlines()[3].split() == ["msamp_o2,", "FP8", "head", "47.5", "2.11", "95.0", "2.11", "13.0"]


def test_the_picture_has_pairs_of_bars(results, tmp_path):
    picture = everyday_tables.everyday_picture()
    assert [bar.ours for bar in picture.data.bars] == [True, False] * 2
    assert picture.data.bars[1].text == "1.20 × (83 ms)" and "(blocks compiled)" in picture.data.bars[1].label
    assert len({bar.label for bar in picture.data.bars}) == 4
    pytest.importorskip("matplotlib")
    picture.draw(tmp_path)


def test_without_results_the_table_says_which_file_is_missing(tmp_path, monkeypatch):
    monkeypatch.setattr(everyday_tables, "_RESULTS", tmp_path / "everyday.jsonl")
    for make in (everyday_tables.everyday, everyday_tables.everyday_picture):
        with pytest.raises(FileNotFoundError, match="everyday"):
            make()
