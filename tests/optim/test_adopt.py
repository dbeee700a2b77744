"""The user's own optimizer becomes the low-bit one in place, and is given back."""

import copy
import pickle

import pytest
import torch
from low_bit import REFUSED, make_params, run, values
from support import assert_same
from torch import nn, optim
from torch.optim.lr_scheduler import LambdaLR

from nemo_lowprec.optim import Adam, AdamW, LowBitStates, StateFormats, adopt, check_adoptable, release

LOW = StateFormats("fp8", "fp16")
KEYS = ("exp_avg", "exp_avg_sq")


class OwnDefaults(optim.AdamW):
    def __init__(self, params):
        super().__init__(params, lr=1e-2)


@pytest.mark.parametrize("cls,becomes", [(optim.AdamW, AdamW), (optim.Adam, Adam)])
def test_each_class_becomes_its_own(cls, becomes):
    """torch's AdamW is an Adam too: its weight decay must stay decoupled."""
    params, twins = make_params(), make_params()
    optimizer, plain = cls(params, lr=1e-2, weight_decay=0.5), cls(twins, lr=1e-2, weight_decay=0.5)
    adopt(optimizer, StateFormats())
    assert type(optimizer) is becomes and isinstance(optimizer, cls)
    assert optimizer.param_groups[0]["decoupled_weight_decay"] == (cls is optim.AdamW)
    run(optimizer, params)
    run(plain, twins)
    for p, q in zip(params, twins, strict=True):
        assert not p.numel() or (p - q).abs().max() <= 1e-6


@pytest.mark.parametrize("cls", [optim.AdamW, optim.Adam, OwnDefaults])
@pytest.mark.parametrize("flags", [{}, {"foreach": True}, {"fused": True}])
def test_round_trip_with_states_groups_hooks_and_a_scheduler(cls, flags):
    if flags and cls is OwnDefaults:
        pytest.skip("takes no flags")
    params, twins = make_params(), make_params()
    optimizer, plain = cls(params, **flags), cls(twins, **flags)
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    schedule, twin_schedule = LambdaLR(optimizer, lambda s: 0.5**s), LambdaLR(plain, lambda s: 0.5**s)
    groups, held = optimizer.param_groups, optimizer.param_groups[0]["params"]

    def train(first, count):
        for step in range(first, first + count):
            run(optimizer, params, 1, first=step)
            schedule.step()
            run(plain, twins, 1, first=step)
            twin_schedule.step()

    train(0, 2)
    keys = set(vars(optimizer))
    adopt(optimizer, LOW)
    assert isinstance(optimizer, LowBitStates) and type(optimizer).__name__ == cls.__name__
    assert optimizer.param_groups is groups and groups[0]["params"] is held
    assert all(a is b for a, b in zip(held, params, strict=True))
    with _no_warning():
        train(2, 2)
    assert optimizer.state[params[0]]["exp_avg"].fmt.name == "e4m3" and optimizer.state[params[0]]["step"] == 4
    stored = {(i, k): values(optimizer.state[p][k]) for i, p in enumerate(params) for k in KEYS}
    release(optimizer)
    assert type(optimizer) is cls and set(vars(optimizer)) == keys
    for i, p in enumerate(params):
        for key in KEYS:
            value = optimizer.state[p][key]
            assert type(value) is torch.Tensor and value.dtype == torch.float32
            assert torch.equal(value, stored[i, key])
    train(4, 2)
    assert calls == ["before", "after"] * 6 and optimizer.state[params[0]]["step"] == 6
    assert groups[0]["lr"] == plain.param_groups[0]["lr"]
    for p, q in zip(params, twins, strict=True):
        assert not p.numel() or (p - q).abs().max() <= 3e-4
    release(optimizer)  # once more does nothing
    adopt(optimizer, LOW)
    assert isinstance(optimizer, LowBitStates)


class _no_warning:
    """Fails on the warning that torch gives where a scheduler has not seen the optimizer step."""

    def __enter__(self):
        import warnings

        self._caught = warnings.catch_warnings()
        self._caught.__enter__()
        warnings.simplefilter("error")

    def __exit__(self, *error):
        self._caught.__exit__(*error)


def test_release_leaves_another_optimizer_alone():
    params = make_params()
    for optimizer in (optim.SGD(params), AdamW(params)):
        cls = type(optimizer)
        release(optimizer)
        assert type(optimizer) is cls


def test_a_fused_optimizer_of_torch_keeps_its_count():
    params = make_params()
    optimizer = optim.AdamW(params, fused=True)
    run(optimizer, params, 2)
    adopt(optimizer, LOW)
    run(optimizer, params, 1, first=2)
    release(optimizer)
    run(optimizer, params, 1, first=3)
    assert all(optimizer.state[p]["step"] == 4 for p in params if p.numel())


REFUSED_HERE = {
    **REFUSED,
    r"complex parameter of shape \(2,\)": lambda p: optim.Adam([*p, nn.Parameter(torch.ones(2) * 1j)]),
    "holds low-bit states already": AdamW,
}


@pytest.mark.parametrize("message", REFUSED_HERE)
def test_refused_by_name_and_untouched(message):
    optimizer = REFUSED_HERE[message](make_params())
    cls, before = type(optimizer), dict(vars(optimizer))
    for attempt in (check_adoptable, lambda o: adopt(o, LOW)):
        with pytest.raises(ValueError, match=message):
            attempt(optimizer)
    assert type(optimizer) is cls and vars(optimizer) == before


def test_checking_changes_nothing():
    optimizer = optim.AdamW(make_params())
    before = dict(vars(optimizer))
    check_adoptable(optimizer)
    assert type(optimizer) is optim.AdamW and vars(optimizer) == before


def test_an_adopted_state_dict_is_one_of_torchs():
    params = make_params()
    optimizer = optim.AdamW(params, lr=1e-2)
    adopt(optimizer, LOW)
    run(optimizer, params, 2)
    state = pickle.loads(pickle.dumps(optimizer.state_dict()))
    twin = optim.AdamW(make_params())
    twin.load_state_dict(state)
    adopt(twin, LOW)
    assert_same(twin.state_dict(), optimizer.state_dict())


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda optimizer: pickle.loads(pickle.dumps(optimizer))])
@pytest.mark.parametrize("cls", [lambda params: optim.AdamW(params, lr=1e-2), OwnDefaults])
def test_a_copy_of_an_adopted_optimizer_steps_and_is_given_back(cls, copied):
    params = make_params()
    optimizer = cls(params)
    original = type(optimizer)
    adopt(optimizer, LOW)
    run(optimizer, params, 2)
    twin = copied(optimizer)
    assert type(twin) is type(optimizer)
    assert_same(twin.state_dict(), optimizer.state_dict())
    run(optimizer, params, 1)
    run(twin, twin.param_groups[0]["params"], 1)
    assert_same([values(p) for p in twin.param_groups[0]["params"]], [values(p) for p in params])
    release(twin)
    assert type(twin) is original and not isinstance(twin, LowBitStates)
