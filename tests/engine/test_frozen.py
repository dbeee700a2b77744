"""Frozen parameters in general, frozen from the start and in mid-run: no master, no gradient, no state."""

import pytest
import torch
from support import CASES, HALF_LEVELS, MASTER_LEVELS, Samples, level_of, plugin
from torch import nn

from nemo_lowprec.weights import master_of

CPU = torch.device("cpu")
SAMPLES = Samples()


def net(dtype=torch.float32):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(32, 128), nn.LayerNorm(128), nn.ReLU(), nn.Linear(128, 128), nn.Linear(128, 32))
    model[3].to(dtype)
    return model


def start(case, model):
    engine = plugin(case).engine
    engine.convert(model, CPU)
    engine.settle()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine.attach(optimizer)
    return engine, optimizer


def step(engine, model, optimizer):
    with engine.forward_context():
        loss = nn.functional.cross_entropy(model(SAMPLES.x).float(), SAMPLES.y)
    with engine.backward_context():
        engine.step.scale(loss).backward()
    grads = {name: p.grad is not None for name, p in model.named_parameters()}
    engine.step.unscale(optimizer)
    engine.step.run(optimizer)
    optimizer.zero_grad()
    return grads


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CASES)
def test_what_is_frozen_has_a_weight_and_nothing_else(case, dtype):
    model = net(dtype)
    layer = model[3].requires_grad_(False)
    before = {name: p.clone() for name, p in layer.named_parameters()}
    engine, optimizer = start(case, model)
    for _ in range(2):
        grads = step(engine, model, optimizer)
    for name, param in layer.named_parameters():
        assert not grads[f"3.{name}"] and param not in optimizer.state
        master = master_of(param)  # the values of a frozen parameter of another dtype wait on the CPU
        assert master is None or (master.is_cpu and not master.requires_grad and dtype != param.dtype)
        if level_of(case).has_half_weights and param.dim() > 1:
            assert param.element_size() == 2
    saved = model.state_dict()
    rounded = torch.float16 if level_of(case).is_low_bit and dtype == torch.float32 else dtype
    assert torch.equal(saved["3.weight"].float(), before["weight"].to(rounded).float())


@pytest.mark.parametrize("case", HALF_LEVELS)
def test_what_is_frozen_in_mid_run_is_saved_exactly_and_goes_on(case):
    model = net()
    engine, optimizer = start(case, model)
    step(engine, model, optimizer)
    layer = model[3]
    exact = {name: value.clone() for name, value in model.state_dict().items() if name.startswith("3.")}
    moments = optimizer.state[layer.weight]["exp_avg"].float().clone()
    layer.requires_grad_(False)
    for _ in range(2):
        grads = step(engine, model, optimizer)
    assert not any(grads[name] for name in exact)
    now = model.state_dict()
    assert all(torch.equal(now[name], value) for name, value in exact.items())
    assert torch.equal(optimizer.state[layer.weight]["exp_avg"].float(), moments)
    layer.requires_grad_(True)
    grads = step(engine, model, optimizer)
    assert all(grads[name] for name in exact)
    now = model.state_dict()
    assert not any(torch.equal(now[name], value) for name, value in exact.items())
    assert int(optimizer.state[layer.weight]["step"]) == 2
    engine.revert()
    assert {p.dtype for p in model.parameters()} == {torch.float32}


@pytest.mark.parametrize("case", MASTER_LEVELS)
def test_a_network_that_waits_for_its_turn_is_not_put_aside(case):
    """Two optimizers that freeze each other's parameters, as those of a GAN."""
    model = net()
    engine, first = start(case, model)
    first.param_groups[0]["params"] = list(model[0].parameters())
    second = torch.optim.AdamW(model[3].parameters(), lr=1e-2)
    engine.attach(second)
    for turn in range(4):
        mine, other = (model[0], model[3]) if turn % 2 == 0 else (model[3], model[0])
        mine.requires_grad_(True)
        other.requires_grad_(False)
        step(engine, model, first if turn % 2 == 0 else second)
        weights = engine.columns.weights
        assert not any(p in weights._came_as for p in model.parameters())
    model.requires_grad_(True)
    model[0].requires_grad_(False)
    step(engine, model, first)  # a step of its own optimizer without a gradient
    assert all(p in engine.columns.weights._came_as for p in model[0].parameters())
