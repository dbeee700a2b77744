"""``nemo-lowprec inspect``, ``doctor`` and ``audit --json``: what they print, and how they end."""

import json
from pathlib import Path

import pytest
import torch

from nemo_lowprec.cli import main
from nemo_lowprec.report.findings import AuditReport
from tests.checkpoint.damage import Trap, sprung
from tests.support import Net, save_at, train

TINY = ["trainer.accelerator=cpu", "precision=msamp_o2", "data.seq_length=16", "data.micro_batch_size=2"]
TINY += [f"model.config.{name}={size}" for name, size in (("num_hidden_layers", 1), ("hidden_size", 64))]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    train(Net(), "bf16_with_fp8_mixed", save_at(folder, 2), max_steps=2)
    return folder / "step=2.ckpt"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_inspect_prints_80_columns(checkpoint: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["inspect", str(checkpoint)]) == 0
    out = capsys.readouterr().out
    # A path is never broken.
    assert max(len(line) for line in out.splitlines() if str(checkpoint) not in line) <= 80
    assert "bf16_with_fp8_mixed(fp8_amax_history_len=1024, fp8_margin=0" in out
    assert "master weights (FP32)" in out and "Amaxes of input: 2 layers, 2 steps" in out


def test_inspect_as_json(checkpoint: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["inspect", str(checkpoint), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["level"] == "bf16_with_fp8_mixed" and found["step"] == 2
    assert found["columns"][0]["elements"] == sum(p.numel() for p in Net().parameters())
    assert [h["layer"] for h in found["histories"]] == ["inp", "inp", "mid", "mid"]


def test_all_layers_of_a_long_model(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    class Long(Net):
        def __init__(self) -> None:
            super().__init__()
            self.more = torch.nn.ModuleList(torch.nn.Linear(128, 128) for _ in range(18))

        def middle(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.more:
                x = x + 0.1 * layer(x)
            return super().middle(x)

    train(Long(), "te_fp8", save_at(tmp_path, 1), max_steps=1)
    capsys.readouterr()
    assert main(["inspect", "step=1.ckpt"]) == 0
    few = capsys.readouterr().out
    assert main(["inspect", "step=1.ckpt", "--all"]) == 0
    every = capsys.readouterr().out
    layers = [*(f"more.{i} " for i in range(18)), "mid ", "inp "]
    assert "4 layers nearer to the median are left out" in few and "left out" not in every
    inputs = few.partition("Amaxes of input")[2].partition("Amaxes of grad_output")[0]
    assert sum(f"\n{layer}" in inputs for layer in layers) == 16
    assert all(f"\n{layer}" in every for layer in layers)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: None, "does not exist"),
        (lambda path: path.mkdir(), "is no checkpoint: it lacks .metadata or meta.pt"),
        (lambda path: path.write_bytes(b""), "is empty"),
        (lambda path: path.write_text("hello"), "is no complete checkpoint"),
        (lambda path: torch.save({"model": torch.zeros(2)}, path), "is no checkpoint of a LightningModule"),
        (lambda path: torch.save({"state_dict": {}, "x": Trap(path.parent)}, path), "opening it may run code"),
    ],
)
@pytest.mark.parametrize("form", [[], ["--json"]])
def test_what_is_no_checkpoint_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture, make: object, message: str, form: list[str]
) -> None:
    make(tmp_path / "x.ckpt")  # type: ignore[operator]
    assert main(["inspect", "x.ckpt", *form]) == 2
    out, error = capsys.readouterr()
    assert not out and error.startswith("nemo-lowprec inspect: x.ckpt ") and message in error
    assert error.count("\n") == 1 and not sprung(tmp_path).exists()


# doctor


def test_doctor_with_and_without_a_model(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["doctor"]) == 0
    without = capsys.readouterr().out
    assert "bf16_with_fp8_subchannel_scaling_mixed" in without and "GEMMs of one layer" not in without
    assert main(["doctor", "model=gpt2_tiny", "data.seq_length=64"]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    assert "GEMMs of one layer, forward and backward, at bf16_with_fp8_mixed with 8 × 64" in out
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("overrides", [[], ["model=gpt2_tiny"]])
def test_doctor_as_json(capsys: pytest.CaptureFixture, overrides: list[str]) -> None:
    assert main(["doctor", *overrides, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["machine"]["packages"]["torch"] == torch.__version__ and found["levels"][0]["level"] == "fp16_amp"
    assert (found["gemms"] is None) == (not overrides)
    if overrides:
        assert {(t["rows"], t["ins"], t["outs"]) for t in found["gemms"]["times"]} >= {(1024, 128, 384)}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model=llama9"], "Unknown model 'llama9'. Choose one of: gpt2,"),
        (["model=megatron_llama_tiny"], "Megatron-core builds llama_tiny here"),
        (["precision=bf16_mixed"], "bf16_mixed has no FP8 GEMMs to be measured"),
        (["precision=fp17"], "Unknown precision level 'fp17'"),
        (["-m", "model=gpt2_tiny,llama_tiny"], "doctor writes nothing, and -m"),
        (["-m", "model=gpt2_tiny,llama_tiny", "--json"], "--json prints one report, and -m makes several runs"),
        (["data=text", "model=llama_100m"], "llama_100m takes its vocabulary from the data, which do not say"),
        (["data.seq_length=5000"], "longer than the model's"),
    ],
)
def test_a_mistake_to_doctor_is_one_sentence(capsys: pytest.CaptureFixture, overrides: list[str], message: str) -> None:
    assert main(["doctor", *overrides]) == 2
    out, error = capsys.readouterr()
    assert message in error and "Traceback" not in error and not out


# audit


def test_audit_as_json(capfd: pytest.CaptureFixture) -> None:
    assert main(["audit", *TINY, "--json"]) == 0
    out = capfd.readouterr().out
    found = json.loads(out)
    assert out.count("\n") == 1
    assert found["level"] == "msamp_o2" and found["agrees"] and all(f["agrees"] for f in found["findings"])


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_an_audit_that_differs_ends_with_1(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch, form: list[str]
) -> None:
    add = AuditReport.add
    # A row that declares FP16 moments where the run keeps FP8 ones.
    wrong = lambda self, column, part, declared, *found: add(  # noqa: E731
        self, column, part, "fp16" if declared == "fp8" and column == "Optimizer states" else declared, *found
    )
    monkeypatch.setattr(AuditReport, "add", wrong)
    assert main(["audit", *TINY, *form]) == 1
    out, error = capsys.readouterr()
    assert "msamp_o2 differs from the chart. Optimizer states of converted: fp16 declared, fp8 found;" in error
    assert "Traceback" not in error
    if form:
        found = json.loads(out)
        assert not found["agrees"] and [f["part"] for f in found["findings"] if not f["agrees"]]
    else:
        assert "DIFFERS" in out


def test_bad_input_to_audit_ends_with_2(capsys: pytest.CaptureFixture) -> None:
    assert main(["audit", "precision=fp17", "--json"]) == 2
    out, error = capsys.readouterr()
    assert not out and "nemo-lowprec audit: Unknown precision level 'fp17'" in error


@pytest.mark.parametrize("command", ["audit", "doctor"])
def test_help_tells_of_json(capsys: pytest.CaptureFixture, command: str) -> None:
    assert main([command, "--help"]) == 0
    assert "--json" in capsys.readouterr().out
