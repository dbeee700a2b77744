"""Advice from a monitored run: the layers that are spoiled, and the line that keeps them back."""

import json

import pytest

from nemo_lowprec.cli import main
from nemo_lowprec.report import advise_run
from tests.runs import layer_names, write_run

LAYERS = layer_names(2)


def test_a_spoiled_layer_is_kept_back_in_the_line_to_paste(tmp_path, capsys):
    write_run(tmp_path, spoiled=LAYERS[5])
    found = advise_run(tmp_path)
    assert list(found.kept_back) == [LAYERS[5]] and "SQNR of the input" in found.kept_back[LAYERS[5]]
    assert found.python == f'plugins=bf16_with_fp8_mixed(fp8_amax_history_len=16, skip=["{LAYERS[5]}"])'
    assert found.hydra == (
        "precision=bf16_with_fp8_mixed precision.fp8_amax_history_len=16 "
        f"'precision.skip=[{LAYERS[5]}]'"
    )  # fmt: skip
    assert main(["advise", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert found.python in printed and found.hydra in printed
    assert all(len(line) <= 80 for line in printed.splitlines() if "precision=" not in line and "plugins=" not in line)


def test_layers_of_one_name_are_a_glob(tmp_path):
    write_run(tmp_path)
    path = tmp_path / "monitor.jsonl"
    lines = path.read_text().splitlines()
    spoiled = [layer for layer in LAYERS if layer.endswith("down_proj")]
    rows, out = [], []
    for line in lines:
        record = json.loads(line)
        if record["record"] == "operands":
            rows = record["rows"]
        if record["record"] == "sample":
            at = [i for i, (layer, kind) in enumerate(rows) if layer in spoiled and kind == "input"]
            for i in at:
                record["operands"]["underflow"][i] = 60.0
        out.append(json.dumps(record))
    path.write_text("\n".join(out) + "\n")
    assert advise_run(tmp_path).skip == ("*.down_proj",)


def test_a_run_as_it_should_be_keeps_nothing_back(tmp_path):
    write_run(tmp_path)
    found = advise_run(tmp_path)
    assert found.kept_back == {} and "No layer to keep back" in " ".join(found.lines())


def test_bad_input_is_one_sentence(tmp_path, capsys):
    assert main(["advise", str(tmp_path)]) == 2
    assert "has no monitor.jsonl" in capsys.readouterr().err
    write_run(tmp_path / "half", "bf16_mixed")
    with pytest.raises(ValueError, match="quantizes no operands"):
        advise_run(tmp_path / "half")
