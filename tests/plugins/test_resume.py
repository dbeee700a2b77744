"""Training resumes bit for bit, at the end of an epoch and in the middle of one."""

import warnings

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from support import CASES, FP16_HALF, Net, assert_same, level_of, loader, plugin, save_at, stateful_loader, train

SAVED = "This checkpoint is saved in mid-epoch"
RESUMED = "This checkpoint is resumed in mid-epoch"


def dynamic(case):
    """With a loss scale that moves in a few steps: 2**12 doubles at every second one."""
    options = {"loss_scale": None, "initial_loss_scale": 2.0**12, "loss_scale_window": 2}
    return plugin(case, **(options if level_of(case).has_loss_scale else {}))


def net():
    return Net(dropout=0.2, stepwise=True)


def check(case, folder, make_data, step, **options):
    """One run of 5 steps (epochs of 3), against one that was saved after ``step``, ended, and is resumed."""
    options = {"max_steps": 5, "max_epochs": -1, "gradient_clip_val": 1.0} | options
    whole_model, model = net(), net()
    whole = train(whole_model, dynamic(case), data=make_data(), **options)
    train(net(), dynamic(case), save_at(folder, step), data=make_data(), **options | {"max_steps": step + 1})
    torch.rand(5)  # wherever another process stands
    precision = dynamic(case)
    resumed = train(model, precision, data=make_data(), ckpt=folder / f"step={step}.ckpt", **options)
    assert resumed.trainer.global_step == 5
    assert model.losses == whole_model.losses[-len(model.losses) :]
    assert_same(resumed.state, whole.state)
    if level_of(case).has_loss_scale:
        assert precision.engine.step.loss_scale.scale == 2.0**14
    return model


@pytest.mark.parametrize("case", [*CASES, *FP16_HALF])
def test_resume_in_mid_epoch_with_a_stateful_loader(case, tmp_path):
    with warnings.catch_warnings():
        warnings.filterwarnings("error", SAVED)
        warnings.filterwarnings("error", RESUMED)
        model = check(case, tmp_path, lambda: stateful_loader(count=12), step=2)
    assert len(model.losses) == 3


@pytest.mark.parametrize("case", CASES)
def test_resume_at_the_end_of_an_epoch_with_a_shuffling_loader(case, tmp_path):
    with warnings.catch_warnings():
        warnings.filterwarnings("error", RESUMED)
        model = check(case, tmp_path, lambda: loader(count=12, shuffle=True), step=3)
    assert len(model.losses) == 2


def test_resume_at_the_end_of_an_epoch_that_was_validated(tmp_path):
    options = {"max_epochs": 2, "max_steps": -1, "gradient_clip_val": 1.0}
    data = lambda: (loader(shuffle=True), loader())  # noqa: E731
    whole = train(net(), "bf16_with_fp8_mixed", data=data(), **options)
    save = ModelCheckpoint(tmp_path, filename="epoch", monitor="val/loss")
    train(net(), "bf16_with_fp8_mixed", save, data=data(), **options | {"max_epochs": 1})
    resumed = train(net(), "bf16_with_fp8_mixed", data=data(), ckpt=tmp_path / "epoch.ckpt", **options)
    assert_same(resumed.state, whole.state)


def test_a_checkpoint_written_after_fit_resumes_too(tmp_path):
    whole = train(net(), "bf16_with_fp8_mixed", data=stateful_loader(), max_steps=5, max_epochs=-1)
    first = train(net(), "bf16_with_fp8_mixed", data=stateful_loader(), max_steps=3)
    first.trainer.save_checkpoint(tmp_path / "after.ckpt")
    resumed = train(
        net(), "bf16_with_fp8_mixed", data=stateful_loader(), ckpt=tmp_path / "after.ckpt", max_steps=5, max_epochs=-1
    )
    assert_same(resumed.state, whole.state)


def test_resume_in_the_middle_of_accumulation_boundaries(tmp_path):
    options = {"max_steps": 4, "max_epochs": -1, "accumulate_grad_batches": 2}
    data = lambda: stateful_loader(batch_size=2)  # noqa: E731
    whole = train(net(), "fp16_with_fp8_mixed", data=data(), **options)
    train(net(), "fp16_with_fp8_mixed", save_at(tmp_path, 1), data=data(), **options | {"max_steps": 2})
    resumed = train(net(), "fp16_with_fp8_mixed", data=data(), ckpt=tmp_path / "step=1.ckpt", **options)
    assert_same(resumed.state, whole.state)


def test_a_plain_loader_is_warned_about_when_saved_and_when_resumed_in_mid_epoch(tmp_path):
    with pytest.warns(UserWarning, match=SAVED):
        train(net(), "bf16_mixed", save_at(tmp_path, 2), max_steps=3)
    with pytest.warns(UserWarning, match=RESUMED):
        train(net(), "bf16_mixed", ckpt=tmp_path / "step=2.ckpt", max_steps=3)


def test_a_plain_loader_is_not_warned_about_between_epochs(tmp_path):
    save = ModelCheckpoint(tmp_path, filename="epoch", every_n_epochs=1)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", SAVED)
        warnings.filterwarnings("error", RESUMED)
        train(net(), "bf16_mixed", save, max_epochs=1)
        resumed = train(net(), "bf16_mixed", ckpt=tmp_path / "epoch.ckpt", max_epochs=2)
    assert resumed.trainer.current_epoch == 2
