"""Masters in the places of half copies: what a list that is kept from step to step could miss."""

import copy
import pickle

import pytest
import torch
from torch import nn

from nemo_lowprec import prepare
from nemo_lowprec.weights import master_of
from nemo_lowprec.weights.places import Places

LEVELS = ["bf16_mixed", "fp16_mixed", "bf16_with_fp8_mixed"]


def start(level="bf16_mixed", **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32), nn.Linear(32, 32), nn.Linear(32, 16))
    groups = [{"params": model[:2].parameters()}, {"params": model[2].parameters(), "lr": 0.02}]
    return prepare(model, torch.optim.AdamW(groups, lr=0.01), level, **options)


def backward(model, seed):
    torch.manual_seed(seed)
    loss = model(torch.randn(8, 32)).float().square().mean()
    loss.backward()
    return loss.item()


def missing_gradient(model, optimizer, saved):
    model[2].weight.grad = None


def frozen(model, optimizer, saved):
    model[2].requires_grad_(False)
    model[2].weight.grad = model[2].bias.grad = None


def unfrozen(model, optimizer, saved):
    model[2].requires_grad_(True)


def group_added(model, optimizer, saved):
    optimizer.add_param_group({"params": model[3].parameters(), "lr": 0.005})


def parameter_replaced(model, optimizer, saved):
    old, new = model[2].weight, nn.Parameter(torch.full((32, 32), 0.01, dtype=model[2].weight.dtype))
    model[2].weight = new
    new.grad = torch.full((32, 32), 0.5, dtype=new.dtype)
    optimizer.param_groups[1]["params"][0] = new
    optimizer.state.pop(old)


def group_regrouped(model, optimizer, saved):
    first, second = optimizer.param_groups[:2]
    second["params"].insert(0, first["params"].pop())


def state_saved(model, optimizer, saved):
    saved.append(copy.deepcopy(optimizer.state_dict()))


def state_loaded(model, optimizer, saved):
    optimizer.load_state_dict(saved[-1])


def state_entry_replaced(model, optimizer, saved):
    for param, values in list(optimizer.state.items()):
        optimizer.state[param] = {name: value.clone() for name, value in values.items()}


def state_dropped(model, optimizer, saved):
    optimizer.state.clear()


def weight_written(model, optimizer, saved):
    with torch.no_grad():
        model[0].weight.mul_(0.5)


def weight_given_data(model, optimizer, saved):
    model[0].weight.data = model[0].weight.data * 0.5


def master_replaced(model, optimizer, saved):
    weight = model[0].weight
    master = nn.Parameter(master_of(weight).detach().clone())
    for name, value in master_of(weight).__dict__.items():
        setattr(master, name, value)
    weight.master_weight = master


SCENARIOS = {
    "a gradient is missing": {2: missing_gradient},
    "frozen and unfrozen": {2: frozen, 4: unfrozen},
    "a group is added": {3: group_added},
    "a parameter is replaced": {3: parameter_replaced},
    "a parameter changes its group": {3: group_regrouped},
    "the state is loaded": {2: state_saved, 4: state_loaded},
    "the state is made anew": {2: state_entry_replaced, 4: state_dropped},
    "weights are written": {2: weight_written, 4: weight_given_data},
    "a master is replaced": {3: master_replaced},
}


def run(level, events):
    model, optimizer = start(level)
    saved, found = [], []
    for step in range(6):
        loss = backward(model, step)
        if step in events:
            events[step](model, optimizer, saved)
        optimizer.step()
        held = [p for group in optimizer.param_groups for p in group["params"]]
        own = {id(p) for p in model.parameters()}
        assert all(id(p) in own for p in held) and all(id(p) in own for p in optimizer.state)
        assert all(master_of(p).grad is None for p in held if master_of(p) is not None)
        optimizer.zero_grad()
        states = copy.deepcopy([state for state in optimizer.state_dict()["state"].values()])
        found.append((loss, copy.deepcopy(dict(model.state_dict())), states))
    return found


def same(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return len(a) == len(b) and all(map(same, a, b)) if isinstance(a, (list, tuple)) else a == b


@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("level", LEVELS)
def test_a_kept_list_gives_the_results_of_a_new_list_at_every_step(level, scenario, monkeypatch):
    kept = run(level, SCENARIOS[scenario])
    monkeypatch.setattr(Places, "fits", lambda self, groups: False)
    assert same(kept, run(level, SCENARIOS[scenario]))


def test_a_steady_step_makes_no_new_list(monkeypatch):
    model, optimizer = start()
    backward(model, 0)
    optimizer.step()
    made = []
    monkeypatch.setattr(Places, "__init__", lambda *args: made.append(args))
    for step in range(3):
        backward(model, step)
        optimizer.step()
        optimizer.zero_grad()
    assert not made


def test_a_frozen_parameter_is_stepped_on_its_master_once_it_is_unfrozen():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 16))
    model[0].requires_grad_(False)
    model, optimizer = prepare(model, torch.optim.SGD(model.parameters(), lr=1e-4), "bf16_mixed")
    for step in range(2):
        backward(model, step)
        optimizer.step()
        optimizer.zero_grad()
    model[0].requires_grad_(True)
    before = model.state_dict()["0.weight"].clone()
    backward(model, 2)
    gradient = model[0].weight.grad.clone()
    optimizer.step()
    assert torch.equal(model.state_dict()["0.weight"], before - 1e-4 * gradient)  # too small a step for BF16


def test_hooks_around_the_step_and_the_optimizer_meet_who_they_did():
    model, optimizer = start()
    met = []

    def look(optimizer, args, kwargs):
        met.append([p for group in optimizer.param_groups for p in group["params"]])

    optimizer.register_step_post_hook(look)
    own = type(optimizer).step.__wrapped__

    def step(self, *args, **kwargs):
        look(self, args, kwargs)
        return own(self, *args, **kwargs)

    held = [p for group in optimizer.param_groups for p in group["params"]]
    lists = [group["params"] for group in optimizer.param_groups]
    state = optimizer.state
    optimizer.__class__ = type("Looking", (type(optimizer),), {"step": torch.optim.Optimizer.profile_hook_step(step)})
    for i in range(2):
        backward(model, i)
        optimizer.step()
        inside, after = met[-2:]
        assert all(a is master_of(p) for a, p in zip(inside, held, strict=True))
        assert all(a is p for a, p in zip(after, held, strict=True))
    assert all(group["params"] is one for group, one in zip(optimizer.param_groups, lists, strict=True))
    assert optimizer.state is state and set(map(id, state)) == set(map(id, held))


def test_a_step_that_failed_leaves_no_masters_in_the_next():
    (model, optimizer), (twin, untroubled) = start(), start()
    for step in range(3):
        for each in (model, twin):
            backward(each, step)
        if step == 1:
            handle = optimizer.register_step_pre_hook(lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                optimizer.step()
            handle.remove()
        for each in (optimizer, untroubled):
            each.step()
        for each in (model, twin):
            each.zero_grad()
    assert same(dict(model.state_dict()), dict(twin.state_dict()))
    held = [p for group in optimizer.param_groups for p in group["params"]]
    assert all(a is b for a, b in zip(held, model.parameters(), strict=False))


def test_copies_and_pickles_of_an_optimizer_step_by_themselves():
    model, optimizer = start()
    backward(model, 0)
    optimizer.step()
    twins = [copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))]
    weights = copy.deepcopy(dict(model.state_dict()))
    for twin in twins:
        params = [p for group in twin.param_groups for p in group["params"]]
        assert set(map(id, twin.state)) == set(map(id, params)) and all(p.dtype == torch.float32 for p in params)
        before = params[0].detach().clone()
        for param in params:
            param.grad = torch.ones_like(param)
        twin.step()
        assert not torch.equal(params[0], before)
    assert same(dict(model.state_dict()), weights)
    optimizer.zero_grad()
    backward(model, 1)
    optimizer.step()
    assert not torch.equal(model.state_dict()["0.weight"], weights["0.weight"])


def test_a_reverted_model_leaves_no_masters_behind():
    from nemo_lowprec.engine import Engine

    model, optimizer = start()
    backward(model, 0)
    optimizer.step()
    weights = Engine.of(model).columns.weights
    Engine.of(model).revert()
    assert not weights._places and not weights._comparisons
