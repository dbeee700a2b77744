"""Accelerate's loop at the levels of the chart."""

import accelerate
import pytest
import torch
import torch.nn.functional as F
from accelerate.utils import DistributedDataParallelKwargs, GradScalerKwargs, MSAMPRecipeKwargs, TERecipeKwargs
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR
from torch.utils.data import DataLoader

from nemo_lowprec.accelerate import prepare
from nemo_lowprec.engine import Engine
from nemo_lowprec.optim import LowBitStates
from tests.faces import FACE_LEVELS, TASKS, batches, make_model, make_optimizer, trainer_losses
from tests.processes import on_processes
from tests.support import assert_same, clone

FP16 = [("fp16_amp", {}), ("fp16_mixed", {}), ("fp16_with_fp8_mixed", {}), ("msamp_o2", {"half": "fp16"})]


def started(**options):
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()
    return accelerate.Accelerator(cpu=True, **options)


@pytest.fixture(autouse=True)
def ended():
    yield
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()


def net():
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(32, 64), nn.LayerNorm(64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)
    )


X = torch.randn(16, 32, generator=torch.Generator().manual_seed(2))
Y = torch.randint(0, 10, (16,), generator=torch.Generator().manual_seed(3))


def loss_of(model, rows=slice(None)):
    return F.cross_entropy(model(X[rows]), Y[rows])


def begin(accelerator, level, *others, fused=None, **options):
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)
    return prepare(accelerator, model, optimizer, *(make(optimizer) for make in others), level=level, **options)


def train(accelerator, model, optimizer, steps, *schedulers):
    losses = []
    for _ in range(steps):
        loss = loss_of(model)
        accelerator.backward(loss)
        optimizer.step()
        for scheduler in schedulers:
            scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("level", FACE_LEVELS)
@pytest.mark.parametrize(("task", "precision"), zip(TASKS, ("no", "bf16"), strict=True))
def test_the_losses_are_the_trainers(task, precision, level):
    accelerator, model = started(mixed_precision=precision), make_model(task)
    loader = DataLoader(batches(task), batch_size=None)
    model, optimizer, loader = prepare(accelerator, model, make_optimizer(model), loader, level=level)
    losses = []
    for batch in loader:
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses == trainer_losses(task, level)


@pytest.mark.parametrize("fused", [None, True])
@pytest.mark.parametrize(("level", "options"), FP16)
def test_levels_in_fp16_scale_the_loss_and_skip_a_step_whole(level, options, fused):
    accelerator = started(mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(init_scale=1024.0)])
    model, optimizer, scheduler = begin(
        accelerator, level, lambda optimizer: ExponentialLR(optimizer, 0.9), fused=fused, **options
    )
    losses = train(accelerator, model, optimizer, 4, scheduler)
    assert losses[-1] < 0.8 * losses[0] and accelerator.scaler.get_scale() == 1024.0
    before = clone([dict(model.state_dict()), optimizer.state_dict()["state"], scheduler.state_dict()["last_epoch"]])
    accelerator.backward(loss_of(model) * float("inf"))
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    assert accelerator.optimizer_step_was_skipped and accelerator.scaler.get_scale() == 512.0
    after = [dict(model.state_dict()), optimizer.state_dict()["state"], scheduler.state_dict()["last_epoch"]]
    assert_same(clone(after), before)
    train(accelerator, model, optimizer, 1, scheduler)
    assert not accelerator.optimizer_step_was_skipped and scheduler.state_dict()["last_epoch"] == before[2] + 1


@pytest.mark.parametrize(("level", "precision"), [("msamp_o2", "bf16"), ("msamp_o2", "fp16"), ("fp16_mixed", "fp16")])
def test_clipping_sees_true_gradients(level, precision):
    accelerator = started(mixed_precision=precision, kwargs_handlers=[GradScalerKwargs(init_scale=4096.0)])
    model, optimizer = begin(accelerator, level)
    plain = net()
    loss_of(plain).backward()
    want = nn.utils.get_total_norm([p.grad for p in plain.parameters()])
    accelerator.backward(loss_of(model))
    assert accelerator.clip_grad_norm_(model.parameters(), 0.1).item() == pytest.approx(want.item(), rel=0.05)
    clipped = nn.utils.get_total_norm([p.grad.float() for p in model.parameters()])
    assert clipped.item() == pytest.approx(0.1, rel=0.02)
    optimizer.step()
    optimizer.zero_grad()
    accelerator.backward(loss_of(model))
    accelerator.clip_grad_value_(model.parameters(), 1e-3)
    assert max(p.grad.abs().max() for p in model.parameters()) <= 1.001e-3
    optimizer.step()


@pytest.mark.parametrize("level", ["te_fp8", "bf16_mixed", "bf16_with_fp8_mixed", "msamp_o2"])
def test_micro_batches_add_up_to_the_batch(level):
    whole = started(mixed_precision="bf16")
    model, optimizer = begin(whole, level)
    whole.backward(loss_of(model))
    norm = whole.clip_grad_norm_(model.parameters(), float("inf"))

    parts = started(mixed_precision="bf16", gradient_accumulation_steps=2)
    model, optimizer = begin(parts, level)
    start = clone(dict(model.state_dict()))
    for i in range(2):
        with parts.accumulate(model):
            parts.backward(loss_of(model, slice(8 * i, 8 * i + 8)))
            if parts.sync_gradients:
                assert parts.clip_grad_norm_(model.parameters(), float("inf")).item() == pytest.approx(
                    norm.item(), rel=0.03
                )
            optimizer.step()
            optimizer.zero_grad()
        moved = any(not torch.equal(value, start[name]) for name, value in model.state_dict().items())
        assert moved == (i == 1)


RESUMED = [
    ("te_fp8", "bf16", {}), ("bf16_with_fp8_mixed", "no", {"fp8_params": True}), ("fp16_with_fp8_mixed", "fp16", {}),
    ("msamp_o2", "bf16", {"stochastic_rounding": True}), ("msamp_o3", "fp16", {}),
]  # fmt: skip


@pytest.mark.parametrize(("level", "precision", "options"), RESUMED)
def test_load_state_goes_on_bit_for_bit(level, precision, options, tmp_path):
    schedule = lambda optimizer: ExponentialLR(optimizer, 0.9)  # noqa: E731
    accelerator = started(mixed_precision=precision)
    mine = begin(accelerator, level, schedule, **options)
    train(accelerator, *mine[:2], 3, mine[2])
    accelerator.save_state(str(tmp_path))
    want = train(accelerator, *mine[:2], 3, mine[2])
    again = started(mixed_precision=precision)
    other = begin(again, level, schedule, **options)
    with torch.no_grad():
        for param in other[0].parameters():
            param.copy_(torch.zeros(param.shape))
    again.load_state(str(tmp_path))
    assert train(again, *other[:2], 3, other[2]) == want
    assert_same(clone(dict(other[0].state_dict())), clone(dict(mine[0].state_dict())))


@pytest.mark.parametrize("level", FACE_LEVELS)
def test_saved_weights_are_plain_and_open_anywhere(level, tmp_path):
    accelerator = started(mixed_precision="bf16")
    model, optimizer = begin(accelerator, level)
    train(accelerator, model, optimizer, 2)
    state = accelerator.get_state_dict(model)
    plain = net()
    assert state.keys() == plain.state_dict().keys() and {type(value) for value in state.values()} == {torch.Tensor}
    accelerator.save_model(model, str(tmp_path))
    accelerate.load_checkpoint_in_model(plain, str(tmp_path))
    assert all(torch.equal(value, state[name].float()) for name, value in plain.state_dict().items())
    own = accelerator.unwrap_model(model, keep_fp32_wrapper=False)
    assert own is model and loss_of(own).item() == pytest.approx(loss_of(plain).item(), rel=0.05)


def test_tied_weights_stay_tied_through_save_state(tmp_path):
    def tied():
        model = nn.ModuleDict(
            {"embed": nn.Embedding(64, 32), "mid": nn.Linear(32, 32), "head": nn.Linear(32, 64, bias=False)}
        )
        model["head"].weight = model["embed"].weight
        return model

    accelerator = started(mixed_precision="bf16")
    model = tied()
    model, _ = prepare(accelerator, model, torch.optim.AdamW(model.parameters()), level="msamp_o2")
    accelerator.save_state(str(tmp_path))
    before = clone(dict(model.state_dict()))
    with torch.no_grad():
        model["embed"].weight.copy_(torch.zeros(64, 32))
    accelerator.load_state(str(tmp_path))
    assert model["embed"].weight is model["head"].weight
    assert_same(clone(dict(model.state_dict())), before)


def test_a_second_optimizer_of_the_model_steps_at_the_level_too():
    accelerator, model = started(mixed_precision="fp16"), net()
    first = torch.optim.AdamW(model[:3].parameters(), lr=1e-2)
    second = torch.optim.AdamW(model[3:].parameters(), lr=1e-2)
    model, first, second = prepare(accelerator, model, first, second, level="msamp_o2")
    losses = []
    for _ in range(4):
        losses.append(loss_of(model))
        accelerator.backward(losses[-1])
        for optimizer in (first, second):
            optimizer.step()
            optimizer.zero_grad()
    assert isinstance(second.optimizer, LowBitStates) and losses[-1] < 0.8 * losses[0]


def test_memory_is_free_for_another_training():
    accelerator = started()
    for level in ("bf16_mixed", "te_fp8"):
        model, optimizer = begin(accelerator, level)
        train(accelerator, model, optimizer, 1)
        engine = Engine.of(model)
        assert engine.level.name == level
        model, optimizer = accelerator.free_memory(model, optimizer)
        assert model is None and accelerator._models == []


HOOK = DistributedDataParallelKwargs(comm_hook=accelerate.DDPCommunicationHookType.BF16)
# (message, level, its arguments, the Accelerator's)
REFUSED = [
    (r"fp16_mixed computes in FP16 .*mixed_precision='fp16'.* not with 'bf16'", "fp16_mixed", {},
     {"mixed_precision": "bf16"}),
    (r"fp16_amp computes in FP16 .* not with 'no'", "fp16_amp", {}, {}),
    (r"msamp_o1 computes in FP16", "msamp_o1", {"half": "fp16"}, {"mixed_precision": "bf16"}),
    (r"bf16_mixed computes in BF16.* not with 'fp16'", "bf16_mixed", {}, {"mixed_precision": "fp16"}),
    (r"msamp_o1 computes in BF16", "msamp_o1", {"half": "bf16"}, {"mixed_precision": "fp16"}),
    ("Name one, such as level='bf16_with_fp8_mixed'", None, {}, {}),
    ("Unknown precision level", "bf16", {}, {}),
    ("GradScalerKwargs", "fp16_mixed", {"loss_scale": 8.0}, {"mixed_precision": "fp16"}),
    ("takes no 'fp8_margin'", "bf16_mixed", {"fp8_margin": 1}, {}),
    ("gradient_accumulation_steps must be 1", "msamp_o2", {"gradient_release": True},
     {"gradient_accumulation_steps": 2}),
    ("gradient_release", "msamp_o2", {"gradient_release": True}, {"mixed_precision": "fp16"}),
    ("comm_hook='bf16' would have no effect", "bf16_mixed", {}, {"kwargs_handlers": [HOOK]}),
]  # fmt: skip


@pytest.mark.parametrize(("message", "level", "arguments", "options"), REFUSED)
def test_what_cannot_be_trained_is_refused_before(message, level, arguments, options):
    accelerator, model = started(**options), net()
    error = TypeError if {"loss_scale", "fp8_margin"} & arguments.keys() else ValueError
    with pytest.raises(error, match=message):
        prepare(accelerator, model, torch.optim.AdamW(model.parameters()), level=level, **arguments)
    assert all(type(p) is nn.Parameter and p.dtype == torch.float32 for p in model.parameters())
    assert Engine.of(model) is None


def test_the_model_comes_first():
    accelerator = started()
    model, optimizer = accelerator.prepare(net(), torch.optim.AdamW(net().parameters()))
    with pytest.raises(ValueError, match="Give the plain model and its optimizer to this prepare"):
        prepare(accelerator, model, optimizer, level="bf16_mixed")
    with pytest.raises(ValueError, match="AcceleratedOptimizer"):
        prepare(accelerator, net(), optimizer, level="bf16_mixed")


def test_a_second_model_that_would_train_is_refused():
    accelerator, model = started(), net()
    with pytest.raises(ValueError, match=r"takes one model.*Sequential after the optimizer.*Call prepare for each"):
        prepare(accelerator, model, torch.optim.AdamW(model.parameters()), net(), level="msamp_o2")
    assert Engine.of(model) is None
    begin(accelerator, "msamp_o2", lambda _: net().requires_grad_(False), lambda _: nn.MSELoss())


def test_clipping_after_released_gradients_is_refused():
    accelerator = started()
    released, _ = begin(accelerator, "msamp_o2", gradient_release=True)
    model, _ = begin(accelerator, "msamp_o2")
    accelerator.backward(loss_of(released) + loss_of(model))
    for clip in (accelerator.clip_grad_norm_, accelerator.clip_grad_value_):
        clip(model.parameters(), 1.0)
        with pytest.raises(ValueError, match="gradient_release=True has stepped each parameter"):
            clip(released.parameters(), 1.0)


@pytest.mark.parametrize("kind", ["FSDP", "DEEPSPEED", "MEGATRON_LM"])
def test_other_engines_of_accelerate_are_refused(kind):
    accelerator = started()
    accelerator.state.distributed_type = accelerate.DistributedType[kind]
    with pytest.raises(ValueError, match=rf"not with Accelerate's {kind}.*strategy='lowprec_sharded'"):
        prepare(accelerator, net(), level="bf16_mixed")


@pytest.fixture
def fp8_machine(monkeypatch):
    """Accelerate believes that the packages of its FP8 backends are there."""
    for name in ("is_msamp_available", "is_transformer_engine_available"):
        monkeypatch.setattr(accelerate.utils.dataclasses, name, lambda: True)
    monkeypatch.setattr(accelerate.state, "is_fp8_available", lambda: True)


def recipes():
    return {
        "msamp": (MSAMPRecipeKwargs(opt_level="O1"), "msamp_o1"),
        "te": (TERecipeKwargs(margin=1, fp8_format="E4M3", use_autocast_during_eval=True), "te_fp8"),
    }


@pytest.mark.parametrize("kind", ["msamp", "te"])
def test_the_recipe_of_the_accelerator_chooses_the_level(kind, fp8_machine, monkeypatch):
    recipe, level = recipes()[kind]
    monkeypatch.setenv("ACCELERATE_FP8_BACKEND", kind.upper())
    accelerator = started(mixed_precision="fp8", kwargs_handlers=[recipe])
    model, optimizer = begin(accelerator, None)
    engine = Engine.of(model)
    assert engine.level.name == level and accelerator.scaler is None
    losses = train(accelerator, model, optimizer, 4)
    assert losses[-1] < 0.8 * losses[0]
    if kind == "te":
        chosen = engine.recipe
        assert (chosen.fp8, chosen.fp8_margin, chosen.fp8_amax_compute_algo) == ("e4m3", 1, "max")
    with pytest.raises(ValueError, match="Leave the level out"):
        begin(started(mixed_precision="fp8", kwargs_handlers=[recipe]), "bf16_mixed")


def one_epoch(accelerator, model, optimizer, loader):
    norms = []
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = F.cross_entropy(model(x), y)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norms.append(accelerator.clip_grad_norm_(model.parameters(), 1.0).item())
            optimizer.step()
            optimizer.zero_grad()
    return accelerator.gather(loss.detach()).mean().item(), norms, clone(dict(model.module.state_dict()))


def on_two(rank, folder):
    found = {}
    for level, precision in [("te_fp8", "bf16"), ("fp16_mixed", "fp16")]:
        accelerator = started(mixed_precision=precision, gradient_accumulation_steps=2)
        assert accelerator.distributed_type == accelerate.DistributedType.MULTI_CPU
        loader = DataLoader(list(zip(X, Y, strict=True)), batch_size=4)
        prepared = begin(accelerator, level, lambda _, loader=loader: loader)
        with torch.no_grad():  # the first process's weights are those of both
            next(prepared[0].parameters()).mul_(1.0 + rank)
        epochs = [one_epoch(accelerator, *prepared) for _ in range(2)]
        accelerator.save_state(f"{folder}/{level}")
        epochs.append(one_epoch(accelerator, *prepared))
        accelerator.load_state(f"{folder}/{level}")
        assert_same(list(one_epoch(accelerator, *prepared)), list(epochs[-1]))
        found[level] = [list(epoch) for epoch in epochs]
        with pytest.raises(ValueError, match="trigger_sync_in_backward"):
            accelerator.trigger_sync_in_backward(prepared[0])
    return found


def test_two_processes_average_accumulate_and_resume(tmp_path):
    first, second = on_processes(2, tmp_path, on_two, str(tmp_path))
    assert_same(first, second)  # gathered losses, norms of averaged gradients and weights
    for epochs in first.values():
        assert epochs[-1][0] < epochs[0][0]


def test_an_alias_brings_its_arguments():
    accelerator, model = started(), net()
    prepare(accelerator, model, torch.optim.AdamW(model.parameters()), level="bf16_with_fp8_delayed_scaling_mixed")
    assert Engine.of(model).options.chosen == {"fp8_params": True}
