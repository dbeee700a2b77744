"""After a run of the Trainer, the strategy, the callbacks and the model have what they would have without a level."""

import warnings

import pytest
import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.callbacks import Callback, ModelSummary, StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch.nn import functional as F

from nemo_lowprec.checkpoint.sharded_folder import in_full
from nemo_lowprec.plugins.checkpoint_io import AtomicCheckpointIO
from tests.processes import on_processes
from tests.support import Net, loader, plugin, trainer

STEPS = {"training_step", "validation_step", "test_step", "predict_step"}
STAGES = ["before the optimizers", "in the first step", "nowhere"]


class Fails(Net):
    """Raises an error at one point of ``STAGES``; keeps a method of its own that Lightning calls."""

    def __init__(self, where):
        super().__init__(stepwise=True)
        self.where, self.schedules = where, 0
        self.lr_scheduler_step = self.count_schedules

    def count_schedules(self, scheduler, metric):
        self.schedules += 1
        scheduler.step()

    def configure_optimizers(self):
        if self.where == "before the optimizers":
            raise InterruptedError
        return super().configure_optimizers()

    def training_step(self, batch, batch_idx):
        if self.where == "in the first step":
            raise InterruptedError
        return super().training_step(batch, batch_idx)


def attributes(run, model):
    """Every attribute of what a level puts methods or hooks on: the object itself, or its name and type."""
    owners = {
        "strategy": run.strategy, "model": model, "signals": run._signal_connector, "loop": run.fit_loop.epoch_loop,
        **{type(callback).__name__: callback for callback in run.callbacks},
    }  # fmt: skip
    return {
        f"{owner}.{name}": getattr(value, "__qualname__", type(value).__qualname__)
        for owner, held in owners.items() for name, value in vars(held).items() if name != "_precision_plugin"
    }  # fmt: skip


def ended(level, where, averaging, devices=1, **options):
    """The attributes after a fit that has ended as ``where`` says."""
    model = Fails(where)
    callbacks = [ModelSummary(), StochasticWeightAveraging(1e-3) if averaging == "swa" else WeightAveraging()]
    run = trainer(level, *callbacks, max_epochs=1, enable_model_summary=True, devices=devices, **options)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            run.fit(model, loader(), loader())
    except InterruptedError:
        assert where != "nowhere"
    return attributes(run, model) | {"schedules": model.schedules}


@pytest.mark.parametrize("averaging", ["swa", "average"])
@pytest.mark.parametrize("where", STAGES)
@pytest.mark.parametrize("case", ["te_fp8", "fp16_mixed", "msamp_o2"])
def test_a_fit_leaves_nothing(case, where, averaging):
    assert ended(plugin(case), where, averaging) == ended(None, where, averaging)


def on_two(rank):
    return {
        where: [ended(level, where, "swa", 2, strategy="ddp") for level in (plugin("bf16_mixed"), None)]
        for where in STAGES
    }


def test_a_fit_of_two_processes_leaves_nothing(tmp_path):
    for found in on_processes(2, tmp_path, on_two):
        assert found.keys() == set(STAGES)
        for ours, lightnings in found.values():
            assert ours == lightnings


class Looking(SingleDeviceStrategy):
    """Keeps the class of each CheckpointIO that is asked for."""

    def __init__(self):
        super().__init__(torch.device("cpu"))
        self.seen = []

    def _look(self):
        found = SingleDeviceStrategy.checkpoint_io.fget(self)
        self.seen.append(type(found))
        return found

    checkpoint_io = property(_look, SingleDeviceStrategy.checkpoint_io.fset)


class Save(Callback):
    def __init__(self, path):
        self.path = path

    def on_train_end(self, trainer, module):
        trainer.save_checkpoint(self.path)


def test_a_strategy_has_the_checkpoint_io_that_it_had(tmp_path):
    def with_plugin(case, *callbacks, **options):
        strategy.precision_plugin = None  # Lightning takes no second one
        return trainer(case and plugin(case), *callbacks, accelerator="auto", strategy=strategy, **options)

    theirs = TorchCheckpointIO()
    strategy = Looking()
    strategy.checkpoint_io = theirs
    model, path = Net(), tmp_path / "x.ckpt"
    run = with_plugin("bf16_mixed", Save(path), max_steps=1)
    run.fit(model, loader())
    assert AtomicCheckpointIO in strategy.seen and strategy._checkpoint_io is theirs
    for use in (
        lambda: run.save_checkpoint(tmp_path / "y.ckpt"),
        lambda: run.validate(model, loader(), ckpt_path=path, verbose=False),
        lambda: with_plugin("msamp_o2", max_steps=2).fit(model, loader(), ckpt_path=path),
    ):
        strategy.seen.clear()
        use()
        assert AtomicCheckpointIO in strategy.seen and strategy._checkpoint_io is theirs
    strategy.seen.clear()
    with_plugin(None, Save(tmp_path / "z.ckpt"), max_steps=3).fit(Net(), loader(), ckpt_path=path)
    assert set(strategy.seen) == {TorchCheckpointIO} and strategy._checkpoint_io is theirs


class Reads(Net):
    """A step of its own, which reads the weights of layers that it does not call."""

    def __init__(self):
        super().__init__()
        self.training_step = self.step

    def step(self, batch, batch_idx):
        return F.cross_entropy(F.linear(self.inp(batch["x"]), self.head.weight).float(), batch["y"])


def on_one(rank):
    found = {}
    for net in (Net, Reads):
        model = net()
        before = STEPS & vars(model).keys()
        for _ in range(2):
            weight = in_full(model.head.weight).clone()
            run = trainer(plugin("bf16_mixed"), strategy="lowprec_sharded", max_steps=2)
            run.fit(model, loader())
            after = {name: getattr(vars(model)[name], "__func__", None) for name in STEPS & vars(model).keys()}
            found[f"{net.__name__} {len(found)}: steps"] = after.keys() == before
            found[f"{net.__name__} {len(found)}: learns"] = not torch.equal(in_full(model.head.weight), weight)
    return {**found, "own": after == {"training_step": Reads.step}}


def test_a_sharded_model_has_the_steps_that_it_had(tmp_path):
    [found] = on_processes(1, tmp_path, on_one)
    assert len(found) == 9 and all(found.values()), found
