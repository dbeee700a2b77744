"""SGD, Lion and Muon: steps against torch's own or the algorithm in FP32, low-bit states, adoption, state dicts."""

import copy
import math
import pickle

import pytest
import torch
from low_bit import FORMATS, all_bits, all_values, make_params, randn, run, set_grads, values
from support import assert_same
from torch import nn, optim

from nemo_lowprec.optim import SGD, AdamW, Lion, LowBitStates, Muon, StateFormats, adopt, check_adoptable, release
from nemo_lowprec.optim import muon as muon_module
from nemo_lowprec.tensors import BlockScaledTensor

LOW = StateFormats("fp8", "fp16")
MATRICES = [(8, 300), (128, 16), (8, 300), (16, 16)]
STACK = (3, 16, 24)


class PlainLion(optim.Optimizer):
    """Algorithm 2 of arXiv:2302.06675 in FP32."""

    def __init__(self, params, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.0, maximize=False):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for param in group["params"]:
                grad = -param.grad if group["maximize"] else param.grad
                average = self.state[param].setdefault("exp_avg", torch.zeros_like(param))
                param.mul_(1 - group["lr"] * group["weight_decay"])
                param.sub_(group["lr"] * (average * beta1 + grad * (1 - beta1)).sign())
                average.mul_(beta2).add_(grad, alpha=1 - beta2)


def muon_groups_of(params):
    matrices = [p for p in params if p.dim() in (2, 3) and p.numel()]
    rest = [p for p in params if not any(p is m for m in matrices)]
    return [{"params": matrices}, {"params": rest, "use_muon": False}]


SGDS = [
    {},
    {"momentum": 0.9},
    {"momentum": 0.9, "weight_decay": 0.1},
    {"momentum": 0.95, "nesterov": True},
    {"momentum": 0.9, "dampening": 0.5, "weight_decay": 0.1, "maximize": True},
]


def make_twins(params):
    return [nn.Parameter(values(p)) for p in params]


def distance(params, twins):
    return max(float((values(p) - values(q)).abs().max()) for p, q in zip(params, twins, strict=True) if p.numel())


@pytest.mark.parametrize("options", SGDS, ids=str)
def test_sgd_steps_as_torchs(options):
    params = make_params()
    twins = make_twins(params)
    ours, plain = SGD(params, 1e-2, momentum_dtype="fp32", **options), optim.SGD(twins, 1e-2, **options)
    run(ours, params, size=1.0)
    run(plain, twins, size=1.0)
    assert distance(params, twins) <= 1e-6 < distance(params, make_params())
    for p, q in zip(params, twins, strict=True):
        if options and p.numel():
            torch.testing.assert_close(ours.state[p]["momentum_buffer"], plain.state[q]["momentum_buffer"])
    assert all(("momentum_buffer" in state) == bool(options) for state in ours.state.values())


@pytest.mark.parametrize("options", [{}, {"weight_decay": 0.5}, {"betas": (0.95, 0.98), "maximize": True}], ids=str)
def test_lion_steps_as_its_algorithm_says(options):
    params = make_params()
    twins = make_twins(params)
    ours, plain = Lion(params, 1e-2, **options), PlainLion(twins, 1e-2, **options)
    run(ours, params)
    run(plain, twins)
    assert distance(params, twins) <= 1e-6 < distance(params, make_params())
    for p, q in zip(params, twins, strict=True):
        if p.numel():
            torch.testing.assert_close(ours.state[p]["exp_avg"], plain.state[q]["exp_avg"], rtol=1e-5, atol=1e-8)


def test_lion_keeps_a_nan_and_stands_where_nothing_points():
    param = nn.Parameter(torch.ones(4))
    optimizer = Lion([param], lr=0.5)
    param.grad = torch.tensor([float("nan"), 0.0, 2.0, -1e-30])
    optimizer.step()
    assert param[0].isnan() and param[1:].tolist() == [1.0, 0.5, 1.5]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"nesterov": False, "weight_decay": 0.0},
        {"adjust_lr_fn": "match_rms_adamw", "momentum": 0.9, "ns_steps": 3},
        {"ns_coefficients": (2.0, -1.5, 0.5), "eps": 1e-3},
    ],
    ids=str,
)
def test_muon_steps_as_torchs_and_its_companion(options):
    params = make_params(shapes=[*MATRICES, (130,), ()])
    twins = make_twins(params)
    ours = Muon(muon_groups_of(params), 2e-2, adamw_lr=1e-2, **options)
    torchs = optim.Muon(twins[:4], 2e-2, **options)
    companion = optim.AdamW(twins[4:], 1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    for step in range(4):
        for each in (params, twins):
            set_grads(each, step)
        for optimizer in (ours, torchs, companion):
            optimizer.step()
    # A product in BF16 may round the other way.
    assert distance(params[:4], twins[:4]) <= 4 * 2e-2 * 2.0**-7
    assert distance(params[4:], twins[4:]) <= 1e-6
    for p, q in zip(params[:4], twins[:4], strict=True):
        torch.testing.assert_close(ours.state[p]["momentum_buffer"], torchs.state[q]["momentum_buffer"])
    assert distance(params, make_params(shapes=[*MATRICES, (130,), ()])) > 1e-3


def test_muon_orthogonalizes():
    param = nn.Parameter(torch.zeros(32, 96))
    param.grad = randn(param.shape, 0)
    Muon([param], lr=1.0, weight_decay=0.0).step()
    singular = torch.linalg.svdvals(param.detach())
    assert singular.min() > 0.6 and singular.max() < 1.3


def test_experts_are_a_batch_of_matrices(monkeypatch):
    """Also where the stack of all is worked on in parts."""
    whole = nn.Parameter(randn(STACK, 1))
    each = [nn.Parameter(matrix.clone()) for matrix in whole.detach()]
    results = []
    for elements in (2**27, 16 * 24):
        monkeypatch.setattr(muon_module, "_ELEMENTS", elements)
        stacked, single = nn.Parameter(whole.detach().clone()), [nn.Parameter(p.detach().clone()) for p in each]
        for params in ([stacked], single):
            optimizer = Muon(params, lr=0.1)
            for step in range(2):
                grads = randn(STACK, 10 + step)
                for i, param in enumerate(params):
                    param.grad = grads if param is stacked else grads[i]
                optimizer.step()
        torch.testing.assert_close(stacked.detach(), torch.stack([p.detach() for p in single]), rtol=0, atol=1e-3)
        results.append(stacked.detach())
    torch.testing.assert_close(*results, rtol=0, atol=1e-3)


def test_a_muon_group_with_a_vector_is_refused_with_its_shape_and_the_way_out():
    params = make_params(shapes=[(8, 8), (130,)])
    message = r"Muon group holds a parameter of shape \(130,\).*use_muon=False.*muon_groups"
    with pytest.raises(ValueError, match=message):
        Muon(params)
    optimizer = Muon(params[:1])
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group({"params": params[1:]})
    plain = optim.Muon(params[:1])
    optim.Optimizer.add_param_group(plain, {"params": params[1:]})
    with pytest.raises(ValueError, match=message):
        check_adoptable(plain)
    with pytest.raises(ValueError, match=r"shape \(3, 2, 5, 5\)"):
        Muon(make_params(shapes=[(3, 2, 5, 5)]))


@pytest.mark.parametrize(
    "make,message",
    [
        (lambda p: Lion(p, -1.0), "lr=-1.0"),
        (lambda p: Lion(p, betas=(0.9, 1.0)), "betas"),
        (lambda p: Lion(p, weight_decay=-1.0), "weight_decay"),
        (lambda p: Lion(p, exp_avg_dtype="int8"), "exp_avg_dtype='int8'"),
        (lambda p: Muon(p[:1], momentum=-0.1), "momentum=-0.1"),
        (lambda p: Muon(p[:1], adjust_lr_fn="other"), "adjust_lr_fn='other'"),
        (lambda p: Muon(p[:1], ns_steps=100), "ns_steps=100"),
        (lambda p: Muon(p[:1], ns_coefficients=(1.0, 2.0)), "ns_coefficients"),
        (lambda p: Muon(p[:1], adamw_betas=(1.0, 0.9)), "adamw_betas"),
    ],
)
def test_bad_values(make, message):
    with pytest.raises(ValueError, match=message):
        make(make_params())


def make_sgd(params, **options):
    return optim.SGD(params, 1e-2, momentum=0.9, **options)


def make_torch_muon(params):
    return optim.Muon([p for p in params if p.dim() == 2 and p.numel()], 1e-2)


def make_muon(params):
    return Muon(muon_groups_of([p for p in params if p.dim() != 4]), 1e-2)


KINDS = {"sgd": make_sgd, "lion": lambda p: Lion(p, 1e-3), "torch_muon": make_torch_muon, "muon": make_muon}
KEY = {"lion": "exp_avg"}


def members(optimizer):
    return [p for group in optimizer.param_groups for p in group["params"]]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("grads", [torch.float32, "fp8"], ids=str)
def test_low_bit_states_follow_fp32(kind, fmt, grads):
    params, twins = make_params(torch.float16), make_params(torch.float32)
    for p, q in zip(params, twins, strict=True):
        q.data.copy_(p.data)
    low, full = KINDS[kind](params), KINDS[kind](twins)
    adopt(low, StateFormats(fmt, "fp16", stochastic_rounding=True))
    run(low, members(low), 6, kind=grads)
    run(full, members(full), 6, kind=torch.float32)
    key = KEY.get(kind, "momentum_buffer")
    for p, q in zip(members(low), members(full), strict=True):
        if not p.numel() or key not in low.state[p]:
            continue
        got, want = values(low.state[p][key]), values(full.state[q][key])
        assert isinstance(low.state[p][key], BlockScaledTensor) == (fmt in ("fp16", "fp8") and p.dim() > 1)
        assert (got - want).abs().max() <= 0.25 * want.abs().max()
        assert low.state[p]["step"] == 6
        moved = (values(p) - values(q)).abs().mean() / (values(q) - make_value(p, params)).abs().mean()
        assert moved < 0.5


def make_value(param, params):
    index = next(i for i, p in enumerate(params) if p is param)
    return values(make_params(torch.float16)[index])


@pytest.mark.parametrize("kind", KINDS)
def test_adopted_and_released(kind):
    params, twins = make_params(), make_params()
    optimizer, plain = KINDS[kind](params), KINDS[kind](twins)
    scheduler = optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    run(optimizer, members(optimizer), 1)
    cls, keys, groups = type(optimizer), set(vars(optimizer)), optimizer.param_groups
    adopt(optimizer, LOW)
    with pytest.raises(ValueError, match="holds low-bit states already"):
        check_adoptable(optimizer)
    assert isinstance(optimizer, LowBitStates) and isinstance(optimizer, cls) and optimizer.param_groups is groups
    run(optimizer, members(optimizer), 2, first=1)
    scheduler.step()
    key = KEY.get(kind, "momentum_buffer")
    first = members(optimizer)[0]
    assert (
        optimizer.state[first][key].fmt.name == ("e2m5" if "muon" in kind else "e4m3")
        and groups[0]["lr"] == plain.param_groups[0]["lr"] / 2
    )
    stored = {id(p): values(optimizer.state[p][key]) for p in members(optimizer) if key in optimizer.state[p]}
    release(optimizer)
    assert type(optimizer) is cls and set(vars(optimizer)) == keys
    for p in members(optimizer):
        if id(p) in stored:
            assert type(optimizer.state[p][key]) is torch.Tensor
            assert torch.equal(optimizer.state[p][key], stored[id(p)])
    run(optimizer, members(optimizer), 1, first=3)
    adopt(optimizer, LOW)
    copied = pickle.loads(pickle.dumps(optimizer))
    for one in (optimizer, copied):
        release(one)
        assert type(one) is cls and not any(
            isinstance(v, BlockScaledTensor) for s in one.state.values() for v in s.values()
        )
        check_adoptable(one)


@pytest.mark.parametrize("kind", KINDS)
def test_states_are_saved_as_values_and_resume_bit_for_bit(kind):
    """Into the same formats, and into FP32 and back."""

    def make(formats):
        params = make_params(torch.float16)
        optimizer = KINDS[kind](params)
        adopt(optimizer, formats)
        return optimizer

    stochastic = StateFormats("fp8", "fp16", stochastic_rounding=True, seed=3)
    whole = make(stochastic)
    run(whole, members(whole), 5)
    first = make(stochastic)
    run(first, members(first), 2)
    saved = copy.deepcopy(first.state_dict())
    assert all(type(v) is torch.Tensor for s in saved["state"].values() for v in s.values())
    through = make(StateFormats())
    through.load_state_dict(saved)
    for state in (saved, copy.deepcopy(through.state_dict())):
        second = make(stochastic)
        second.load_state_dict(state)
        for p, q in zip(members(second), members(first), strict=True):
            p.data.copy_(q.data)
        assert_same(all_values(second)[1], all_values(first)[1])
        run(second, members(second), 3, first=2)
        assert_same(all_bits(second)[0], all_bits(whole)[0])
        assert_same(all_values(second)[1], all_values(whole)[1])


def test_torchs_own_states_are_taken_over():
    """torch's SGD and Muon count no steps, and a first gradient is not damped."""
    for options in ({"dampening": 0.5}, {}):
        params, twins = make_params(), make_params()
        plain, ours = make_sgd(twins, **options), make_sgd(params, **options)
        run(plain, twins, 2)
        run(ours, params, 1)
        adopt(ours, StateFormats())
        run(ours, params, 1, first=1)
        assert distance(params, twins) <= 1e-7
        other = make_sgd(make_params(), **options)
        adopt(other, StateFormats())
        other.load_state_dict(copy.deepcopy(plain.state_dict()))
        for p, q in zip(members(other), twins, strict=True):
            p.data.copy_(q.data)
        run(other, members(other), 1, first=2)
        run(plain, twins, 1, first=2)
        assert distance(members(other), twins) <= 1e-7


def test_states_of_another_optimizer_are_refused():
    params = make_params()
    saved = optim.SGD(params, 0.1, momentum=0.9)
    run(saved, params, 1)
    for other in (AdamW(make_params()), Lion(make_params())):
        with pytest.raises(ValueError, match=r"exp_avg.*checkpoint holds momentum_buffer.*another optimizer"):
            other.load_state_dict(saved.state_dict())
        assert not other.state


def test_momentum_that_is_switched_on_later():
    params = make_params(shapes=[(4, 128)])
    optimizer = SGD(params, 0.1)
    run(optimizer, params, 2)
    assert set(optimizer.state[params[0]]) == {"step"}
    optimizer.param_groups[0]["momentum"] = 0.9
    run(optimizer, params, 1, first=2)
    momentum = values(optimizer.state[params[0]]["momentum_buffer"])
    assert math.isclose(float(momentum.norm()), float(params[0].grad.norm()), rel_tol=0.05)


@pytest.mark.parametrize("kind", KINDS)
def test_skips_and_unscales_by_itself(kind):
    params, twins = make_params(), make_params()
    optimizer, plain = KINDS[kind](params), KINDS[kind](twins)
    for one in (optimizer, plain):
        adopt(one, StateFormats())
        run(one, members(one), 1)
    set_grads(members(optimizer), 1, size=8e-2)
    set_grads(members(plain), 1)
    before = all_bits(optimizer)
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(8.0), torch.tensor(1.0)
    optimizer.step()
    assert_same(all_bits(optimizer), before)
    optimizer.found_inf = torch.tensor(0.0)
    optimizer.step()
    plain.step()
    assert distance(params, twins) <= 1e-4


class OwnMuon(Muon):
    def step(self, closure=None):
        return super().step(closure)


class OwnSGD(optim.SGD):
    def step(self, closure=None):
        return super().step(closure)


def test_subclasses_with_a_step_of_their_own_are_refused():
    for optimizer in (OwnMuon(make_params(shapes=MATRICES)), OwnSGD(make_params())):
        with pytest.raises(ValueError, match=f"{type(optimizer).__name__} has a step of its own"):
            check_adoptable(optimizer)
    with pytest.raises(ValueError, match="holds low-bit states already"):
        check_adoptable(Lion(make_params(), exp_avg_dtype="fp8"))


def test_gradient_release_steps_one_matrix_at_a_time():
    params, twins = make_params(shapes=MATRICES), make_params(shapes=MATRICES)
    single, together = make_muon(params), make_muon(twins)
    for each, own in ((single, params), (together, twins)):
        adopt(each, LOW)
        set_grads(own, 0, "fp8")
    assert all(single.step_param(param) for param in params)
    together.step()
    assert distance(params, twins) <= 1e-2 * 2.0**-6
    assert not single.step_param(twins[0])
