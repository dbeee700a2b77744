"""``nemo-lowprec plan``: the groups of ``pretrain``, and nothing written."""

import re
from pathlib import Path

import pytest

from nemo_lowprec.cli import main
from nemo_lowprec.conf.job import _processes
from tests.called import printed, refusal

pytestmark = pytest.mark.usefixtures("nowhere")


def planned(capsys: pytest.CaptureFixture, *overrides: str) -> str:
    out = printed(capsys, "plan", *overrides)
    assert not list(Path.cwd().iterdir())
    return " ".join(out.split())  # a title is as wide as its table


def refused(capsys: pytest.CaptureFixture, *overrides: str) -> str:
    return refusal(capsys, "plan", *overrides)


def test_one_process_is_a_single_device(capsys: pytest.CaptureFixture) -> None:
    out = planned(capsys, "precision=msamp_o2")
    assert "Plan of llama_tiny at msamp_o2 1.31 M parameters, one process" in out and "Sent" not in out


def test_activations_are_those_of_the_data_and_of_the_model(capsys: pytest.CaptureFixture) -> None:
    out = planned(capsys)
    assert "micro-batches: 8 × 128 tokens, without recomputation" in out and "│ Activations" in out
    options = ["data.seq_length=256", "data.micro_batch_size=2", "model.activation_checkpointing=true"]
    more = planned(capsys, *options)
    assert "micro-batches: 2 × 256 tokens, with recomputation" in more
    assert "Without recomputation activations would be" in more
    assert "longer than the model's 2048 positions" in refused(capsys, "data.seq_length=4096")


def test_a_pipe_is_80_columns_wide(capsys: pytest.CaptureFixture) -> None:
    assert main(["plan", "nodes=2", "gpus=4", "precision=msamp_o3"]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80


def test_a_model_on_megatron_core(capsys: pytest.CaptureFixture) -> None:
    sizes = [
        "strategy=lowprec_megatron", "trainer.strategy.tensor_model_parallel_size=4",
        "trainer.strategy.sequence_parallel=true",
    ]  # fmt: skip
    samples = ["data.seq_length=8192", "data.micro_batch_size=1"]
    out = planned(capsys, "model=megatron_llama3_70b", "nodes=4", "gpus=8", *sizes, *samples)
    assert "4 × 8 processes, lowprec_megatron, TP 4, sequence parallel" in out
    assert "Sent: reduce_scatter, TP" in out and "Weights for GEMMs" in out
    alone = planned(capsys, "model=megatron_llama3_405b", "strategy=lowprec_megatron", "trainer.devices=8")
    assert "Plan of llama3_405b at bf16_with_fp8_mixed 405.85 B parameters" in alone


def test_several_are_sharded_unless_told_otherwise(capsys: pytest.CaptureFixture) -> None:
    assert "2 × 4 processes, lowprec_sharded, ZeRO-3" in planned(capsys, "nodes=2", "gpus=4")
    options = [
        "strategy=lowprec_sharded",
        "trainer.strategy.reshard_after_forward=false",
        "trainer.strategy.shard_size=4",
    ]
    assert "ZeRO-2, 2 copies of 4 shards" in planned(capsys, "nodes=2", "gpus=4", *options)
    assert "2 × 4 processes, lowprec_ddp" in planned(capsys, "nodes=2", "gpus=4", "strategy=lowprec_ddp")
    assert "1 × 8 processes, ddp, 4 micro-batches" in planned(
        capsys, "strategy=ddp", "trainer.devices=8", "trainer.accumulate_grad_batches=4"
    )


def test_options_of_the_level_count(capsys: pytest.CaptureFixture) -> None:
    plain = planned(capsys, "precision=bf16_with_fp8_mixed")
    assert planned(capsys, "precision=bf16_with_fp8_mixed", "precision.fp8_params=true") != plain


def test_mistakes_are_one_sentence(capsys: pytest.CaptureFixture) -> None:
    assert "strategy=single_device" not in planned(capsys, "gpus=2")
    assert "single_device is one process" in refused(capsys, "gpus=2", "strategy=single_device")
    assert "add gpus=8" in refused(capsys, "strategy=ddp")
    assert "nodes=0 must be" in refused(capsys, "nodes=0")
    assert "Choose data=..., or add model.vocab_size" in refused(capsys, "data=megatron")
    assert "-m a record" in refused(capsys, "-m", "precision=msamp_o1,msamp_o2")
    assert "takes no 'fp8_margin'" in refused(capsys, "precision=fp16_mixed", "precision.fp8_margin=1")
    assert "Choose strategy=single_device, ddp" in refused(capsys, "strategy=lowprec_megatron", "gpus=2")
    megatron = ["model=megatron_llama3_8b", "trainer.devices=8"]
    assert "and not with 'ddp'" in refused(capsys, *megatron, "strategy=ddp")
    experts = "trainer.strategy.expert_model_parallel_size=2"
    assert "No plan for experts" in refused(capsys, *megatron, "strategy=lowprec_megatron", experts)


def test_pretrain_takes_the_same_keys() -> None:
    from hydra import compose, initialize_config_dir

    from nemo_lowprec.conf.choices import CONF_DIR, register_levels

    register_levels()
    with initialize_config_dir(str(CONF_DIR), version_base="1.3"):
        sharded = compose("config", overrides=["strategy=lowprec_sharded", "nodes=2", "gpus=4"])
        alone = compose("config", overrides=["gpus=4"])
        neither = compose("config")
    assert _processes(sharded) == {"num_nodes": 2, "devices": 4} and _processes(neither) == {}
    with pytest.raises(ValueError, match="Add strategy=lowprec_sharded, lowprec_megatron, lowprec_ddp or ddp"):
        _processes(alone)


def test_the_page_shows_what_is_printed(capsys: pytest.CaptureFixture) -> None:
    section = (Path(__file__).parents[2] / "docs" / "planning.rst").read_text()
    commands = [" ".join(c.split("\\\n")) for c in re.findall(r"nemo-lowprec plan ((?:.*\\\n)*.*)\n", section)]
    shown = section.partition("code-block:: text\n\n")[2].partition("\n\n``msamp_o3``")[0]
    first, *others = [planned(capsys, *command.split()) for command in commands]
    assert first == " ".join(shown.split())
    all_of = [re.search(r"All: ([\d.]+ GiB) of each process", out) for out in (first, *others)]
    told = section.partition("\n\n``msamp_o3``")[2]
    assert len(commands) == 4 and all(found is not None and found[1] in told for found in all_of[:2])
    assert "8 copies of 8 shards" in others[1] and "TP 8, PP 9" in others[2]
