"""Weights that somebody else than the optimizer's step has written are scaled by what they are now."""

import pytest
import torch
from support import (
    CASES,
    Net,
    Samples,
    clone,
    level_of,
    loader,
    plugin,
    save_at,
    stateful_loader,
    train,
    trainer,
    values_of,
)
from torch import nn

import nemo_lowprec

X = Samples().x
DELAYED = [case for case in CASES if level_of(case).scaling == "delayed"]


class Linear(Net):
    """The matrix products alone, so that a factor on each weight is one on the output, too."""

    def forward(self, x):
        return self.head(self.mid(self.inp(x)))


def larger(model, factor):
    """A state of weights that are ``factor`` times as large."""
    return {name: value.float() * factor for name, value in clone(dict(model.state_dict())).items()}


def exact(state):
    x = X
    for name in ("inp", "mid", "head"):
        x = nn.functional.linear(x, state[f"{name}.weight"], state.get(f"{name}.bias"))
    return x


def error(out, want):
    return float((out.float() - want).norm() / want.norm())


@pytest.mark.parametrize("factor", [8.0, 0.125])
@pytest.mark.parametrize("case", DELAYED)
def test_another_checkpoint_is_tested_as_by_a_fresh_trainer(tmp_path, case, factor):
    precision, model = plugin(case), Linear()
    fit = train(model, precision, max_steps=3).trainer
    other = larger(model, factor)
    torch.save({"state_dict": other, "pytorch-lightning_version": "2.6.0"}, tmp_path / "other.ckpt")
    outs = fit.predict(model, loader(16), ckpt_path=tmp_path / "other.ckpt", weights_only=True)
    fresh = trainer(plugin(case)).predict(Linear(), loader(16), ckpt_path=tmp_path / "other.ckpt", weights_only=True)
    assert error(outs[0], exact(other)) < 0.08
    assert torch.equal(outs[0], fresh[0])


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_weights_loaded_in_a_plain_loop(level, training):
    model, optimizer = nemo_lowprec.initialize(Linear(), opt_level=level)
    for _ in range(3):
        model(X).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    other = larger(model, 2.0)
    model.load_state_dict(other)
    with torch.set_grad_enabled(training):
        assert error(model.train(training)(X), exact(other)) < 0.12  # of three layers with an error of their own


@pytest.mark.parametrize("write", ["mul_", "data", "copy_"])
@pytest.mark.parametrize("case", DELAYED)
def test_weights_written_between_two_steps(case, write):
    class Writes(Linear):
        def on_train_batch_start(self, batch, batch_idx):
            if batch_idx != 2:
                return
            other = larger(self, 8.0)
            with torch.no_grad():
                for name, param in self.named_parameters():
                    if write == "mul_":
                        param.mul_(8.0)
                    elif write == "copy_":
                        param.copy_(other[name])
                    else:
                        param.data = other[name].to(param.dtype)
            self.want = exact({n: values_of(p).float() for n, p in self.named_parameters()})
            self.out = self(X)
            self.trainer.should_stop = True

    model = Writes()
    train(model, case)
    assert error(model.out, model.want) < 0.08


@pytest.mark.parametrize("case", DELAYED)
def test_weights_written_through_data_are_measured_by_evaluation(case):
    class Writes(Linear):
        def on_validation_start(self):
            for param in self.parameters():
                param.data.mul_(8.0)

        def validation_step(self, batch, batch_idx):
            # One layer, whose input nobody changed.
            want = nn.functional.linear(X, values_of(self.inp.weight).float(), values_of(self.inp.bias).float())
            self.error = error(self.inp(X), want)

    model = Writes()
    train(model, case, data=(loader(), loader(16)), max_steps=4)
    assert model.error < 0.08


@pytest.mark.parametrize("case", DELAYED)
def test_a_resumed_run_keeps_its_histories(tmp_path, case):
    whole = train(Net(), case, save_at(tmp_path, 2), data=stateful_loader(), max_steps=4)
    resumed = train(Net(), case, data=stateful_loader(), ckpt=tmp_path / "step=2.ckpt", max_steps=4)
    assert torch.equal(whole.state["weights"]["mid.weight"], resumed.state["weights"]["mid.weight"])


@pytest.mark.parametrize("case", DELAYED)
def test_another_fit_of_the_same_weights_keeps_the_histories(case):
    precision, model = plugin(case), Net()
    train(model, precision, max_steps=2)
    slots = precision.engine.amaxes.histories.slots.values()
    assert not any(slot.cold for slot in slots)
    trainer(precision, max_steps=0).fit(model, loader())
    assert not any(slot.cold for slot in precision.engine.amaxes.histories.slots.values())
    with torch.no_grad():
        model.mid.weight.mul_(2)
    trainer(precision, max_steps=0).fit(model, loader())
    assert {name for name, slot in precision.engine.amaxes.histories.slots.items() if slot.cold} == {
        "mid.input", "mid.grad_output",
    }  # fmt: skip
