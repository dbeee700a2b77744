"""``nemo-lowprec advise``: the groups of ``pretrain``, one GPU."""

from pathlib import Path

import pytest
import torch

from nemo_lowprec.conf import advise_job
from nemo_lowprec.models import CausalLM
from tests.auto import made_up_times
from tests.called import printed, refusal

pytestmark = pytest.mark.usefixtures("nowhere")
LEVELS = "precision=bf16_mixed,bf16_with_fp8_current_scaling_mixed"


def arguments(data_dir: Path, *overrides: str) -> list[str]:
    data = [
        "data=text",
        f"data.data_dir={data_dir}",
        f"data.source={data_dir.parent / data_dir.name.removesuffix('_prepared')}",
    ]
    data += ["data.vocab_size=400", "data.validation_fraction=0.2", "data.seq_length=32", "data.num_workers=0"]
    return ["advise", *data, *overrides]


def advised(capsys: pytest.CaptureFixture, data_dir: Path, *overrides: str) -> str:
    out = printed(capsys, *arguments(data_dir, *overrides))
    assert not [path for path in Path.cwd().iterdir() if path.suffix != ".ckpt"]
    return out


def refused(capsys: pytest.CaptureFixture, data_dir: Path, *overrides: str) -> str:
    return refusal(capsys, *arguments(data_dir, *overrides))


def test_levels_errors_and_the_line_to_paste(capsys: pytest.CaptureFixture, data_dir: Path) -> None:
    out = advised(capsys, data_dir, LEVELS, "gpu_memory=80")
    assert "Advice for llama_tiny on a GPU of 80.0 GiB" in out and max(map(len, out.splitlines())) <= 80
    assert "current   weight 3" in out and out.count("bf16_mixed ") == 1
    assert out.endswith(
        "Take\n  plugins=bf16_with_fp8_current_scaling_mixed()\n  precision=bf16_with_fp8_current_scaling_mixed\n"
    )
    if not torch.cuda.is_available():
        assert "There is no GPU: no times of a step." in out


def test_times_where_they_are_known(capsys: pytest.CaptureFixture, data_dir: Path) -> None:
    with made_up_times():
        out = advised(capsys, data_dir, LEVELS)
    assert "ms a step" in out and "Measured: " in out and "CPU of the tests (measured)" in out


def test_options_of_the_level_are_in_the_line(capsys: pytest.CaptureFixture, data_dir: Path) -> None:
    out = advised(capsys, data_dir, LEVELS, "precision.fp8_margin=1")
    assert "Refused: bf16_mixed. bf16_mixed takes no 'fp8_margin'." in out and "current, margin 1" in out
    assert "plugins=bf16_with_fp8_current_scaling_mixed(fp8_margin=1)" in out
    assert "precision=bf16_with_fp8_current_scaling_mixed precision.fp8_margin=1" in out


def test_the_weights_of_a_checkpoint_are_looked_at(capsys: pytest.CaptureFixture, data_dir: Path) -> None:
    from lightning.pytorch import Trainer

    model = CausalLM("llama_tiny", vocab_size=512)
    model.configure_model()
    with torch.no_grad():
        model.model.model.layers[2].mlp.down_proj.weight[0, 0] = 3e4
    trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)
    trainer.strategy.connect(model)
    trainer.save_checkpoint("spoiled.ckpt", weights_only=True)
    options = [LEVELS, "model.vocab_size=512"]
    assert "down_proj" not in advised(capsys, data_dir, *options)
    out = advised(capsys, data_dir, *options, "ckpt_path=spoiled.ckpt")
    listed = out.partition("Layers to keep back")[2]
    assert "model.model.layers.2.mlp.down_proj" in listed and "weight: underflow" in " ".join(listed.split())
    wrong = refused(capsys, data_dir, LEVELS, "ckpt_path=spoiled.ckpt", "model.vocab_size=1024")
    assert "spoiled.ckpt holds no weights of this model" in wrong


def test_a_model_without_room_has_a_plan(
    capsys: pytest.CaptureFixture, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(advise_job, "_has_room", lambda size: False)
    out = advised(capsys, data_dir, LEVELS, "gpu_memory=80")
    assert "The model's weights have no values here" in " ".join(out.split()) and "SQNR of a layer" not in out


def test_all_levels_that_can_run_here_without_a_choice() -> None:
    from nemo_lowprec.conf.command_line import CommandLine

    names = [name for name, _ in advise_job._lines(CommandLine.of(["model=llama_tiny"]))]
    assert {"fp16_amp", "bf16_with_fp8_rowwise_mixed", "msamp_o3"} <= set(names)
    if not torch.cuda.is_available():
        assert "bf16_with_nvfp4_mixed" not in names


def test_the_config_is_shown(capsys: pytest.CaptureFixture, data_dir: Path) -> None:
    assert "_target_: nemo_lowprec.msamp_o2" in advised(capsys, data_dir, "precision=msamp_o2", "--cfg", "job")


def test_mistakes_are_one_sentence(capsys: pytest.CaptureFixture, data_dir: Path) -> None:
    assert "advise is about one GPU: nemo-lowprec plan takes gpus, too" in refused(capsys, data_dir, "gpus=2")
    assert "takes one value of seed" in refused(capsys, data_dir, "seed=1,2")
    assert "'much' is no memory of a GPU" in refused(capsys, data_dir, LEVELS, "gpu_memory=much")
    assert "Megatron-core builds" in refused(capsys, data_dir, LEVELS, "model=megatron_llama_tiny")
    assert "ckpt_path='no.ckpt' does not exist" in refused(capsys, data_dir, LEVELS, "ckpt_path=no.ckpt")
    assert "bf16_mixed takes no 'fp8_margin'" in refused(
        capsys, data_dir, "precision=bf16_mixed", "precision.fp8_margin=1"
    )
    assert "data.data_dir is missing" in refused(capsys, data_dir, LEVELS, "data.data_dir=???")
