"""Names that a recipe does not have, on both command lines and in Python."""

import io
import sys
from pathlib import Path

import pytest
from nemo_run.cli.api import create_cli

from nemo_lowprec.cli import main
from nemo_lowprec.recipes import fp16_mixed, lowprec_sharded, megatron_tiny, msamp_o2, tiny
from nemo_lowprec.recipes.names import check_names

SHARDED = "trainer.strategy=lowprec_sharded"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["trainer.max_step=5"], r"no setting 'trainer.max_step'. Did you mean 'max_steps'\?"),
        (["trainer.zzz=5"], "no setting 'trainer.zzz'. There are: accelerator, strategy, devices,"),
        (["model.lrr=1"], r"no setting 'model.lrr'. Did you mean 'lr'\?"),
        (["data.seq_lenght=3"], r"Did you mean 'seq_length'\?"),
        (["trainer.plugins=msamp_o2", "trainer.plugins.haf=fp16"], r"msamp_o2 has no argument 'haf'.*mean 'half'\?"),
        (["trainer.strategy.shard_size=2"], "trainer.strategy is 'auto'. Put trainer.strategy=lowprec_sharded before"),
        ([SHARDED, "trainer.strategy.shard_sise=2"], r"Did you mean 'shard_size'\?"),
        ([f"{SHARDED}(shard_sise=2)"], r"lowprec_sharded has no argument 'shard_sise'. Did you mean 'shard_size'\?"),
        (["trainer.strategy=lowprec_shardd"], r"Unknown strategy 'lowprec_shardd'. Did you mean 'lowprec_sharded'\?"),
        (["model=tini"], r"Unknown model 'tini'. Did you mean 'tiny'\?"),
        (["model=tiny(lr=1)"], "tiny has no argument 'lr'. There are: none"),
        (["trainer.callbacks[0].save_topk=1"], r"Did you mean 'save_top_k'\?"),
        (["trainer.callbacks[3].save_top_k=1"], r"no \[3\] is in callbacks"),
        (["trainer.max_steps=abc"], "trainer.max_steps=abc: Failed to parse 'abc' as int"),
    ],
)
def test_mistake_names_what_there_is(settings: list[str], message: str) -> None:
    recipe = tiny.pretrain_recipe()
    with pytest.raises((TypeError, ValueError), match=message) as caught:
        check_names(recipe, settings)
    assert "\n" not in str(caught.value) and recipe == tiny.pretrain_recipe()


def test_names_that_exist_are_let_through() -> None:
    settings = [
        "trainer.plugins=msamp_o2(half=fp16)",
        "trainer.plugins.fp8_margin=1",
        "trainer.callbacks[0].save_top_k=2",
        "trainer.logger[0].flush_secs=3",  # TensorBoard's own
        "trainer.limit_val_batches=3",
        "model=llama3_8b",
        "model.lr=${oc.env:RATE}",
        SHARDED,
        "trainer.strategy.timeout=None",  # Lightning's
        "trainer.strategy.shard_size=2",
    ]
    recipe = tiny.pretrain_recipe()
    check_names(recipe, settings)
    assert recipe == tiny.pretrain_recipe()
    check_names(megatron_tiny.pretrain_recipe(), ["trainer.strategy.process_group_backend=nccl"])
    for strategy in ("ddp", "auto", "lowprec_ddp"):
        check_names(recipe, [f"trainer.strategy={strategy}"])


@pytest.mark.parametrize("argument", ["trainer.max_step=5", "trainer.strategy.shard_size=5", "data.nobody=1"])
def test_command_line_says_it_and_nothing_else(argument: str, capsys: pytest.CaptureFixture) -> None:
    assert main(["run", "--yes", argument]) == 2
    out, error = capsys.readouterr()
    assert out == "" and error.startswith("nemo-lowprec run: There is no setting") and error.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--factory", "tiny", "--yes", "trainer.max_step=5"], "There is no setting 'trainer.max_step'. Did you mean"),
        (["--yes", "model.lrr=5"], "There is no setting 'model.lrr'. Did you mean 'lr'?"),
        (["--factory", "llama9", "--yes"], "Unknown recipe 'llama9'. Choose one of: tiny,"),
        (["--factory", "tiny"], "Add --yes: nemo_run asks whether to start"),
    ],
)
def test_nemo_run_s_own_command_says_it_too(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    line = ["lowprec", "pretrain", *arguments]
    monkeypatch.setattr(sys, "argv", ["nemorun", *line])
    create_cli()(line, standalone_mode=False)  # its exit status is returned, and 1 in standalone mode
    error = capsys.readouterr().err
    assert error.startswith(f"Unexpected error: {message}") and error.count("\n") == 1


def test_question_left_unanswered_ends_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("nemo_run.cli.api.NEMORUN_SKIP_CONFIRMATION", None)  # the answer of an earlier run
    terminal = io.StringIO("")
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stdin", terminal)
    assert main(["run", "--factory", "tiny"]) == 130


def test_factory_in_python_names_its_arguments() -> None:
    with pytest.raises(TypeError, match=r"tiny has no argument 'max_step'. Did you mean 'max_steps'\?"):
        tiny.pretrain_recipe(max_step=5)
    with pytest.raises(TypeError, match=r"lowprec_sharded has no argument 'shard_sise'. Did you mean 'shard_size'\?"):
        lowprec_sharded(shard_sise=2)
    with pytest.raises(TypeError, match=r"msamp_o2 has no argument 'fp8_margn'. It takes: .*Did you mean 'fp8_margin'"):
        msamp_o2(fp8_margn=1)
    with pytest.raises(TypeError, match=r"fp16_mixed takes no 'fp8_margin'. Levels that do: te_fp8"):
        fp16_mixed(fp8_margin=1)
