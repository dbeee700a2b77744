"""Saved states: plain tensors of exactly the values, for any optimizer of the kind, in any formats."""

import copy
import io
import pickle
from itertools import product

import pytest
import torch
from low_bit import FORMATS, FP32, OURS, all_bits, all_values, make_params, run, values
from support import assert_same
from torch import Tensor, nn

from nemo_lowprec.optim import Adam, AdamW, StateFormats, adopt

PAIRS = pytest.mark.parametrize("first,second", list(product(FORMATS, FORMATS)))
CLASSES = pytest.mark.parametrize("name", OURS)
KEYS = ("exp_avg", "exp_avg_sq")


def formats(first, second, master=None):
    return {"exp_avg_dtype": first, "exp_avg_sq_dtype": second, "master_weight_dtype": master}


def trained(cls=AdamW, dtype=torch.float32, steps=3, **options):
    params = make_params(dtype)
    optimizer = cls(params, lr=1e-2, **options)
    run(optimizer, params, steps)
    return params, optimizer


def copies(params):
    twins = [nn.Parameter(p.detach().clone()) for p in params]
    for twin in twins:
        twin.grad_dtype = None
    return twins


def saved(optimizer):
    """What a file keeps of a state_dict, opened with weights_only."""
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize(
    "first,second,master",
    [(*pair, None) for pair in product(FORMATS, FORMATS)]
    + [("fp32", "fp32", "fp16"), ("fp8", "fp16", "fp16"), ("bf16", "fp8", "fp32"), ("fp8", "fp16", "fp32")],
)
def test_a_state_dict_holds_plain_tensors_of_the_values_and_resumes_bit_for_bit(first, second, master):
    options = formats(first, second, master)
    params, optimizer = trained(dtype=torch.float16, **options, stochastic_rounding=True, seed=4)
    state = saved(optimizer)
    names = {"step", *KEYS} | ({"master_weight"} if master else set())
    for i, param in enumerate(params):
        assert state["state"][i].keys() == names
        for key, value in state["state"][i].items():
            assert type(value) is Tensor and value.is_contiguous() and value.untyped_storage().nbytes() == value.nbytes
            assert value.shape == (() if key == "step" else param.shape)
            assert torch.equal(value.float(), values(optimizer.state[param][key]))

    twins = copies(params)
    resumed = AdamW(twins, lr=1.0, **options, stochastic_rounding=True, seed=4)
    resumed.load_state_dict(state)
    assert_same(all_values(resumed), all_values(optimizer))
    assert_same(saved(resumed), state)
    for each, over in ((optimizer, params), (resumed, twins)):
        run(each, over, 3, first=3)
    assert_same(all_bits(resumed), all_bits(optimizer))


@PAIRS
@CLASSES
def test_to_torch_and_back_changes_no_bit(name, first, second):
    ours, torchs = OURS[name]
    params, optimizer = trained(ours, **formats(first, second))
    plain = torchs(copies(params))
    plain.load_state_dict(saved(optimizer))  # torch shares tensors of a live optimizer
    assert plain.param_groups[0]["lr"] == 1e-2
    for p, q in zip(params, plain.param_groups[0]["params"], strict=True):
        for key in KEYS:
            assert plain.state[q][key].dtype == torch.float32
            assert torch.equal(plain.state[q][key], values(optimizer.state[p][key]))
    back = ours(copies(params), **formats(first, second))
    back.load_state_dict(plain.state_dict())
    assert_same(all_values(back), all_values(optimizer))
    run(plain, plain.param_groups[0]["params"], 1, first=3)  # torch's goes on with them
    run(optimizer, params, 1, first=3)
    for p, q in zip(params, plain.param_groups[0]["params"], strict=True):
        assert not p.numel() or (p - q).abs().max() <= 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("first,second", [("fp32", "fp32"), ("fp8", "fp16"), ("bf16", "fp8")])
def test_states_of_torch_go_into_other_formats_whatever_the_parameters_dtype(dtype, first, second):
    source = make_params()
    plain = torch.optim.AdamW(source)
    run(plain, source, size=1e-6)  # squares that FP16 would lose
    optimizer = AdamW(make_params(dtype), **formats(first, second, "fp16"))
    optimizer.load_state_dict(plain.state_dict())
    for p, q in zip(source, optimizer.param_groups[0]["params"], strict=True):
        state = optimizer.state[q]
        assert "master_weight" not in state  # made by the next step, of the weight as it is then
        assert state["step"].dtype == torch.float32 and state["step"] == 4
        for key, fmt in zip(KEYS, (first, second), strict=True):
            want, got = plain.state[p][key], values(state[key])
            assert not want.numel() or want.count_nonzero()
            if fmt == "fp32" or p.dim() < 2:
                assert torch.equal(got, want)
            elif p.numel():
                assert (got - want).abs().max() <= 0.07 * want.abs().max()


def test_a_master_that_is_not_kept_is_dropped():
    _, with_master = trained(dtype=torch.bfloat16, master_weight_dtype="fp32")
    _, without = trained(dtype=torch.bfloat16)
    without.load_state_dict(with_master.state_dict())
    assert all("master_weight" not in s for s in without.state.values())


@pytest.mark.parametrize("model_first", [True, False])
@pytest.mark.parametrize("master", ["fp16", "fp32"])
def test_a_master_that_was_not_saved_is_made_of_the_loaded_weight_in_either_order(master, model_first):
    saved_params, plain = trained(dtype=torch.bfloat16)
    params = make_params(torch.bfloat16)
    with torch.no_grad():
        for p in params:
            p.add_(1)
    optimizer = AdamW(params, master_weight_dtype=master)
    for part in (0, 1) if model_first else (1, 0):
        if part == 0:
            with torch.no_grad():
                for p, q in zip(params, saved_params, strict=True):
                    p.copy_(q)
        else:
            optimizer.load_state_dict(plain.state_dict())
    run(optimizer, params, 1)
    for p, q in zip(params, saved_params, strict=True):
        assert (p.float() - q.float()).abs().max() <= 0.1 if p.numel() else True


@pytest.mark.parametrize("master", ["fp16", "fp32"])
@pytest.mark.parametrize("by_data", [True, False])
def test_a_weight_that_others_wrote_is_not_undone(master, by_data):
    params, optimizer = trained(dtype=torch.bfloat16, master_weight_dtype=master)
    before = [values(optimizer.state[p]["master_weight"]).clone() for p in params]
    run(optimizer, params, 1)
    moved = [
        not torch.equal(values(optimizer.state[p]["master_weight"]), b) for p, b in zip(params, before, strict=True)
    ]
    assert any(moved)
    with torch.no_grad():
        for p in params:
            if by_data:
                p.data = p.data + 8
            else:
                p.add_(8)
    want = [p.detach().float().clone() for p in params]
    run(optimizer, params, 1)
    for p, w in zip(params, want, strict=True):
        assert (p.float() - w).abs().max() <= 0.1 if p.numel() else True


def test_a_model_with_parameters_that_have_no_state_yet():
    params = make_params()
    optimizer = AdamW(params)
    run(optimizer, params[:2], 1)
    state = saved(optimizer)
    assert state["state"].keys() == {0, 1}
    twin = AdamW(copies(params))
    twin.load_state_dict(state)
    assert_same(all_values(twin), all_values(optimizer))
    run(twin, twin.param_groups[0]["params"], 1, first=1)
    assert twin.state[twin.param_groups[0]["params"][3]]["step"] == 1


def test_states_that_do_not_fit_are_refused():
    params, optimizer = trained()
    before = all_bits(optimizer)
    amsgrad = torch.optim.AdamW(make_params(), amsgrad=True)
    run(amsgrad, amsgrad.param_groups[0]["params"], 1)
    with pytest.raises(ValueError, match="amsgrad=True, which has no low-bit form"):
        optimizer.load_state_dict(amsgrad.state_dict())
    with pytest.raises(ValueError, match="parameter group"):
        optimizer.load_state_dict(AdamW(params[:2]).state_dict())
    assert_same(all_bits(optimizer), before)


def test_loading_copies_and_leaves_the_dict_alone():
    params, optimizer = trained()
    state = optimizer.state_dict()
    kept = copy.deepcopy(state)
    twin = AdamW(copies(params))
    twin.load_state_dict(state)
    run(twin, twin.param_groups[0]["params"], 2, first=3)
    assert_same(state, kept)
    assert state["state"][0]["exp_avg"].dtype == torch.bfloat16


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "save"])
@pytest.mark.parametrize("adopted", [False, True])
def test_copies_of_the_optimizer_go_on_alike(how, adopted):
    params = make_params()
    options = formats("fp8", "fp16")
    if adopted:
        optimizer = torch.optim.Adam(params, lr=1e-2)
        adopt(optimizer, StateFormats("fp8", "fp16", stochastic_rounding=True, seed=2))
    else:
        optimizer = Adam(params, lr=1e-2, **options, stochastic_rounding=True, seed=2)
    run(optimizer, params, 2)
    if how == "deepcopy":
        twin = copy.deepcopy(optimizer)
    elif how == "pickle":
        twin = pickle.loads(pickle.dumps(optimizer))
    else:
        file = io.BytesIO()
        torch.save(optimizer, file)
        file.seek(0)
        twin = torch.load(file, weights_only=False)
    assert type(twin) is Adam and twin.formats == optimizer.formats
    assert_same(all_bits(twin), all_bits(optimizer))
    theirs = twin.param_groups[0]["params"]
    assert not {id(p) for p in theirs} & {id(p) for p in params}
    for each, over in ((optimizer, params), (twin, theirs)):
        run(each, over, 2, first=2)
    assert_same(all_bits(twin), all_bits(optimizer))


def test_state_dict_hooks_are_called():
    params, optimizer = trained(**FP32)
    seen = []
    optimizer.register_state_dict_post_hook(lambda _, state: seen.append(sorted(state)))
    optimizer.register_load_state_dict_pre_hook(lambda _, state: seen.append("pre"))
    optimizer.register_load_state_dict_post_hook(lambda _: seen.append("post"))
    optimizer.load_state_dict(optimizer.state_dict())
    assert seen == [["param_groups", "state"], "pre", "post"] and len(params)
