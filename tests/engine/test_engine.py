"""The engine in a loop of one's own, without a Trainer."""

import pytest
import torch
import torch.nn.functional as F
from support import CASES, Samples, assert_same, clone, is_low_bit, kept, level_of, plugin, stored, values_of
from torch import nn

from nemo_lowprec.optim import needs_closure
from nemo_lowprec.weights import master_of

CPU = torch.device("cpu")
SAMPLES = Samples()


def net():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(32, 128), nn.LayerNorm(128), nn.ReLU(), nn.Linear(128, 128), nn.Linear(128, 32))


def start(case, model=None):
    model = net() if model is None else model
    engine = plugin(case).engine
    engine.convert(model, CPU)
    engine.settle()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine.attach(optimizer)
    return engine, model, optimizer


def step(engine, model, optimizer, factor=1.0):
    with engine.forward_context():
        loss = F.cross_entropy(model(SAMPLES.x).float(), SAMPLES.y) * factor
    engine.step.scale(loss).backward()
    engine.step.run(optimizer)
    optimizer.zero_grad()
    return loss.item()


@pytest.mark.parametrize("case", CASES)
def test_a_loop_of_ones_own_learns(case):
    engine, model, optimizer = start(case)
    losses = [step(engine, model, optimizer) for _ in range(6)]
    assert losses[-1] < 0.6 * losses[0]


@pytest.mark.parametrize("case", CASES)
def test_convert_and_revert_give_the_model_back(case):
    model = net()
    modules, params = list(model.modules()), list(model.parameters())
    classes = [type(m) for m in modules]
    values = [kept(case, n, p.detach().clone()).float() for n, p in model.named_parameters()]
    engine, _, _ = start(case, model)
    assert any(type(m) is not c for m, c in zip(modules, classes, strict=True))
    engine.convert(model, CPU)  # a second time changes nothing
    engine.revert()
    engine.revert()
    assert all(a is b for a, b in zip(model.modules(), modules, strict=True))
    assert all(a is b for a, b in zip(model.parameters(), params, strict=True))
    assert [type(m) for m in modules] == classes
    for param, value in zip(params, values, strict=True):
        assert type(param) is nn.Parameter and param.dtype == torch.float32 and torch.equal(param, value)
        assert master_of(param) is None and "_is_param" not in param.__dict__
        param.grad = torch.ones_like(param)  # FP32 gradients fit again
    assert not any(m._state_dict_hooks or m._load_state_dict_pre_hooks for m in modules)
    # As good as new: plain training works, and its results are what is saved.
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    assert torch.equal(model.state_dict()["0.weight"], values[0] - 1)


@pytest.mark.parametrize("case", CASES)
def test_state_goes_from_one_engine_to_another(case):
    first, model, optimizer = start(case)
    for _ in range(2):
        step(first, model, optimizer)
    state, weights, moments = clone(first.state_dict()), clone(dict(model.state_dict())), clone(optimizer.state_dict())
    torch.manual_seed(5)  # NVFP4 rounds stochastically
    want = [step(first, model, optimizer) for _ in range(2)]

    other = net()
    with torch.no_grad():
        other[0].weight.zero_()
    second, other, optimizer = start(case, other)
    other.load_state_dict(weights)
    optimizer.load_state_dict(moments)
    second.load_state_dict(state)
    torch.manual_seed(5)
    assert [step(second, other, optimizer) for _ in range(2)] == want
    assert_same(second.state_dict(), first.state_dict())
    assert_same(dict(other.state_dict()), dict(model.state_dict()))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("bf16_with_fp8_mixed", "fp16_with_fp8_mixed"),
        ("fp16_with_fp8_mixed", "bf16_with_fp8_mixed"),
        ("msamp_o2", "fp16_with_fp8_mixed"),
    ],
)
def test_scales_of_gradients_follow_the_loss_scale_of_another_level(before, after):
    first, model, optimizer = start(before)
    for _ in range(3):
        step(first, model, optimizer)
    second, other, optimizer = start(after)
    second.load_state_dict(first.state_dict())
    scales = [1.0 if engine.step.loss_scale is None else engine.step.loss_scale.used for engine in (first, second)]
    assert scales[0] != scales[1]
    saved, found = (engine.state_dict()["fp8"]["operands"] for engine in (first, second))
    gradients = [name for name in found if name.endswith(".grad_output")]
    assert gradients and found.keys() == saved.keys()
    for name in found:
        factor = scales[1] / scales[0] if name in gradients else 1.0
        assert torch.equal(found[name]["amax_history"], saved[name]["amax_history"] * factor)
        assert torch.equal(found[name]["scale"], saved[name]["scale"] / factor)
    step(second, other, optimizer)
    operands = second.state_dict()["fp8"]["operands"]
    assert all(operands[name]["scale"] > found[name]["scale"] / 4 for name in gradients)  # as large as expected


def test_a_state_from_before_the_scale_in_use_was_saved_keeps_its_scales():
    first, model, optimizer = start("fp16_with_fp8_mixed")
    for _ in range(3):
        step(first, model, optimizer)
    state = clone(first.state_dict())
    del state["loss_scale"]["used"]
    second, _, _ = start("fp16_with_fp8_mixed")
    second.load_state_dict(state)
    assert_same(second.state_dict()["fp8"], first.state_dict()["fp8"])


@pytest.mark.parametrize("case", CASES)
def test_a_step_whose_gradients_are_not_finite_changes_nothing(case):
    engine, model, optimizer = start(case)
    step(engine, model, optimizer)
    before = clone([dict(model.state_dict()), optimizer.state_dict(), engine.state_dict()])
    step(engine, model, optimizer, factor=float("nan"))
    assert optimizer in engine.step.skipped
    assert_same(clone([dict(model.state_dict()), optimizer.state_dict(), engine.state_dict()]), before)
    step(engine, model, optimizer)
    assert optimizer not in engine.step.skipped
    assert not torch.equal(model.state_dict()["0.weight"], before[0]["0.weight"])


@pytest.mark.parametrize("case", CASES)
def test_copies_are_the_masters_rounded_after_every_step(case):
    engine, model, optimizer = start(case)
    for _ in range(2):
        step(engine, model, optimizer)
        for param in model.parameters():
            master = master_of(param)
            if is_low_bit(case) and param.dim() < 2:
                assert master is None and param.dtype == torch.float32
                continue
            if master is None:
                assert not level_of(case).has_half_weights or stored(param).dtype == torch.float16
                continue
            master = values_of(master)
            if stored(param).dtype == torch.uint8:
                assert (param.float() - master).abs().max() <= master.abs().max() / 16
            else:
                assert torch.equal(param, master.to(param.dtype)) and param.dtype == engine.half


def test_attaching_an_optimizer_twice_steps_once():
    engine, model, optimizer = start("bf16_mixed")
    hooks = list(optimizer._optimizer_step_pre_hooks)
    engine.attach(optimizer)
    assert list(optimizer._optimizer_step_pre_hooks) == hooks
    step(engine, model, optimizer)
    assert int(optimizer.state[model[0].weight]["step"]) == 1


def test_two_optimizers_may_share_a_parameter():
    engine, model, first = start("bf16_mixed")
    second = torch.optim.SGD(model.parameters(), lr=0.1)
    engine.attach(second)
    for optimizer in (first, second):
        before = model.state_dict()["0.weight"].clone()
        step(engine, model, optimizer)
        assert not torch.equal(model.state_dict()["0.weight"], before)
        assert optimizer.param_groups[0]["params"][0] is model[0].weight


@pytest.mark.parametrize(
    ("optimizer", "wanted"),
    [(torch.optim.LBFGS, True), (torch.optim.AdamW, False), (torch.optim.SGD, False), (torch.optim.Adafactor, False)],
)
def test_which_optimizers_evaluate_the_loss_themselves(optimizer, wanted):
    assert needs_closure(optimizer(net().parameters(), lr=0.1)) is wanted


def test_a_gpu_level_on_another_device_is_refused():
    with pytest.raises(ValueError, match="bf16_mixed runs on NVIDIA GPUs and on CPUs, not on mps"):
        plugin("bf16_mixed").engine.convert(net(), torch.device("mps"))


@pytest.mark.parametrize("case", ["te_fp8", "bf16_with_fp8_mixed", "msamp_o2+fp16"])
def test_a_step_of_several_processes_reduces_amaxes_once(case):
    engine, model, optimizer = start(case)
    sizes = []
    engine.amaxes.share(lambda amax: sizes.append(amax.numel()))
    for _ in range(2):
        step(engine, model, optimizer)
    operands = len(engine.amaxes.histories.slots)
    assert [size >= operands for size in sizes] == [True, True]
