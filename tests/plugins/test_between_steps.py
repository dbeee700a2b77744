"""Saves and ends of a strategy whose checkpoints do not hold the gradients of an unfinished step."""

import os
import signal
from datetime import timedelta

import pytest
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException

from nemo_lowprec.plugins.resume import check_saves
from tests.processes import on_processes
from tests.support import Net, loader, plugin, trainer


class Checks(Callback):
    def on_train_start(self, trainer, module):
        check_saves(trainer)


def fit(folder, saving, validates=True, **options):
    """Of epochs of 6 batches, three of which make a step."""
    options = {"accumulate_grad_batches": 3, "max_steps": 2, "max_epochs": -1} | options
    callbacks = [] if saving is None else [ModelCheckpoint(folder, **saving)]
    data = (loader(2, 12), loader(2, 4)) if validates else (loader(2, 12),)
    trainer(plugin("bf16_mixed"), Checks(), *callbacks, **options).fit(Net(), *data)


THROUGH = {"check_val_every_n_epoch": None}


@pytest.mark.parametrize("saving, options, text", [
    ({}, {"val_check_interval": 4}, "Validation after every 4 batches: ModelCheckpoint would save between two"),
    ({}, {"val_check_interval": 1 / 3}, "Validation after every 2 batches"),
    ({"monitor": "val/loss"}, THROUGH | {"val_check_interval": 4}, "Set val_check_interval to a multiple of 3"),
    ({}, THROUGH | {"val_check_interval": 4, "accumulate_grad_batches": 4}, "an epoch of 6 batches ends with a sh"),
    ({}, THROUGH | {"val_check_interval": timedelta(hours=1)}, "Use a number of batches, a multiple of 3"),
    ({"train_time_interval": timedelta(hours=1)}, {}, "Use every_n_train_steps"),
])  # fmt: skip
def test_saves_between_two_micro_batches_are_refused(tmp_path, saving, options, text):
    with pytest.raises(ValueError, match=text):
        fit(tmp_path, saving, **options)


@pytest.mark.parametrize("saving, options", [
    ({}, {"val_check_interval": 3}), ({}, {"val_check_interval": 0.5}), ({}, {}), ({}, {"accumulate_grad_batches": 4}),
    ({}, THROUGH | {"val_check_interval": 9}), (None, {"val_check_interval": 4}),
    ({"every_n_train_steps": 1}, {"val_check_interval": 3}), ({}, {"val_check_interval": 4, "validates": False}),
    ({}, {"val_check_interval": 4, "limit_val_batches": 0}),
    ({}, {"val_check_interval": 4, "accumulate_grad_batches": 1}),
])  # fmt: skip
def test_saves_at_the_end_of_steps_are_not(tmp_path, saving, options):
    fit(tmp_path, saving, **options)


class Ends(Callback):
    """A signal comes to the second process after the fourth micro-batch."""

    def __init__(self, precision):
        self.precision = precision

    def on_train_start(self, trainer, module):
        self.precision._signals._between_steps = True  # as MegatronStrategy asks, which needs a GPU

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.batches = batch_idx + 1
        if batch_idx == 3 and trainer.global_rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)


def end_at_a_signal(rank):
    precision = plugin("bf16_mixed")
    ends = Ends(precision)
    fit = trainer(precision, ends, accumulate_grad_batches=3, devices=2, strategy="lowprec_ddp", max_epochs=1)
    with pytest.raises(SIGTERMException):
        fit.fit(Net(), loader(2, 48))
    return {"batches": ends.batches, "steps": fit.global_step}


def test_a_signal_ends_all_processes_after_a_whole_step(tmp_path):
    assert on_processes(2, tmp_path, end_at_a_signal) == [{"batches": 6, "steps": 2}] * 2
