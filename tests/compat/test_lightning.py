"""Lightning's Trainer: each name is read during a fit, and compared with what the Trainer was given."""

import datetime
import signal
from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.strategies import ModelParallelStrategy, SingleDeviceStrategy
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, ModelSummary
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from nemo_lowprec.compat import lightning as compat


class Model(pl.LightningModule):
    """A linear model, which notes what Lightning calls."""

    def __init__(self, size: int = 3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.linear = nn.Linear(size, 1)
        self.called: list[Any] = []

    def validation_step(self, batch, index):
        return self.linear(batch[0]).mean()

    def training_step(self, batch, index):
        self.called.append(("in a hook", compat.is_in_hook(self)))
        return self.linear(batch[0]).mean()

    def on_before_optimizer_step(self, optimizer):
        self.called.append(("module", optimizer))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Asks(Callback):
    """Calls ``ask(trainer, module)`` at the start of each training batch, and keeps the answers."""

    def __init__(self, ask: Any) -> None:
        self.ask, self.answers = ask, []

    def on_train_batch_start(self, trainer, module, batch, index):
        self.answers.append(self.ask(trainer, module))


def loader(batches: int = 4) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.ones(batches, 3)), batch_size=1)


def trainer_with(tmp_path: Any, *callbacks: Callback, **options: Any) -> pl.Trainer:
    options = {"max_epochs": 1, "enable_model_summary": False, "enable_checkpointing": False} | options
    return pl.Trainer(
        accelerator="cpu", devices=1, logger=False, enable_progress_bar=False, default_root_dir=tmp_path,
        callbacks=list(callbacks), **options,
    )  # fmt: skip


def fit(tmp_path: Any, ask: Any, **options: Any) -> list[Any]:
    """What ``ask(trainer, module)`` returned at the start of each batch of four."""
    asks = Asks(ask)
    trainer_with(tmp_path, asks, **options).fit(Model(), loader())
    return asks.answers


def test_a_module_knows_its_trainer(tmp_path):
    assert compat.trainer_of(Model()) is None and compat.trainer_of(nn.Linear(1, 1)) is None
    assert fit(tmp_path, lambda trainer, module: compat.trainer_of(module) is trainer) == [True] * 4


def test_steps_are_counted_within_accumulation(tmp_path):
    steps = fit(tmp_path, lambda trainer, module: compat.steps_of_epoch(trainer), accumulate_grad_batches=2)
    assert steps == [0, 0, 1, 1]


def test_a_batch_that_is_no_end_of_a_step_is_told(tmp_path):
    seen = []

    class AfterBackward(Callback):
        def on_after_backward(self, trainer, module):
            seen.append(compat.is_mid_step(trainer))

    trainer_with(tmp_path, AfterBackward(), accumulate_grad_batches=2).fit(Model(), loader())
    assert seen == [True, False, True, False]


def test_a_batch_is_told_after_whose_forward_pass_gradients_are_zeroed(tmp_path):
    told, zeroed = [], []

    class Tells(Callback):
        def on_train_batch_start(self, trainer, module, batch, index):
            told.append(compat.is_first_of_step(trainer))

        def on_before_zero_grad(self, trainer, module, optimizer):
            zeroed.append(len(told))

    trainer_with(tmp_path, Tells(), accumulate_grad_batches=2).fit(Model(), loader())
    assert told == [True, False, True, False] and zeroed == [1, 3]


def test_training_data_and_loaders(tmp_path):
    class TwoLoaders(Model):
        def training_step(self, batch, index):
            return super().training_step(batch["a"], index) + super().training_step(batch["b"], index)

    trainer, data = trainer_with(tmp_path), {"a": loader(), "b": loader()}
    assert compat.train_data(trainer) is None and compat.train_loaders(trainer) == []
    trainer.fit(TwoLoaders(), data)
    assert compat.train_data(trainer) is data
    assert [one.dataset for one in compat.train_loaders(trainer)] == [one.dataset for one in data.values()]


def test_the_loop_that_runs(tmp_path):
    assert fit(tmp_path, lambda trainer, module: compat.active_loop(trainer) is trainer.fit_loop) == [True] * 4


def test_arguments_of_the_trainer_are_read(tmp_path):
    for wanted in (True, False):
        trainer = trainer_with(tmp_path, use_distributed_sampler=wanted, sync_batchnorm=wanted)
        assert compat.use_distributed_sampler(trainer) is compat.sync_batchnorm(trainer) is wanted


def test_the_time_between_two_validations_is_read(tmp_path):
    for interval, seconds in ((datetime.timedelta(hours=1), 3600), (2, None)):
        trainer = trainer_with(tmp_path, val_check_interval=interval)
        assert compat.seconds_between_validations(trainer) == seconds


def test_the_checkpoint_that_a_fit_resumes_from(tmp_path):
    trainer = trainer_with(tmp_path, max_epochs=1)
    trainer.fit(Model(), loader())
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    seen = []

    class Resumed(Model):
        def on_load_checkpoint(self, checkpoint):
            seen.append(compat.loaded_checkpoint(self.trainer))

    trainer_with(tmp_path, max_epochs=2).fit(Resumed(), loader(), ckpt_path=tmp_path / "a.ckpt")
    ((path, content),) = seen
    assert str(path) == str(tmp_path / "a.ckpt") and content["global_step"] == 4


def test_signals_are_handled_by_these_methods(tmp_path):
    def look(trainer, module):
        connector = compat.signal_connector(trainer)
        handler = getattr(connector, compat.SIGTERM_METHOD)
        assert callable(getattr(connector, compat.REQUEUE_METHOD)) and connector.received_sigterm is False
        assert callable(getattr(trainer.fit_loop.epoch_loop, compat.EXCHANGE_METHOD))
        return signal.getsignal(signal.SIGTERM) == handler or handler in vars(signal.getsignal(signal.SIGTERM)).get(
            "signal_handlers", ()
        )

    assert fit(tmp_path, look, max_steps=1) == [True]


def test_arguments_of_a_strategy_are_read():
    timeout = datetime.timedelta(seconds=77)

    def hook(state, bucket):
        raise NotImplementedError

    strategy = DDPStrategy(timeout=timeout, static_graph=True, ddp_comm_hook=hook)
    assert compat.timeout_of(strategy) == timeout and compat.ddp_options(strategy) == {"static_graph": True}
    assert compat.ddp_hook(strategy, "ddp_comm_hook") is hook and compat.ddp_hook(strategy, "ddp_comm_state") is None


def test_hooks_of_a_module_are_told(tmp_path):
    model = Model()
    trainer_with(tmp_path, max_steps=1).fit(model, loader())
    assert ("in a hook", True) in model.called and not compat.is_in_hook(model)


def test_hooks_before_a_step_are_called(tmp_path):
    class Steps(Callback):
        def on_before_optimizer_step(self, trainer, module, optimizer):
            module.called.append(("callback", optimizer))

    model = Model()
    trainer = trainer_with(tmp_path, Steps(), max_steps=1)
    trainer.fit(model, loader())
    model.called.clear()
    optimizer = trainer.optimizers[0]
    model.trainer = trainer
    compat.call_before_optimizer_step(trainer, optimizer)
    assert model.called == [("callback", optimizer), ("module", optimizer)]


def test_hyperparameters_that_are_logged(tmp_path):
    model = Model(3)
    assert getattr(model, compat.HPARAMS_ATTRIBUTE) == model.hparams_initial == {"size": 3}
    setattr(model, compat.HPARAMS_ATTRIBUTE, type(model.hparams_initial)({"size": 3, "told": 1}))
    assert model.hparams_initial["told"] == 1 and getattr(model, compat.LOGS_HPARAMS_ATTRIBUTE) is True


def test_averaging_callbacks_hold_a_model_and_swap_by_these_methods(tmp_path):
    from lightning.pytorch.callbacks import WeightAveraging

    callback, model, called = WeightAveraging(), Model(), []
    for name in (compat.SWAP_METHOD, compat.AVERAGE_METHOD):
        own = getattr(callback, name)
        setattr(callback, name, partial(lambda own, name, *args: (called.append(name), own(*args))[1], own, name))
    data = loader()
    trainer_with(tmp_path, callback).fit(model, data, data)
    assert type(compat.averaged_model(callback)) is Model and compat.averaged_model(callback) is not model
    assert set(called) == {compat.SWAP_METHOD, compat.AVERAGE_METHOD}


def test_the_model_summary(tmp_path, capsys):
    callback, model = ModelSummary(max_depth=1), Model()
    assert compat.max_depth(callback) == 1 and compat.max_depth(ModelSummary(max_depth=3)) == 3
    sizes = []

    def summary(trainer, module):
        made = compat.summarize(callback, trainer, module)
        before = made.model_size
        compat.set_bytes_per_parameter(made, 1.0)
        sizes.append((before, made.model_size))
        return made

    setattr(callback, compat.SUMMARY_METHOD, summary)
    trainer_with(tmp_path, callback, enable_model_summary=True, max_steps=1).fit(model, loader())
    assert sizes == [(4 * 4e-6, 4 * 1e-6)]


def test_the_last_checkpoint_is_written_when_it_is_asked_for(tmp_path):
    callback = ModelCheckpoint(dirpath=tmp_path, every_n_train_steps=2, save_last=None)

    def ask(trainer, module):
        return compat.save_last(callback, trainer)

    assert fit_with(tmp_path, callback, ask) == [False, True, False, True]  # nothing to save, or it was saved
    assert (tmp_path / "last.ckpt").is_file() and not (tmp_path / "last.ckpt").is_symlink()
    assert callback.save_last is None
    assert not compat.saves_by_time(callback)
    assert compat.saves_by_time(ModelCheckpoint(train_time_interval=datetime.timedelta(minutes=1)))


def fit_with(tmp_path, callback, ask):
    asks = Asks(ask)
    trainer_with(tmp_path, asks, callback, enable_checkpointing=True).fit(Model(), loader())
    return asks.answers


def test_modules_and_optimizers_get_to_their_device():
    module = Model().to("meta")
    module.linear.reset_parameters = lambda: None
    compat.materialize(module.linear, torch.device("cpu"))
    assert module.linear.weight.device.type == "cpu"
    param = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.Adam([param], lr=0.1)
    param.sum().backward()
    optimizer.step()
    compat.optimizers_to_device([optimizer], torch.device("meta"))
    assert optimizer.state[param]["exp_avg"].device.type == "meta"


def test_strategies_of_fabric():
    for folder in (True, False):
        sharded = ModelParallelStrategy(lambda model, mesh: model, save_distributed_checkpoint=folder)
        assert compat.saves_a_folder(sharded) is folder

    strategy, linear = SingleDeviceStrategy(torch.device("cpu")), nn.Linear(2, 1)
    state = {"model": linear, "step": 3}
    states = compat.states_of(strategy, state, {"model": lambda name, value: name == "bias"})
    assert states["model"].keys() == {"bias"} and states["step"] == 3
    assert compat.states_of(strategy, state)["model"].keys() == {"weight", "bias"}

    compat.check_keys(["model"], states.keys(), strict=True)
    compat.check_keys(["other"], states.keys(), strict=False)
    with pytest.raises(KeyError, match=r"'other'.*strict=False"):
        compat.check_keys(["other"], states.keys(), strict=True)
