"""Optimizers that are made after the model was converted."""

import pytest
import torch
from low_bit import values
from torch import nn, optim

import nemo_lowprec
from nemo_lowprec.engine import Engine
from nemo_lowprec.optim import Lion, LowBitStates, Muon
from nemo_lowprec.tensors import BlockScaledTensor

LEVELS = ["O1", "O2", "O3"]
X = torch.randn(16, 64, generator=torch.Generator().manual_seed(2))
Y = torch.randn(16, 64, generator=torch.Generator().manual_seed(3))


def net():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 64))


def train(model, optimizers, steps=40, scaler=None):
    for _ in range(steps):
        loss = (model(X).float() - Y).square().mean()
        (loss if scaler is None else scaler.scale(loss)).backward()
        for optimizer in optimizers:
            optimizer.step() if scaler is None else scaler.step(optimizer)
            optimizer.zero_grad()
        if scaler is not None:
            scaler.update()
    return loss.item()


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("cls", [optim.Adam, optim.AdamW])
@pytest.mark.parametrize("level", LEVELS)
def test_an_optimizer_that_is_made_later_trains_as_the_one_that_was_given(level, cls, scaled):
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0) if scaled else None
    given = net()
    _, optimizer = nemo_lowprec.initialize(given, cls(given.parameters(), lr=1e-2), opt_level=level)
    want = train(given, [optimizer], scaler=scaler)
    model, _ = nemo_lowprec.initialize(net(), opt_level=level)
    late = cls(model.parameters(), lr=1e-2)
    scheduler = optim.lr_scheduler.ExponentialLR(late, 1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0) if scaled else None
    assert train(model, [late], scaler=scaler) == pytest.approx(want, rel=0.05)
    scheduler.step()
    assert isinstance(late, LowBitStates) and isinstance(late, cls) and callable(late.all_reduce_grads)
    assert isinstance(late.state[model[0].weight]["exp_avg"], BlockScaledTensor) == (level != "O1")
    assert int(late.state[model[0].weight]["step"]) == 40
    saved = model.state_dict()
    assert torch.equal(saved["2.weight"].float(), values(model[2].weight) if level != "O3" else saved["2.weight"])
    again = net()
    again.load_state_dict(saved)
    assert float((again(X) - Y).square().mean()) == pytest.approx(want, rel=0.2)
    assert "fp8_histories" in late.state_dict()
    assert not any(slot.cold for slot in Engine.of(model).amaxes.histories.slots.values())


@pytest.mark.parametrize("level", LEVELS)
def test_a_second_optimizer_over_a_part_of_the_model(level):
    model = net()
    _, first = nemo_lowprec.initialize(model, optim.AdamW(model[:2].parameters(), lr=1e-2), opt_level=level)
    second = optim.AdamW(model[2:].parameters(), lr=1e-2)
    before = train(model, [first, second], steps=1)
    assert train(model, [first, second]) < 0.5 * before
    assert isinstance(second, LowBitStates)


@pytest.mark.parametrize("level", LEVELS)
def test_a_closure_is_called_once_a_step(level):
    model, _ = nemo_lowprec.initialize(net(), opt_level=level)
    late, calls = optim.AdamW(model.parameters()), []

    def closure():
        calls.append(1)
        late.zero_grad()
        loss = (model(X) - Y).square().mean()
        loss.backward()
        return loss

    assert isinstance(late.step(closure), torch.Tensor) and isinstance(late.step(closure), torch.Tensor)
    assert len(calls) == 2


LATE = {
    "sgd": lambda p: optim.SGD(p, 0.05, momentum=0.9), "lion": lambda p: Lion(p, 1e-3),
    "muon": lambda p: Muon([{"params": [q for q in p if q.dim() > 1]},
                            {"params": [q for q in p if q.dim() < 2], "use_muon": False}], 1e-2),
}  # fmt: skip


@pytest.mark.parametrize("name", LATE)
def test_sgd_lion_and_muon_are_attached_at_their_first_step_too(name):
    model, _ = nemo_lowprec.initialize(net(), opt_level="O2")
    late, losses = LATE[name](list(model.parameters())), []
    for _ in range(3):
        losses.append((model(X) - Y).square().mean())
        losses[-1].backward()
        late.step()
        late.zero_grad()
    assert losses[-1] < losses[0]
    assert isinstance(late, LowBitStates) and late.formats.exp_avg == "fp8"
    assert all(int(state["step"]) == 3 for state in late.state.values())


@pytest.mark.parametrize("level", LEVELS)
def test_one_without_a_low_bit_form_is_refused_before_it_steps(level):
    model, _ = nemo_lowprec.initialize(net(), opt_level=level)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    late = optim.Adagrad(model.parameters(), lr=0.1)
    (model(X) - Y).square().mean().backward()
    with pytest.raises(ValueError, match="Adagrad has no low-bit form"):
        late.step()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_an_optimizer_of_another_model_stays_what_it_is():
    model, _ = nemo_lowprec.initialize(net(), opt_level="O3")
    other = net()
    plain = optim.AdamW(other.parameters())
    train(other, [plain], steps=2)
    assert type(plain) is optim.AdamW and plain.state[other[0].weight]["exp_avg"].dtype == torch.float32
    assert model is not other
