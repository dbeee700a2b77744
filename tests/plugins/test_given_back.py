"""After a run of the Trainer, the strategy, the callbacks and the model have what they would have without a level."""

import warnings

import pytest
import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.callbacks import Callback, ModelSummary, StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.strategies import ModelParallelStrategy, SingleDeviceStrategy
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from nemo_lowprec.plugins.checkpoint_io import AtomicCheckpointIO
from nemo_lowprec.strategies import LowPrecisionShardedStrategy
from tests.processes import on_processes
from tests.support import Net, loader, plugin, stateful_loader, trainer

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
    assert model.schedules == (4 // devices if where == "nowhere" else 0)
    return attributes(run, model)


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
    theirs = TorchCheckpointIO()
    strategy = Looking()
    strategy.checkpoint_io = theirs
    model, path = Net(), tmp_path / "x.ckpt"
    run = trainer(plugin("bf16_mixed"), Save(path), strategy=strategy, max_steps=1)
    run.fit(model, loader())
    assert AtomicCheckpointIO in strategy.seen and strategy._checkpoint_io is theirs
    for use in (
        lambda: run.save_checkpoint(tmp_path / "y.ckpt"),
        lambda: run.validate(model, loader(), ckpt_path=path, verbose=False),
        lambda: trainer(plugin("msamp_o2"), strategy=strategy, max_steps=2).fit(model, loader(), ckpt_path=path),
    ):
        strategy.seen.clear()
        use()
        assert AtomicCheckpointIO in strategy.seen and strategy._checkpoint_io is theirs
    strategy.seen.clear()
    other = trainer(None, Save(tmp_path / "z.ckpt"), strategy=strategy, max_steps=3)
    other.fit(Net(), loader(), ckpt_path=path)
    assert set(strategy.seen) == {TorchCheckpointIO} and strategy._checkpoint_io is theirs


class Cut(Net):
    """Sharded by its user."""

    def configure_model(self):
        if not isinstance(self, FSDPModule):
            fully_shard(self.mid, mesh=self.device_mesh["data_parallel"])
            fully_shard(self, mesh=self.device_mesh["data_parallel"])


def fitted(model, case, lr=1e-2):
    """The losses of two steps; at no level by Lightning's own strategy."""
    model.make_optimizer = lambda params: torch.optim.AdamW(params, lr=lr, weight_decay=0.0)
    model.losses.clear()
    torch.manual_seed(3)
    strategy = ModelParallelStrategy() if case is None else LowPrecisionShardedStrategy()
    run = trainer(case and plugin(case), strategy=strategy, max_steps=2, use_distributed_sampler=False)
    run.fit(model, stateful_loader())
    return list(model.losses)


def on_one(rank):
    found = {}
    for net in (Net, Cut):
        fresh = {case: fitted(net(), case) for case in ("bf16_mixed", "te_fp8", "fp16_mixed")}
        fresh |= {None: fitted(Cut(), None)} if net is Cut else {}
        model = net()
        for case in ("bf16_mixed", *fresh):
            fitted(model, case, lr=0.0)
            found[f"{net.__name__} after {case}: steps"] = not STEPS & vars(model).keys()
            found[f"{net.__name__} after {case}: policy"] = model._get_fsdp_state()._mp_policy == MixedPrecisionPolicy()
            for then, losses in fresh.items():
                found[f"{net.__name__} after {case}: {then}"] = fitted(model, then, lr=0.0)[0] == losses[0]
        found[f"{net.__name__}: two steps"] = fitted(model, "fp16_mixed") == fresh["fp16_mixed"]
    return found


def test_a_sharded_model_goes_on_at_another_level_or_at_none(tmp_path):
    """As a new one does: units gather what the level of the run says."""
    [found] = on_processes(1, tmp_path, on_one)
    assert len(found) == 39 and all(found.values()), [name for name, good in found.items() if not good]
