"""The step of the low-bit Adam and AdamW, against torch's."""

import gc
from itertools import product
from weakref import ref

import pytest
import torch
from low_bit import FORMATS, FP32, OURS, bits, make_params, randn, run, set_grads, values
from torch import nn

from nemo_lowprec.optim import Adam, AdamW
from nemo_lowprec.tensors import BlockScaledTensor, GradientTensor

CLASSES = pytest.mark.parametrize("name", OURS)


def pair(name, dtype=torch.float32, formats=FP32, **options):
    """Ours over parameters of ``dtype`` and torch's over FP32 ones of the same values."""
    ours, torchs = OURS[name]
    params = make_params(dtype)
    twins = [nn.Parameter(values(p)) for p in params]
    return params, ours(params, **options, **formats), twins, torchs(twins, **options)


def furthest(params, twins):
    return max(float((values(p) - values(q)).abs().max()) for p, q in zip(params, twins, strict=True) if p.numel())


@CLASSES
@pytest.mark.parametrize("first,second", list(product(FORMATS, FORMATS)))
def test_every_pair_of_state_formats_follows_torch(name, first, second):
    options = {"lr": 1e-3, "weight_decay": 0.05}
    params, optimizer, twins, plain = pair(
        name, formats={"exp_avg_dtype": first, "exp_avg_sq_dtype": second}, **options
    )
    start = [values(p) for p in params]
    run(optimizer, params)
    run(plain, twins)
    assert furthest(params, twins) <= (1e-6 if (first, second) == ("fp32", "fp32") else 3e-4)
    assert furthest(params, start) > 2e-3
    for param, twin in zip(params, twins, strict=True):
        state = optimizer.state[param]
        low = param.dim() > 1
        plain_dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16}
        for key, fmt in (("exp_avg", first), ("exp_avg_sq", second)):
            if low and fmt in ("fp16", "fp8"):
                assert isinstance(state[key], BlockScaledTensor) and state[key].fmt.name == {
                    "fp16": "fp16", "fp8": "e4m3" if key == "exp_avg" else "e5m3",
                }[fmt]  # fmt: skip
                assert state[key].data_blocks.element_size() == (2 if fmt == "fp16" else 1)
            else:
                assert type(state[key]) is torch.Tensor
                assert state[key].dtype == (plain_dtypes[fmt] if low else torch.float32)
            if param.numel():
                # E4M3 rounds by 1/16 at most, each step anew; what lies far below its block's largest is lost.
                want = plain.state[twin][key]
                assert (values(state[key]) - want).abs().max() <= 0.25 * want.abs().max()
        assert state["step"] == 4 or not param.numel()


@pytest.mark.parametrize("name", OURS)
def test_states_take_what_the_formats_say(name):
    ours, _ = OURS[name]
    [param] = params = make_params(shapes=[(64, 1024)])
    optimizer = ours(params)
    run(optimizer, params, 1)
    state = optimizer.state[param]
    stored = state["exp_avg"].stored_bytes() + state["exp_avg_sq"].stored_bytes()
    assert 3 * param.numel() < stored <= 3.1 * param.numel() and "master_weight" not in state


@CLASSES
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("master", [None, "fp16", "fp32"])
def test_masters(name, dtype, master):
    params, optimizer, twins, plain = pair(name, dtype, {**FP32, "master_weight_dtype": master}, lr=1e-3)
    run(optimizer, params)
    run(plain, twins)
    step = torch.finfo(dtype).eps
    for param, twin in zip(params, twins, strict=True):
        state = optimizer.state[param]
        assert param.dtype == dtype and ("master_weight" in state) == (master is not None)
        if master is None:
            # Each of four steps rounds a number below 0.5 to nearest.
            assert not param.numel() or (values(param) - twin).abs().max() <= 4 * 0.25 * step
            continue
        kept = state["master_weight"]
        assert isinstance(kept, BlockScaledTensor) == (master == "fp16" and param.dim() > 1)
        assert torch.equal(param.detach(), values(kept).to(dtype))
        if param.numel():
            exact = not isinstance(kept, BlockScaledTensor)
            assert (values(kept) - twin).abs().max() <= (1e-6 if exact else 4 * 2.0**-12)


def test_an_fp32_parameter_needs_no_master():
    params = make_params()
    optimizer = AdamW(params, master_weight_dtype="fp32")
    run(optimizer, params, 1)
    assert all("master_weight" not in s for s in optimizer.state.values())


@CLASSES
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16, "fp8"])
def test_a_gradient_of_any_format_is_read_as_its_values(name, kind):
    low, high = make_params(torch.float16), make_params(torch.float16)
    optimizers = [OURS[name][0](p, lr=1e-2, weight_decay=0.1) for p in (low, high)]
    for step in range(3):
        set_grads(low, step, kind)
        for p, q in zip(low, high, strict=True):
            if kind == "fp8":
                p.grad.mul_(0.3)
            q.grad = values(p.grad)
        for optimizer in optimizers:
            optimizer.step()
    for p, q in zip(low, high, strict=True):
        assert isinstance(p.grad, GradientTensor) == (kind == "fp8")
        assert torch.equal(p, q)
        for key, state in optimizers[0].state[p].items():
            assert all(torch.equal(a, b) for a, b in zip(bits(state), bits(optimizers[1].state[q][key]), strict=True))


@CLASSES
@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("decoupled", [None, True, False])
def test_weight_decay_and_direction(name, maximize, decoupled):
    options = {"lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.3, "maximize": maximize}
    if name == "Adam" and decoupled is not None:
        options["decoupled_weight_decay"] = decoupled
    params, optimizer, twins, plain = pair(name, **options)
    run(optimizer, params)
    run(plain, twins)
    assert furthest(params, twins) <= 1e-6
    for param, twin in zip(params, twins, strict=True):
        for key in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(
                optimizer.state[param].get(key), plain.state[twin].get(key), rtol=1e-5, atol=1e-9
            )


def test_the_l2_term_of_adam_reaches_the_stored_moments():
    def moments(cls, decay):
        params = make_params(shapes=[(4, 128)])
        optimizer = cls(params, weight_decay=decay)
        run(optimizer, params, 1)
        return [values(optimizer.state[params[0]][key]) for key in ("exp_avg", "exp_avg_sq")]

    for with_decay, without in zip(moments(Adam, 0.5), moments(Adam, 0.0), strict=True):
        assert (with_decay - without).abs().max() > 0.5 * without.abs().max()
    assert all(torch.equal(a, b) for a, b in zip(moments(AdamW, 0.5), moments(AdamW, 0.0), strict=True))


@CLASSES
@pytest.mark.parametrize("first,second", [("fp8", "fp16"), ("fp8", "fp8"), ("fp16", "fp16")])
@pytest.mark.parametrize("kind", [torch.float32, "fp8"])
def test_zero_gradients_keep_zero_states_and_their_scales(name, first, second, kind):
    params = make_params(torch.float16)
    before = [bits(p) for p in params]
    optimizer = OURS[name][0](params, lr=0.1, weight_decay=0, exp_avg_dtype=first, exp_avg_sq_dtype=second)
    run(optimizer, params, 25, kind=kind, size=0.0)
    for param, old in zip(params, before, strict=True):
        assert torch.equal(param.detach(), old[0])
        for key in ("exp_avg", "exp_avg_sq"):
            state = optimizer.state[param][key]
            assert values(state).count_nonzero() == 0
            assert not isinstance(state, BlockScaledTensor) or (state.exponent == 127).all()


def test_states_fade_and_do_not_overflow_once_gradients_stay_zero():
    params, optimizer, twins, plain = pair("AdamW", formats={}, lr=1e-3, weight_decay=0.0, betas=(0.5, 0.6))
    for each, over in ((optimizer, params), (plain, twins)):
        run(each, over, 2)
        run(each, over, 100, first=2, size=0.0)
    assert furthest(params, twins) <= 3e-4
    for param in params:
        for key in ("exp_avg", "exp_avg_sq"):
            assert not param.numel() or values(optimizer.state[param][key]).abs().max() < 1e-15


def test_a_row_of_zeros_beside_others_stays():
    [param] = params = make_params(shapes=[(2, 256)])
    optimizer = Adam(params, lr=0.1)
    row = param.detach()[0].clone()
    for step in range(20):
        param.grad = torch.stack([torch.zeros(256), randn(256, step)])
        optimizer.step()
    assert torch.equal(param.detach()[0], row) and (optimizer.state[param]["exp_avg"].exponent[0] == 127).all()


@CLASSES
def test_groups_with_settings_of_their_own(name):
    params, optimizer, twins, plain = pair(name, lr=1e-3)
    settings = [
        {"lr": 1e-2, "betas": (0.5, 0.9), "weight_decay": 0.4, "eps": 1e-4},
        {"lr": 1e-4, "maximize": True},
        {"lr": 0.0},
    ]
    ours, torchs = OURS[name]
    optimizer, plain = (
        cls([{"params": p[i::3], **s} for i, s in enumerate(settings)], **extra)
        for cls, p, extra in ((ours, params, FP32), (torchs, twins, {}))
    )
    for group in (*optimizer.param_groups, *plain.param_groups):
        group.setdefault("maximize", False)
    run(optimizer, params)
    run(plain, twins)
    assert furthest(params, twins) <= 1e-6


@CLASSES
def test_the_learning_rate_may_be_a_tensor_and_change_in_place(name):
    params, twins = make_params(), make_params()
    rate = torch.tensor(1e-2)
    one = OURS[name][0](params, lr=rate, **FP32)
    other = OURS[name][0](twins, lr=1e-2, **FP32)
    run(one, params, 1)
    run(other, twins, 1)
    rate.mul_(0.5)
    other.param_groups[0]["lr"] = 5e-3
    run(one, params, 2, first=1)
    run(other, twins, 2, first=1)
    assert furthest(params, twins) <= 1e-7


def test_frozen_and_unused_parameters_are_left_alone():
    params = make_params(torch.bfloat16)
    params[0].requires_grad_(False)
    optimizer = AdamW(params, lr=0.1, weight_decay=0.5)
    before = [bits(p)[0] for p in params]
    set_grads(params, 0)
    params[1].grad = None
    optimizer.step()
    for i, (param, old) in enumerate(zip(params, before, strict=True)):
        assert torch.equal(param.detach(), old) == (i < 2 or not param.numel())
        assert (param in optimizer.state) == (i >= 2)
    run(optimizer, params, 1)  # one that comes into use later starts its count then
    assert optimizer.state[params[1]]["step"] == 1 and optimizer.state[params[2]]["step"] == 2


def test_a_group_that_is_added_later():
    params = make_params()
    optimizer = AdamW(params[:1], lr=1e-2)
    run(optimizer, params[:1], 2)
    optimizer.add_param_group({"params": params[1:], "lr": 1e-4})
    before = values(params[1])
    run(optimizer, params, 1, first=2)
    assert optimizer.state[params[1]]["step"] == 1 and 0 < (values(params[1]) - before).abs().max() <= 2e-4
    with pytest.raises(ValueError, match="is complex"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2, dtype=torch.complex64))]})


def test_hooks_and_schedulers():
    [param] = params = make_params(shapes=[(4, 128)])
    optimizer = AdamW(params, lr=1.0, weight_decay=0.0)
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 10.0**-step)
    moves = []
    for step in range(3):
        before = values(param)
        run(optimizer, params, 1, first=step)
        schedule.step()
        moves.append(float((values(param) - before).abs().max()))
    assert calls == ["before", "after"] * 3
    assert moves[0] == pytest.approx(1, rel=1e-3) and 0.02 < moves[1] < 0.2 and 0.002 < moves[2] < 0.02


def test_a_closure_is_evaluated_with_gradients():
    [param] = params = make_params(shapes=[(2, 3)])
    optimizer = AdamW(params)

    def closure():
        optimizer.zero_grad()
        loss = param.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() > optimizer.step(closure).item()


def test_refusals_name_what_is_refused():
    params = make_params()
    for cls in (Adam, AdamW):
        for message, options in {
            "amsgrad=True": {"amsgrad": True},
            "differentiable=True": {"differentiable": True},
            "exp_avg_dtype='fp4' must be one of: fp32, bf16, fp16, fp8": {"exp_avg_dtype": "fp4"},
            "exp_avg_sq_dtype=torch.float16 must be": {"exp_avg_sq_dtype": torch.float16},
            "master_weight_dtype='bf16' must be one of": {"master_weight_dtype": "bf16"},
            "stochastic_rounding='yes' must be": {"stochastic_rounding": "yes"},
            "seed=-1 must be": {"seed": -1},
            "seed=True must be": {"seed": True},
            "learning rate": {"lr": -1.0},
        }.items():
            with pytest.raises(ValueError, match=message):
                cls(params, **options)
        with pytest.raises(ValueError, match=r"shape \(2,\) is complex"):
            cls([nn.Parameter(torch.ones(2, dtype=torch.complex64))])
        with pytest.raises(TypeError, match="momentum"):
            cls(params, momentum=0.9)


def test_sparse_gradients_are_refused_by_name():
    table = nn.Embedding(8, 4, sparse=True)
    optimizer = AdamW(table.parameters())
    before = table.weight.detach().clone()
    table(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(RuntimeError, match="AdamW takes dense gradients: build the embedding with sparse=False"):
        optimizer.step()
    assert torch.equal(table.weight.detach(), before)


def test_step_param_is_the_step_of_one():
    whole, apart = make_params(torch.float16), make_params(torch.float16)
    optimizers = [AdamW(p, lr=1e-2, stochastic_rounding=True, seed=3) for p in (whole, apart)]
    for step in range(2):
        for params in (whole, apart):
            set_grads(params, step)
        optimizers[0].step()
        for param in reversed(apart):
            optimizers[1].step_param(param)
    assert all(torch.equal(p, q) for p, q in zip(whole, apart, strict=True))


def test_step_param_follows_groups_that_were_loaded_or_changed():
    first, second = params = make_params(shapes=[(4, 8), (4, 8)])
    optimizer = AdamW(params, lr=1e-2)
    set_grads(params, 0)
    assert optimizer.step_param(first) and optimizer.step_param(second)
    saved = optimizer.state_dict()
    optimizer.load_state_dict({**saved, "param_groups": [{**saved["param_groups"][0], "lr": 0.0}]})
    before = first.detach().clone()
    optimizer.step_param(first)
    assert torch.equal(first, before)  # the loaded group's learning rate
    optimizer.param_groups[0]["params"] = [second]
    assert not optimizer.step_param(first) and optimizer.step_param(second)
    assert not AdamW([second]).step_param(nn.Parameter(second.detach()))


@pytest.mark.parametrize("by_param", [False, True])
def test_a_parameter_that_was_taken_out_is_freed_with_its_master(by_param):
    params = make_params(torch.float16, shapes=[(4, 8), (4, 8)])
    optimizer = AdamW(params, master_weight_dtype="fp32")
    set_grads(params, 0)
    if by_param:
        assert all(optimizer.step_param(p) for p in params)
    else:
        optimizer.step()
    gone = params.pop()
    optimizer.param_groups[0]["params"].pop()
    held = [ref(gone), ref(optimizer.state.pop(gone)["master_weight"])]
    del gone
    gc.collect()
    assert [there() for there in held] == [None, None]


def test_a_new_parameter_in_the_place_of_a_freed_one_gets_its_own_master():
    """Python gives the id of a freed parameter to the next one."""
    [param] = params = make_params(torch.float16, shapes=[(4, 8)])
    optimizer = AdamW(params, lr=0.0, master_weight_dtype="fp32", weight_decay=0.0)
    old = id(param)
    set_grads(params, 0)
    optimizer.step_param(param)
    optimizer.state.clear()
    optimizer.param_groups[0]["params"].clear()
    params.clear()
    del param
    made = [nn.Parameter(torch.ones(4, 8).half()) for _ in range(10_000)]  # held: else they share one other place
    new = next((p for p in made if id(p) == old), None)
    assert new is not None, "the old parameter is alive"
    new.grad = torch.ones_like(new)
    assert not optimizer.step_param(new)
    optimizer.param_groups[0]["params"].append(new)
    assert optimizer.step_param(new)
    assert torch.equal(optimizer.state[new]["master_weight"], torch.ones(4, 8)) and torch.equal(new, torch.ones(4, 8))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("kind", [torch.float32, "fp8"])
def test_what_is_not_finite_spoils_its_own_element_only(bad, kind):
    params, clean = make_params(shapes=[(2, 256)]), make_params(shapes=[(2, 256)])
    for each in (params, clean):
        set_grads(each, 0)
        grad = each[0].grad
        if each is params:
            grad[1, 7] = bad
        each[0].grad = GradientTensor.from_float(grad) if kind == "fp8" else grad
    optimizers = [AdamW(p) for p in (params, clean)]
    for optimizer in optimizers:
        optimizer.step()
    for key in ("exp_avg", "exp_avg_sq"):
        got, want = (values(o.state[p[0]][key]) for o, p in zip(optimizers, (params, clean), strict=True))
        assert got.isnan().nonzero().tolist() == [[1, 7]]
        assert torch.equal(got[0], want[0]) and torch.equal(got[1, 128:], want[1, 128:])
    assert params[0].detach().isnan().nonzero().tolist() == [[1, 7]]


@CLASSES
@pytest.mark.parametrize("choice", ["fused", "foreach", "capturable"])
def test_torchs_choices_of_an_implementation_change_nothing(name, choice):
    ours, _ = OURS[name]
    params, chosen = make_params(), make_params()
    for mine, options in ((params, {}), (chosen, {choice: True})):
        optimizer = ours(mine, lr=1e-2, **options)
        assert optimizer._step_supports_amp_scaling
        run(optimizer, mine)
    assert all(torch.equal(values(p), values(q)) for p, q in zip(params, chosen, strict=True))
