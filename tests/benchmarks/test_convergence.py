"""The runs of benchmarks.convergence: their specs, their pieces, and what they tell of a model."""

import json
import math
import time
from pathlib import Path

import numpy as np
import pytest
from pygments.lexers import CLexer

from benchmarks import convergence_run
from benchmarks.convergence_run import Spec, train
from benchmarks.convergence_text import KINDS, digest, kinds_of, write_kinds
from nemo_lowprec.data import PreparedData, prepare_data
from nemo_lowprec.data.corpus import list_documents, split_documents
from nemo_lowprec.data.packed import PackedDataset

SOURCE = """#include <stdio.h>
/* adds */
static int add(int left, int right)
{
\treturn left + 2;
}
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> PreparedData:
    place = tmp_path_factory.mktemp("convergence")
    texts = place / "texts"
    texts.mkdir()
    for i in range(40):
        (texts / f"{i}.c").write_text("".join(SOURCE.replace("add(", f"add_{i}_{j}(") for j in range(8)))
    prepared = prepare_data(place / "data", texts, vocab_size=300, validation_fraction=0.3)
    write_kinds(prepared, split_documents(list_documents(texts), 0.3, 0)[1])
    return prepared


def test_each_character_has_the_kind_that_the_language_gives_it() -> None:
    kinds = kinds_of(SOURCE, CLexer(stripnl=False, ensurenl=False))

    def kind(of: str, which: int = 0) -> str:
        at = [i for i in range(len(SOURCE)) if SOURCE.startswith(of, i)][which]
        (found,) = {KINDS[k] for k in kinds[at : at + len(of)]}
        return found

    assert kind("#include") == "preprocessor"
    assert kind("/* adds */") == "comment"
    assert kind("static") == kind("return") == "keyword"
    assert kind("left") == "new name"
    assert kind("left", 1) == "name seen before"
    assert kind("2") == "number"
    assert kind("+") == kind(";") == "punctuation"
    assert kind("\t") == "space"
    assert set(kinds_of("any text", None)) == {KINDS.index("other")}


def test_kinds_lie_beside_the_tokens_that_they_are_of(data: PreparedData) -> None:
    tokens = PackedDataset(data.validation_prefix, 64, 0)
    kinds = PackedDataset(data.path / "kinds", 64, 0)
    tokenizer = data.load_tokenizer()
    assert len(kinds) == len(tokens)
    seen = {
        tokenizer.decode([token]).strip()
        for i in range(len(tokens))
        for token, kind in zip(tokens[i]["labels"].tolist(), kinds[i]["labels"].tolist(), strict=True)
        if KINDS[kind] == "comment"
    }
    assert "".join(seen) and "".join(seen).strip("/* ads") == ""


def test_a_spec_is_read_as_it_is_written() -> None:
    assert Spec.parse("msamp_o2:1~1024").stop == 1024
    for text in ("bf16_mixed:0", "msamp_o2+coarse:1@128", "bf16_mixed+twin:2~1024", "msamp_o2:1~1024@128"):
        assert str(Spec.parse(text)) == text
    with pytest.raises(ValueError, match=r"stochastic, coarse, twin, watched"):
        Spec.parse("msamp_o2+finer:1")
    with pytest.raises(ValueError, match=r"LEVEL\[\+VARIANT\]:SEED"):
        Spec.parse("bf17:0")


@pytest.mark.parametrize("level", ["bf16_mixed", "msamp_o2"])
def test_a_run_in_pieces_ends_as_a_run_without_a_pause(
    data: PreparedData, level: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {
        "PRESET": "llama_tiny", "SEQUENCE": 32, "BATCH": 4, "STEPS": 12, "EVERY": 2, "VALIDATE": 4, "VALIDATED": 8,
        "BLOCK": 2, "WORKERS": 0,
    }.items():  # fmt: skip
        monkeypatch.setattr(convergence_run, name, value)
    spec = Spec(level, "", 3, 12, 12)
    results = []
    for place, deadlines in ((tmp_path / "whole", [math.inf]), (tmp_path / "parts", [time.time()] * 3 + [math.inf])):
        place.mkdir()
        for deadline in deadlines:
            assert not list(place.glob("*.json"))
            train(spec, data.path, place, deadline)
        (done,) = place.iterdir()
        results.append(json.loads(done.read_text()))
    whole, parts = results
    assert (whole.pop("pieces"), parts.pop("pieces")) == (1, 4)
    assert min(whole.pop("seconds"), parts.pop("seconds")) > 0
    assert whole == parts
    assert whole["text"] == digest(data.path)
    assert len(whole["train_loss"]) == 6 and list(whole["validations"]) == ["4", "8", "12"]
    kinds = whole["by_kind"]
    loss = sum(k["loss"] * k["tokens"] for k in kinds.values()) / sum(k["tokens"] for k in kinds.values())
    assert loss == pytest.approx(whole["loss"], abs=1e-4)
    assert np.mean(whole["blocks"]) == pytest.approx(whole["loss"], rel=0.05)
