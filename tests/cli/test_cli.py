"""The command ``nemo-lowprec``, run for real."""

import csv
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from nemo_lowprec.chart import CHART
from nemo_lowprec.cli import main

ROOT = Path(__file__).parents[2]
TINY = [
    "+model.config={hidden_size:32,intermediate_size:64,num_hidden_layers:1,num_attention_heads:2,num_key_value_heads:1}",
    "data=megatron",
    "data.seq_length=32",
    "data.micro_batch_size=4",
    "data.num_workers=0",
    "data.validation_samples=8",
    "trainer.accelerator=cpu",
    "trainer.log_every_n_steps=1",
    "+trainer.enable_progress_bar=false",
]


@pytest.fixture
def tiny(data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.chdir(tmp_path)
    return [*TINY, f"data.train_prefix={data_dir / 'train'}", f"data.validation_prefix={data_dir / 'validation'}"]


def test_pretrain_trains_logs_and_saves(tiny: list[str], tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    argv = sys.argv
    override = ["precision=bf16_with_fp8_mixed", "precision.fp8_amax_history_len=16", "precision.backend=reference"]
    assert main(["pretrain", *tiny, *override, "trainer.max_steps=3"]) == 0
    assert sys.argv is argv
    (out,) = tmp_path.glob("outputs/*/*")
    with open(out / "csv" / "metrics.csv") as file:
        rows = list(csv.DictReader(file))
    assert sum(bool(row["train/loss"]) for row in rows) == 3
    assert sum(bool(row["val/loss"]) for row in rows) == 1
    assert list((out / "tensorboard").glob("events*"))
    saved = torch.load(out / "checkpoints" / "last.ckpt", weights_only=False)
    assert saved["global_step"] == 3
    printed = capsys.readouterr().out
    assert "fp8_amax_history_len=16" in printed and f"{out.relative_to(tmp_path)}/checkpoints/best.ckpt" in printed
    resume = ["trainer.max_steps=4", f"ckpt_path={out / 'checkpoints' / 'last.ckpt'}", "output_dir=resumed"]
    assert main(["pretrain", *tiny, *override, *resume]) == 0
    assert torch.load("resumed/checkpoints/last.ckpt", weights_only=False)["global_step"] == 4


def test_multirun_over_levels(tiny: list[str], tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    sweep = ["-m", "precision=fp16_mixed,bf16_mixed,bf16_with_fp8_mixed", "trainer.max_steps=1", "logger=csv"]
    assert main(["pretrain", *tiny, *sweep]) == 0
    (out,) = tmp_path.glob("outputs/multirun/*/*")
    assert sorted(path.name for path in out.iterdir() if path.is_dir()) == [
        "0_fp16_mixed",
        "1_bf16_mixed",
        "2_bf16_with_fp8_mixed",
    ]
    table = capsys.readouterr().out.rpartition("Runs of this sweep")[2]
    for job, level in enumerate(("fp16_mixed", "bf16_mixed", "bf16_with_fp8_mixed")):
        folder = out / f"{job}_{level}"
        assert f"precision={level}" in (folder / ".hydra" / "overrides.yaml").read_text()
        (row,) = (line for line in table.splitlines() if f" {folder.name} " in line)
        with open(folder / "csv" / "metrics.csv") as file:
            (loss,) = (r["val/loss"] for r in csv.DictReader(file) if r["val/loss"])
        assert f" {float(loss):.4f} " in row and "failed" not in row
        assert torch.load(folder / "checkpoints" / "last.ckpt", weights_only=False)["global_step"] == 1


@pytest.mark.slow
def test_script_is_the_command(tiny: list[str], tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "scripts" / "pretrain.py"), *tiny, "trainer.max_steps=1"]
    env = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert "Validation loss after" in done.stdout


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["precision=fp17"], "Unknown precision level 'fp17'. Choose one of: fp16_amp, te_fp8,"),
        (["-m", "precision=bf16_mixed,fp17"], "Unknown precision level 'fp17'"),
        (["precision=msamp_o4"], "Unknown precision level 'msamp_o4'. Choose one of: fp16_amp, te_fp8, msamp_o1,"),
        (["precision=msamp_o2", "precision.half=fp32"], "half='fp32' must be 'bf16' or 'fp16'"),
        (["precision=msamp_o2", "precision.loss_scale=8.0"], "loss_scale=8.0 has no effect in bf16"),
        (["precision=fp16_mixed", "precision.fp8_margin=1"], "fp16_mixed takes no 'fp8_margin'. Levels that do:"),
        (["precision.fp8_margn=1"], "bf16_with_fp8_mixed has no argument 'fp8_margn'. It takes: fp8, fp8_margin,"),
        (["precision=bf16_mixed", "+precision.margin=1"], "bf16_mixed has no argument 'margin'"),
        (["precision.fp8=e5m2"], "fp8='e5m2' is no FP8 format"),
        (["precision=bf16_mixed,fp16_mixed"], "Ambiguous value for argument"),
        (
            ["strategy=fsdp9"],
            "Unknown strategy 'fsdp9'. Choose one of: ddp, lowprec_ddp, lowprec_megatron, lowprec_shar",
        ),
        (["model=llama9"], "Unknown model 'llama9'. Choose one of: gpt2, gpt2_tiny,"),
        (["model=["], "no viable alternative"),
        (["model.lr=fast"], "lr='fast' must be a number"),
        (["model.lr=1e-4", "model.min_lr=1"], "min_lr=1 must be between 0 and lr=0.0001"),
        (["trainer.max_steps=-5"], "`max_steps` must be a non-negative integer or -1"),
        (["+trainer.max_stepz=5"], "unexpected keyword argument 'max_stepz'"),
        (["+trainer.precision=16-mixed"], "Received both `precision=16-mixed` and `plugins="),
        (["data=text"], "data.data_dir"),
        (["data.source=nowhere", "data.data_dir=x"], "nowhere does not exist"),
        (["ckpt_path=nowhere.ckpt"], "ckpt_path='nowhere.ckpt' does not exist"),
    ],
)
def test_mistake_is_one_sentence(
    overrides: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["pretrain", "trainer.accelerator=cpu", *overrides]) == 2
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error
    assert not list(tmp_path.rglob("*.ckpt"))


@pytest.mark.parametrize("command", ["pretrain", "audit"])
def test_megatron_core_without_a_gpu_is_one_sentence(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main([command, "experiment=megatron_tiny"]) == 2
    assert f"nemo-lowprec {command}: MegatronStrategy needs an NVIDIA GPU" in capsys.readouterr().err


def test_a_model_on_megatron_core_without_its_strategy_is_one_sentence(
    tiny: list[str], capsys: pytest.CaptureFixture
) -> None:
    assert main(["pretrain", *tiny, "model=megatron_llama_tiny"]) == 2
    assert "nemo-lowprec pretrain: MegatronGPT is built by MegatronStrategy" in capsys.readouterr().err


def test_mistake_shows_where_it_came_from_on_request(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NEMO_LOWPREC_TRACEBACK", "1")
    with pytest.raises(ValueError, match="fp17"):
        main(["pretrain", "precision=fp17"])


def test_defect_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An error out of another library is no sentence about the input."""
    monkeypatch.chdir(tmp_path)

    def broken(arguments: object) -> None:
        torch.zeros(2).view(3).sum()
        raise AssertionError

    def broken_value(arguments: object) -> None:
        int("x")
        raise AssertionError

    from nemo_lowprec import cli

    monkeypatch.setitem(cli._COMMANDS, "levels", broken)
    with pytest.raises(RuntimeError):
        main(["levels"])
    monkeypatch.setitem(cli._COMMANDS, "levels", broken_value)
    with pytest.raises(ValueError):
        main(["levels"])
    monkeypatch.setattr("nemo_lowprec.strategies.megatron.check_megatron", lambda: broken(None))
    with pytest.raises(RuntimeError, match="shape"):
        main(["pretrain", "strategy=lowprec_megatron"])


def test_levels_prints_the_chart(capsys: pytest.CaptureFixture) -> None:
    assert main(["levels"]) == 0
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 80
    rows = [line.split() for line in printed.splitlines() if line.partition(" ")[0] in CHART]
    assert rows == [[c.replace(", FP8 with fp8_params", "*") for c in row.columns().values()] for row in CHART.values()]


def test_prepare_data(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    source = tmp_path / "texts"
    source.mkdir()
    for i in range(20):
        (source / f"{i}.txt").write_text(f"text number {i} " * 30)
    out = tmp_path / "out"
    arguments = ["--source", str(source), "--out", str(out), "--vocab-size", "300", "--validation-fraction", "0.3"]
    assert main(["prepare-data", *arguments]) == 0
    assert {"train.bin", "train.idx", "validation.bin", "validation.idx", "tokenizer.json"} <= {
        path.name for path in out.iterdir()
    }
    assert "tokens" in capsys.readouterr().out
    assert main(["prepare-data", "--source", str(tmp_path / "nowhere"), "--out", str(tmp_path / "y")]) == 2
    assert "nowhere does not exist" in capsys.readouterr().err


def test_a_pretrained_model_is_exported_and_generates(
    tiny: list[str], data_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert main(["pretrain", *tiny, "precision=msamp_o2", "precision.backend=reference", "trainer.max_steps=1"]) == 0
    (checkpoint,) = tmp_path.glob("outputs/*/*/checkpoints/last.ckpt")
    capsys.readouterr()
    assert main(["export", str(checkpoint), "exported", "--dtype", "fp16", "--tokenizer", str(data_dir)]) == 0
    printed = capsys.readouterr().out
    assert "msamp_o2" in printed and "weights (FP16), the only copy" in printed
    model, tokenizer = (c.from_pretrained("exported") for c in (AutoModelForCausalLM, AutoTokenizer))
    assert model.dtype == torch.float16
    ids = tokenizer("Chapter", return_tensors="pt").input_ids
    new = model.generate(ids, max_new_tokens=4, do_sample=False)
    assert new.shape[1] > ids.shape[1] and tokenizer.decode(new[0]).startswith("Chapter")


@pytest.mark.parametrize("arguments", [[], ["contrast"], ["export"], ["prepare-data"], ["report"]])
def test_command_line_that_is_not_one(arguments: list[str], capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as error:
        main(arguments)
    assert error.value.code == 2
    assert "usage: nemo-lowprec" in capsys.readouterr().err
