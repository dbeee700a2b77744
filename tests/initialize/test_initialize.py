"""``initialize``: what it makes of model and optimizer, and what it refuses."""

import copy
import gc
import io
import itertools
import weakref

import accelerate
import pytest
import torch
from low_bit import OwnStep, values
from torch import nn, optim

import nemo_lowprec
from nemo_lowprec.compute.linear import LowPrecisionLinear
from nemo_lowprec.engine import Engine
from nemo_lowprec.formats import E4M3
from nemo_lowprec.optim import Adam, AdamW, LowBitStates
from nemo_lowprec.tensors import BlockScaledTensor, Fp8Weight, Fp16Weight, GradientTensor

LEVELS = ["O1", "O2", "O3"]
AT_LEVELS = pytest.mark.parametrize("level", LEVELS)


class Net(nn.Module):
    """Of every kind of parameter: converted, too small for it, a convolution, vectors, frozen."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.conv = nn.Conv2d(1, 4, 3, padding=1)
        self.norm = nn.LayerNorm(64)
        self.mid = nn.Linear(64, 128)
        self.mid.note = "kept"
        self.mid.weight.tag = "kept too"
        self.frozen = nn.Linear(128, 128)
        self.frozen.requires_grad_(False)
        self.head = nn.Linear(128, 10)
        self.note = ["of the model"]

    def forward(self, x):
        x = self.norm(self.conv(x).mean(1).flatten(1))
        return self.head(torch.tanh(self.frozen(torch.tanh(self.mid(x)))))


def batch(seed=0, count=8):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 1, 8, 8, generator=generator), torch.randint(0, 10, (count,), generator=generator)


def step(model, optimizer, seed=0):
    x, y = batch(seed)
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    return loss.item()


def two_groups(cls):
    def make(model):
        weights = [p for p in model.parameters() if p.dim() > 1]
        rest = [p for p in model.parameters() if p.dim() < 2]
        return cls([{"params": weights, "weight_decay": 0.1}, {"params": rest, "lr": 1e-4}], lr=1e-3, betas=(0.8, 0.9))

    return make


@AT_LEVELS
@pytest.mark.parametrize(
    "make,becomes,decoupled",
    [(None, AdamW, True), (two_groups(optim.Adam), Adam, False), (two_groups(optim.AdamW), AdamW, True)],
    ids=["None", "Adam", "AdamW"],
)
def test_classes_formats_groups_and_order(level, make, becomes, decoupled):
    model = Net()
    given = make(model) if make else None
    params = list(model.parameters())
    before = [[id(p) for p in g["params"]] for g in given.param_groups] if given else [[id(p) for p in params]]
    settings = [{k: v for k, v in g.items() if k != "params"} for g in given.param_groups] if given else None
    converted, optimizer = nemo_lowprec.initialize(model, given, opt_level=level)
    assert converted is model and (given is None or optimizer is given) and type(optimizer) is becomes
    assert all(a is b for a, b in zip(model.parameters(), params, strict=True))
    assert [[id(p) for p in g["params"]] for g in optimizer.param_groups] == before
    if settings:
        assert [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups] == settings
    assert optimizer.param_groups[0]["decoupled_weight_decay"] == decoupled
    assert callable(optimizer.all_reduce_grads)
    assert isinstance(model.mid, LowPrecisionLinear) and isinstance(model.mid, nn.Linear)

    step(model, optimizer)
    low = level != "O1"
    for name, param in model.named_parameters():
        assert param.dtype == torch.float32, name  # reads as
        if param.dim() < 2:
            assert type(param) is nn.Parameter
        else:
            in_fp8 = level == "O3" and name == "mid.weight"  # a frozen one needs no master
            assert isinstance(param, Fp8Weight if in_fp8 else Fp16Weight), name
            assert hasattr(param, "master_weight") == in_fp8
        if not param.requires_grad:
            assert param not in optimizer.state and param.grad is None
            continue
        state = optimizer.state[param]
        if param.dim() > 1:
            assert isinstance(param.grad, GradientTensor)
        for key, size in (("exp_avg", 1), ("exp_avg_sq", 2)):
            if low and param.dim() > 1:
                assert isinstance(state[key], BlockScaledTensor) and state[key].data_blocks.element_size() == size
            else:
                assert type(state[key]) is torch.Tensor and state[key].dtype == torch.float32


@AT_LEVELS
def test_attributes_names_and_states_survive(level):
    model = Net()
    want = Net().state_dict()
    optimizer = optim.AdamW(model.parameters(), lr=1e-2)
    step(model, optimizer)
    moments = [values(s["exp_avg"]) for s in optimizer.state.values()]
    model, optimizer = nemo_lowprec.initialize(model, optimizer, opt_level=level)
    assert model.note == ["of the model"] and model.mid.note == "kept" and model.mid.weight.tag == "kept too"
    assert model.state_dict().keys() == want.keys()
    for state, old in zip(optimizer.state.values(), moments, strict=True):
        assert state["step"] == 1 and (values(state["exp_avg"]) - old).abs().max() <= 0.07 * old.abs().max()


@AT_LEVELS
def test_a_state_dict_is_plain_and_gives_equal_outputs(level):
    model, optimizer = nemo_lowprec.initialize(Net(), opt_level=level)
    for seed in range(3):
        step(model, optimizer, seed)
    saved = copy.deepcopy(model.state_dict())
    assert all(type(v) is torch.Tensor and v.dtype in (torch.float16, torch.float32) for v in saved.values())
    engine = model.__dict__["_lowprec_engine"]
    x, _ = batch(9)
    with torch.no_grad():
        want = model(x)
        twin, _ = nemo_lowprec.initialize(Net(), opt_level=level)
        assert not torch.equal(twin(x), want)
        twin.load_state_dict(saved)
        assert (twin(x) - want).abs().max() <= 0.1 * want.abs().max()  # its amax histories begin anew
        twin.__dict__["_lowprec_engine"].load_state_dict(engine.state_dict())
        assert torch.equal(twin(x), want)
        plain = Net()
        plain.load_state_dict(saved)
        assert (plain(x) - want).abs().max() <= 0.1 * want.abs().max()


@AT_LEVELS
def test_training_resumes_bit_for_bit(level):
    model, optimizer = nemo_lowprec.initialize(Net(), opt_level=level, stochastic_rounding=True)
    for seed in range(3):
        step(model, optimizer, seed)
    twin, theirs = nemo_lowprec.initialize(Net(), opt_level=level, stochastic_rounding=True)
    twin.load_state_dict(copy.deepcopy(model.state_dict()))
    theirs.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    optim.AdamW(Net().parameters()).load_state_dict(optimizer.state_dict())  # torch's own reads it too
    for seed in range(3, 6):
        assert step(model, optimizer, seed) == step(twin, theirs, seed)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(values(p), values(q))
        for key, state in optimizer.state.get(p, {}).items():
            assert torch.equal(values(state), values(theirs.state[q][key]))


@AT_LEVELS
@pytest.mark.parametrize("half", [None, torch.float16, torch.bfloat16])
def test_the_dtype_of_outputs_is_that_of_plain_torch(level, half):
    def outputs(model):
        seen = {}
        for name in ("conv", "norm", "mid", "head"):
            model.get_submodule(name).register_forward_hook(lambda m, i, out, name=name: seen.update({name: out.dtype}))
        with torch.autocast("cpu", dtype=half or torch.bfloat16, enabled=half is not None):
            model(batch()[0]).float().sum().backward()
        return seen

    model, _ = nemo_lowprec.initialize(Net(), opt_level=level)
    seen = outputs(model)
    assert seen["mid"] == seen["head"] == seen["conv"] == (half or torch.float32)
    assert seen == outputs(Net())


@AT_LEVELS
def test_gradients_are_those_of_fp32_within_fp8(level):
    model, _ = nemo_lowprec.initialize(Net(), opt_level=level)
    plain = Net()
    x, y = batch()
    for each in (model, plain):
        nn.functional.cross_entropy(each(x), y).backward()
    assert (model(x) - plain(x)).norm() <= 0.1 * plain(x).norm()
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        if q.requires_grad and name != "conv.bias":  # which the norm takes out again
            assert (values(p.grad) - q.grad).norm() <= 0.2 * q.grad.norm(), name


def test_o3_weights_are_the_fp8_of_their_masters():
    model, optimizer = nemo_lowprec.initialize(Net(), opt_level="O3")
    start = model.mid.weight.master_weight.dequantize()
    for seed in range(3):
        step(model, optimizer, seed)
        master = model.mid.weight.master_weight.dequantize()
        want = Fp8Weight.from_float(master, E4M3, torch.float32, power_of_two=True)
        assert torch.equal(model.mid.weight.data_fp8.view(torch.uint8), want.data_fp8.view(torch.uint8))
        assert torch.equal(model.mid.weight.scale_inv, want.scale_inv)
    assert not torch.equal(master, start)
    assert torch.equal(model.state_dict()["mid.weight"].float(), master)


@AT_LEVELS
def test_use_te_false_is_a_backend(level):
    model, optimizer = nemo_lowprec.initialize(Net(), opt_level=level, use_te=False)
    other, theirs = nemo_lowprec.initialize(Net(), opt_level=level, backend="reference")
    assert step(model, optimizer) == step(other, theirs)
    assert model.mid.gemm_plan.backend.name == "reference"


@AT_LEVELS
def test_gradient_release_changes_no_bit(level):
    runs = []
    for release in (False, True):
        options = {"stochastic_rounding": True, "rounding_seed": 5, "gradient_release": release}
        model, optimizer = nemo_lowprec.initialize(Net(), opt_level=level, **options)
        for seed in range(3):
            x, y = batch(seed)
            nn.functional.cross_entropy(model(x), y).backward()
            assert all((p.grad is None) == release for p in model.parameters() if p.requires_grad)
            optimizer.step()
            optimizer.zero_grad()
        runs.append((model, optimizer))
    for p, q in zip(*(m.parameters() for m, _ in runs), strict=True):
        assert torch.equal(values(p), values(q))
        for key, state in runs[0][1].state.get(p, {}).items():
            assert torch.equal(values(state), values(runs[1][1].state[q][key])), key


class OwnGroups(optim.AdamW):
    def _init_group(self, *args, **kwargs):
        return super()._init_group(*args, **kwargs)


REFUSED = {
    "opt_level='O4' must be one of: O1, O2, O3": (None, {"opt_level": "O4"}, ValueError),
    "opt_level=2 must be one of": (None, {"opt_level": 2}, ValueError),
    r"opt_level=\['O1'\] must be one of": (None, {"opt_level": ["O1"]}, ValueError),
    "holds none of the model's parameters": (lambda m: optim.AdamW(Net().parameters()), {}, ValueError),
    "OwnGroups has a _init_group of its own": (lambda m: OwnGroups(m.parameters()), {}, ValueError),
    "NAdam has no low-bit form": (lambda m: optim.NAdam(m.parameters(), lr=0.1), {}, ValueError),
    "OwnStep has a step of its own": (lambda m: OwnStep(m.parameters()), {}, ValueError),
    "amsgrad=True has no low-bit form": (lambda m: optim.Adam(m.parameters(), amsgrad=True), {}, ValueError),
    "complex parameter": (
        lambda m: optim.Adam([*m.parameters(), nn.Parameter(torch.ones(2) * 1j)]), {}, ValueError,
    ),
    "holds low-bit states already": (lambda m: AdamW(m.parameters()), {}, ValueError),
    "A loop takes no 'half': torch.autocast chooses": (None, {"half": "fp16"}, TypeError),
    "A loop takes no 'loss_scale'": (None, {"loss_scale": 8.0}, TypeError),
    "has no argument 'opt_lvl'": (None, {"opt_lvl": "O2"}, TypeError),
    "use_te and backend choose the same thing": (None, {"use_te": False, "backend": "torch"}, ValueError),
    "stochastic_rounding='a' must be": (None, {"stochastic_rounding": "a"}, ValueError),
    "Unknown backend 'cuda'": (None, {"backend": "cuda"}, ValueError),
}  # fmt: skip


@pytest.mark.parametrize("message", REFUSED)
def test_refusals_name_the_cause_and_leave_everything_as_it_was(message):
    make, options, error = REFUSED[message]
    model = Net()
    optimizer = make(model) if make else optim.AdamW(model.parameters())
    cls, attributes = type(optimizer), dict(vars(optimizer))
    with pytest.raises(error, match=message):
        nemo_lowprec.initialize(model, optimizer, **options)
    assert_untouched(model)
    assert type(optimizer) is cls and vars(optimizer) == attributes


def assert_untouched(model):
    plain = Net()
    assert [type(m) for m in model.modules()] == [type(m) for m in plain.modules()]
    assert not {*vars(model)} ^ {*vars(plain)}
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert type(p) is nn.Parameter and p.dtype == torch.float32 and torch.equal(p, q)
        assert not p._post_accumulate_grad_hooks
    for module in model.modules():
        assert not module._forward_pre_hooks and not module._state_dict_hooks and not module._load_state_dict_pre_hooks


REFUSED_MODELS = {
    "embed has sparse gradients": lambda m: m.register_module("embed", nn.Embedding(9, 4, sparse=True)),
    "mid.weight is FP64": lambda m: m.mid.double(),
    "a weak reference to mid.weight": lambda m: m.__dict__.update(held=weakref.ref(m.mid.weight)),
    "mid.weight has values beyond 65504": lambda m: m.mid.weight.data[0].fill_(1e5),
}


@pytest.mark.parametrize("message", REFUSED_MODELS)
def test_models_are_refused_before_anything_is_changed(message):
    model = Net()
    REFUSED_MODELS[message](model)
    optimizer = optim.AdamW(model.parameters())
    params = [(p, p.dtype, p.data_ptr()) for p in model.parameters()]
    kinds, attributes = [type(m) for m in model.modules()], set(vars(model))
    with pytest.raises(ValueError, match=message):
        nemo_lowprec.initialize(model, optimizer)
    assert [type(m) for m in model.modules()] == kinds and set(vars(model)) == attributes
    for p, (q, dtype, place) in zip(model.parameters(), params, strict=True):
        assert p is q and type(p) is nn.Parameter and p.dtype == dtype and p.data_ptr() == place
    assert type(optimizer) is optim.AdamW


@AT_LEVELS
def test_a_model_without_linear_layers_and_its_parts_are_initialized_once(level):
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Conv2d(4, 4, 3))
    nemo_lowprec.initialize(model, opt_level=level)
    for part in (model, model[0], nn.Sequential(model, nn.ReLU())):
        with pytest.raises(ValueError, match="converted already"):
            nemo_lowprec.initialize(part, opt_level=level)


@AT_LEVELS
def test_lazy_layers_and_gradients_that_were_there(level):
    model = nn.Sequential(nn.Linear(8, 64), nn.LazyLinear(32), nn.Linear(32, 1))
    model[0](torch.ones(2, 8)).sum().backward()
    model, optimizer = nemo_lowprec.initialize(model, opt_level=level)
    assert all(p.grad is None for p in model.parameters())
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = model(torch.ones(4, 8)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


@AT_LEVELS
def test_a_parameter_that_is_unfrozen_later_has_an_fp8_gradient(level):
    model, optimizer = nemo_lowprec.initialize(Net(), opt_level=level)
    step(model, optimizer)
    model.frozen.requires_grad_(True)
    step(model, optimizer)
    assert isinstance(model.frozen.weight.grad, GradientTensor)


@AT_LEVELS
def test_grad_scaler_sees_an_overflow_that_fp8_saturates(level):
    # Without biases, only the amax of the output's gradient shows it: the FP8 GEMMs see +-57344.
    model = nn.Sequential(nn.Linear(64, 64, bias=False))
    model, optimizer = nemo_lowprec.initialize(model, opt_level=level)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24, growth_interval=1000)
    scales, moved = [2.0**24], []
    generator = torch.Generator().manual_seed(0)
    for _ in range(14):
        before = values(model[0].weight)
        optimizer.zero_grad()
        x = torch.randn(16, 64, generator=generator)
        with torch.autocast("cpu", dtype=torch.float16):
            out = model(x)
        scaler.scale((out.float() - x).square().sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        moved.append(not torch.equal(values(model[0].weight), before))
    # Halved until no gradient of an output overflows FP16, and little further: a skipped step's amaxes are forgotten.
    assert scales[1] == 2.0**23 and 2.0**10 <= scales[-1] < 2.0**17 and any(moved)
    assert moved == [after == before for before, after in itertools.pairwise(scales)]


@AT_LEVELS
def test_gradient_release_is_refused_by_what_comes_too_late(level):
    model, optimizer = nemo_lowprec.initialize(Net(), opt_level=level, gradient_release=True)
    scaler = torch.amp.GradScaler("cpu")
    x, y = batch()
    scaler.scale(nn.functional.cross_entropy(model(x), y)).backward()
    with pytest.raises(ValueError, match="gradient_release=True has stepped on the scaled gradients"):
        scaler.step(optimizer)
    with pytest.raises(ValueError, match="gradient_release=True has stepped"):
        nemo_lowprec.clip_grad_norm_(model.parameters(), 1.0)
    with pytest.raises(ValueError, match="gradient_release=True steps before gradients are averaged"):
        optimizer.all_reduce_grads(model)


@AT_LEVELS
def test_groups_that_are_added_later_are_checked_too(level):
    _, optimizer = nemo_lowprec.initialize(Net(), opt_level=level)
    for name in ("amsgrad", "differentiable"):
        with pytest.raises(ValueError, match=f"{name}=True"):
            optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2, 2))], name: True})
    assert len(optimizer.param_groups) == 1


@AT_LEVELS
def test_copies_of_weights_are_fp32_so_that_an_average_of_them_moves(level):
    model, optimizer = nemo_lowprec.initialize(Net(), opt_level=level)
    step(model, optimizer)
    average = optim.swa_utils.AveragedModel(model, multi_avg_fn=optim.swa_utils.get_ema_multi_avg_fn(0.9999))
    file = io.BytesIO()
    torch.save(model.mid.weight, file)
    file.seek(0)
    exact = model.state_dict()["mid.weight"].float()
    for copied in (average.module.mid.weight, torch.load(file)):
        assert type(copied) is nn.Parameter and torch.equal(copied, exact)
    average.update_parameters(model)  # the first update takes the values over
    before = average.module.mid.weight.detach().clone()
    step(model, optimizer)
    average.update_parameters(model)
    want = before.lerp(model.state_dict()["mid.weight"].float(), 1e-4)
    torch.testing.assert_close(average.module.mid.weight.detach(), want, rtol=1e-6, atol=1e-8)
    assert not torch.equal(want, before)


@AT_LEVELS
def test_values_beyond_fp16_are_not_loaded(level):
    model, _ = nemo_lowprec.initialize(Net(), opt_level=level)
    state = {**Net().state_dict(), "mid.weight": torch.full((128, 64), 1e5)}
    with pytest.raises(RuntimeError, match=r"mid\.weight has values beyond 65504"):
        model.load_state_dict(state)


def test_te_is_asked_for_where_there_is_none():
    model = Net()
    optimizer = optim.AdamW(model.parameters())
    with pytest.raises(ValueError, match=r"(?i)transformer.engine|'te'|GPU"):
        nemo_lowprec.initialize(model, optimizer, use_te=True)
    assert_untouched(model)
    assert type(optimizer) is optim.AdamW and not hasattr(optimizer, "all_reduce_grads")


@AT_LEVELS
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_accelerate_prepares_what_initialize_returns_and_not_the_other_way_round(level, precision):
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision=precision)
    try:
        model = Net()
        model, optimizer = accelerator.prepare(model, optim.AdamW(model.parameters()))
        with pytest.raises(ValueError, match=r"AcceleratedOptimizer.*Prepare the model .* accelerator\.prepare"):
            nemo_lowprec.initialize(model, optimizer, opt_level=level)
        assert type(model.mid) is nn.Linear and type(optimizer.optimizer) is optim.AdamW

        model = Net()
        model, optimizer = nemo_lowprec.initialize(model, optim.AdamW(model.parameters(), lr=1e-2), opt_level=level)
        before = values(model.mid.weight).clone()
        model, optimizer = accelerator.prepare(model, optimizer)
        accelerator.backward(model(torch.ones(2, 1, 8, 8)).float().square().mean())
        optimizer.step()
        assert type(optimizer.optimizer) is AdamW and not torch.equal(values(model.mid.weight), before)
    finally:
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


def test_a_complex_parameter_of_the_model():
    model = Net()
    model.register_parameter("wave", nn.Parameter(torch.ones(2, 2) * 1j))
    optimizer = optim.AdamW(p for p in model.parameters() if not p.is_complex())
    with pytest.raises(ValueError, match="wave is complex"):
        nemo_lowprec.initialize(model, optimizer)
    del model.wave
    assert_untouched(model)
    assert type(optimizer) is optim.AdamW


def test_the_call_under_msamp_s_own_name():
    from nemo_lowprec import msamp

    assert msamp.initialize is nemo_lowprec.initialize and callable(nemo_lowprec.initialize)
    assert msamp.clip_grad_norm_ is nemo_lowprec.clip_grad_norm_


@AT_LEVELS
def test_a_model_is_initialized_once(level):
    model, optimizer = nemo_lowprec.initialize(Net(), opt_level=level)
    fresh = optim.AdamW(model.parameters())
    for given in (None, fresh, optimizer):
        with pytest.raises(ValueError, match="converted already: prepare the plain"):
            nemo_lowprec.initialize(model, given, opt_level="O1")
    assert type(fresh) is optim.AdamW and isinstance(optimizer, LowBitStates)
    part = nn.Sequential(nn.Linear(16, 16), model)
    with pytest.raises(ValueError, match="converted already"):
        nemo_lowprec.initialize(part)
    assert step(model, optimizer) > step(model, optimizer)


@pytest.mark.parametrize("what", [None, "model", optim.AdamW])
def test_what_is_no_model(what):
    with pytest.raises(ValueError, match=r"must be a torch\.nn\.Module"):
        nemo_lowprec.initialize(what)


def test_stochastic_rounding_reaches_the_optimizer():
    moved = []
    for stochastic in (False, True):
        model = Net()
        optimizer = optim.AdamW(model.parameters(), lr=1e-8, weight_decay=0.0)
        start = {n: p.detach().clone() for n, p in model.half().float().named_parameters()}
        model, optimizer = nemo_lowprec.initialize(model, optimizer, "O2", stochastic_rounding=stochastic)
        step(model, optimizer)
        moved.append(not torch.equal(values(model.mid.weight), start["mid.weight"]))
    assert moved == [False, True]


@AT_LEVELS
@pytest.mark.parametrize("options", [{}, {"gradient_release": True}], ids=["plain", "gradient_release"])
def test_a_model_that_is_let_go_of_is_freed(level, options):
    def trained():
        model = Net()
        model, optimizer = nemo_lowprec.initialize(model, opt_level=level, **options)
        for seed in range(2):
            step(model, optimizer, seed)
        held = [model, optimizer, Engine.of(model), *model.parameters()]
        return [weakref.ref(thing) for thing in held]

    left = trained()
    gc.collect()
    assert [ref() for ref in left] == [None] * len(left)


def stack():
    """Of its matrices' elements less than half are in a layer that is converted."""
    model = nn.Sequential(nn.Linear(32, 32), nn.LSTM(32, 64))
    return model, torch.optim.AdamW(model.parameters())


@pytest.mark.parametrize("level", LEVELS)
def test_what_is_converted_is_logged_and_too_little_is_warned_of(level, caplog):
    with (
        caplog.at_level("INFO", "nemo_lowprec"),
        pytest.warns(UserWarning, match=r"only 4% of the FLOP .*weight_hh_l0, a parameter of LSTM") as found,
    ):
        nemo_lowprec.initialize(*stack(), opt_level=level)
    assert found[0].filename == __file__
    assert "weight_ih_l0" in caplog.text and "Weights" in caplog.text


def test_a_model_that_is_converted_is_no_warning(recwarn):
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 16))
    nemo_lowprec.initialize(model, torch.optim.AdamW(model.parameters()))
    assert not len(recwarn)
