"""benchmarks.watched: the extremes of a run whose numbers are known, and of a run that trained."""

import json
import sys

import numpy as np
import pytest
import torch

from benchmarks import watched
from benchmarks.record import lines
from nemo_lowprec import monitor, prepare
from nemo_lowprec.report.monitor import read_run


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Four steps of MS-AMP O2, every second one sampled."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64))
    model, optimizer = prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-5), "msamp_o2", backend="reference")
    place = tmp_path_factory.mktemp("run")
    with monitor(model, place, every_n_steps=2) as watch:
        for _ in range(4):
            loss = model(torch.randn(32, 64)).float().pow(2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            watch.add_loss(loss)
    return place


def test_extremes_are_those_of_all_layers_and_samples(folder):
    run = read_run(folder)
    rows = [row for row in run.operands.rows if row[1] == "input"]
    found = watched.operand(run, "input")
    numbers = run.operands.metrics["sqnr"].matrix(rows)
    assert numbers.shape == (2, len(run.steps))
    assert found["sqnr"] == round(numbers.min(), 4) and 25 < found["sqnr"] < 35
    step = run.steps.index(found["sqnr_step"])
    assert found["sqnr"] == round(run.operands.of("sqnr", (found["sqnr_at"], "input"))[step], 4)
    assert found["underflow"] == round(run.operands.metrics["underflow"].matrix(rows).max(), 4)


def test_lost_updates_are_medians_over_the_layers_weights(folder):
    run = read_run(folder)
    found = watched.lost(run)
    of = [run.params.of("lost", (f"{layer}.weight",)) for layer in ("0", "2")]
    assert found == {str(s): round(float(np.median(at)), 4) for s, *at in zip(run.steps, *of, strict=True)}
    assert max(found.values()) > 0  # updates of 1e-5 are lost in FP16


def test_figures_of_other_runs_stay(folder, tmp_path, monkeypatch):
    out = tmp_path / "watched.jsonl"
    other = {"benchmark": "watched", "level": "bf16_mixed", "parameters": 1, "steps": 1}
    out.write_text("".join(json.dumps(line) + "\n" for line in ({"command": "python x"}, other)))
    for _ in range(2):
        monkeypatch.setattr(sys, "argv", ["watched", str(folder), "--out", str(out)])
        watched.main()
    figures = [line for line in lines(out) if "command" not in line]
    assert [f["level"] for f in figures] == ["bf16_mixed", "msamp_o2"]
    assert figures[1]["steps"] == 4 and figures[1]["samples"] == len(read_run(folder).steps)
    assert set(figures[1]["operands"]) == {"input", "weight", "grad_output"}
