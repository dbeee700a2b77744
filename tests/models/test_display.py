"""What ``pretrain`` shows of a run."""

import re

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint, RichModelSummary, RichProgressBar, TQDMProgressBar
from support import Net, plugin, stateful_loader, trainer

from nemo_lowprec.display import own_display
from nemo_lowprec.train import PretrainResult


def shown(
    monkeypatch: pytest.MonkeyPatch, *callbacks, ckpt: str | None = None, **options
) -> list[tuple[str, int, int]]:
    """Fits with Lightning's bar; an epoch has four batches."""
    bar = RichProgressBar()
    said: list[tuple[str, int, int]] = []

    def look(self, trainer, pl_module) -> None:
        of_training = self.train_progress_bar
        said.append((of_training.description.strip(), of_training.completed, of_training.total))

    monkeypatch.setattr(RichProgressBar, "on_train_epoch_end", look)
    run = trainer(plugin("bf16_mixed"), bar, *callbacks, enable_progress_bar=True, **options)
    with own_display(run):
        run.fit(Net(), stateful_loader(), ckpt_path=ckpt)
    assert type(bar) is RichProgressBar
    return said


def test_epochs_are_counted_and_a_last_one_is_named_where_there_is_one(monkeypatch):
    assert shown(monkeypatch, max_epochs=-1, max_steps=6) == [("Epoch 0", 4, 4), ("Epoch 1", 2, 2)]
    assert shown(monkeypatch, max_epochs=2) == [("Epoch 0/1", 4, 4), ("Epoch 1/1", 4, 4)]


def test_batches_are_counted_where_a_step_has_several(monkeypatch):
    said = shown(monkeypatch, max_epochs=-1, max_steps=3, accumulate_grad_batches=2)
    assert said == [("Epoch 0", 4, 4), ("Epoch 1", 2, 2)]


def test_a_resume_in_mid_epoch_counts_the_batches_before_it(monkeypatch, tmp_path):
    saves = ModelCheckpoint(tmp_path, every_n_train_steps=2, save_top_k=-1, filename="{step}")
    shown(monkeypatch, saves, max_epochs=-1, max_steps=2)
    said = shown(monkeypatch, ckpt=str(tmp_path / "step=2.ckpt"), max_epochs=-1, max_steps=3)
    assert said == [("Epoch 0", 3, 3)]


def test_lightnings_summary_is_left_out_at_a_level_and_there_again_after(capsys):
    default, deep = RichModelSummary(), RichModelSummary(max_depth=2)
    for precision, callback, there in (
        (plugin("bf16_mixed"), default, False),
        (plugin("bf16_mixed"), deep, True),
        (None, default, True),
    ):
        run = trainer(precision, callback, max_steps=1)
        with own_display(run):
            run.fit(Net(), stateful_loader())
        assert ("Total params" in capsys.readouterr().out) == there
        assert callback in run.callbacks


def test_another_progress_bar_is_left_alone():
    bar = TQDMProgressBar()
    run = trainer(None, bar, enable_progress_bar=True)
    with own_display(run):
        assert type(bar) is TQDMProgressBar and bar in run.callbacks


def test_a_long_path_is_printed_whole(capsys):
    path = "/scratch/" + "a-long-folder/" * 8 + "best.ckpt"
    PretrainResult("bf16_with_fp8_subchannel_scaling_mixed", 12345, 8.25, 3.5, 123456.7, path).print_table()
    lines = capsys.readouterr().out.splitlines()
    assert f"    {path}" in lines
    assert max(len(line) for line in lines if path not in line) <= 80
    pairs = dict(re.split(r"   +", line.strip()) for line in lines if "   " in line.strip())
    assert pairs == {
        "Level": "bf16_with_fp8_subchannel_scaling_mixed",
        "Steps": "12,345",
        "Validation loss before": "8.2500",
        "Validation loss after": "3.5000",
        "Perplexity": "33.12",
        "Tokens per second": "123,457",
    }
