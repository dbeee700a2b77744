"""``Fabric(plugins=...)`` on one device: the losses of the Trainer, clipping, accumulation, overflows, checkpoints."""

import json
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from lightning.fabric import Fabric
from lightning.fabric.strategies import DataParallelStrategy, DeepSpeedStrategy, FSDPStrategy
from torch import nn

import nemo_lowprec
from nemo_lowprec.engine import Engine
from tests.faces import FACE_LEVELS, STEPS, TASKS, batches, make_model, make_optimizer, trainer_losses
from tests.support import CASES, FP16_LEVELS, Net, assert_same, clone, loader, plugin, stored, trainer

AT_LEVELS = pytest.mark.parametrize("level", FACE_LEVELS)


def fabric(case, **options):
    return Fabric(accelerator="cpu", devices=1, plugins=plugin(case, **options))


def set_up(case, task="llama", **options):
    """A Fabric, the model of ``task`` and its optimizer."""
    made = fabric(case, **options)
    model = make_model(task)
    return made, *made.setup(model, make_optimizer(model))


def step(made, model, optimizer, *parts, clip=None):
    """One step on micro-batches ``parts``; the loss of the last one."""
    optimizer.zero_grad()
    for part in parts:
        loss = model(**part).loss
        made.backward(loss / len(parts))
    if clip:
        made.clip_gradients(model, optimizer, **clip)
    optimizer.step()
    return loss.item()


@pytest.mark.parametrize("task", TASKS)
@AT_LEVELS
def test_the_losses_are_the_trainers(level, task):
    made, model, optimizer = set_up(level, task)
    losses = [step(made, model, optimizer, part) for part in batches(task)]
    assert losses == trainer_losses(task, level)


@pytest.mark.parametrize("case", CASES)
def test_a_lightning_module_trains_as_under_the_trainer_at_every_level(case):
    under_trainer = Net()
    trainer(plugin(case), max_steps=4).fit(under_trainer, loader())

    made, net = fabric(case), Net()
    model, optimizer = made.setup(net, net.configure_optimizers())
    data = made.setup_dataloaders(loader())
    for index, part in enumerate(data):
        optimizer.zero_grad()
        made.backward(model.training_step(part, index))
        optimizer.step()
    assert net.losses == under_trainer.losses and len(net.losses) == 4


@pytest.mark.parametrize("how", ["max_norm", "clip_val"])
@AT_LEVELS
def test_clipping_is_the_trainers(level, how):
    algorithm = {"max_norm": "norm", "clip_val": "value"}[how]
    under_trainer = Net()
    clips = {"gradient_clip_val": 0.01, "gradient_clip_algorithm": algorithm}
    trainer(plugin(level), max_steps=4, **clips).fit(under_trainer, loader())

    made, net = fabric(level), Net()
    model, optimizer = made.setup(net, net.configure_optimizers())
    for index, part in enumerate(loader()):
        optimizer.zero_grad()
        made.backward(model.training_step(part, index))
        norm = made.clip_gradients(model, optimizer, **{how: 0.01})
        optimizer.step()
        assert (norm is None) == (how == "clip_val") and (norm is None or norm > 0.01)
    assert net.losses == under_trainer.losses
    unclipped = Net()
    trainer(plugin(level), max_steps=4).fit(unclipped, loader())
    assert net.losses != unclipped.losses


def test_another_norm_is_torchs_to_the_rounding_of_fp8():
    made, model, optimizer = set_up("msamp_o2")
    made.backward(model(**batches("llama")[0]).loss)
    largest = max(p.grad.abs().max() for p in model.parameters())
    assert made.clip_gradients(model, optimizer, max_norm=1e-3, norm_type="inf") == largest
    assert max(p.grad.abs().max() for p in model.parameters()) == pytest.approx(1e-3, rel=1e-5)


@AT_LEVELS
def test_micro_batches_are_accumulated_as_under_the_trainer(level):
    under_trainer = Net()
    trainer(plugin(level), max_steps=2, accumulate_grad_batches=2).fit(under_trainer, loader())
    made, net = fabric(level), Net()
    model, optimizer = made.setup(net, net.configure_optimizers())
    for index, part in enumerate(loader()):
        with made.no_backward_sync(model, enabled=index % 2 == 0):
            made.backward(model.training_step(part, index) / 2)
        if index % 2:
            optimizer.step()
            optimizer.zero_grad()
    assert net.losses == under_trainer.losses


@pytest.mark.parametrize("level", [*FP16_LEVELS, "msamp_o2+fp16", "bf16_mixed"])
def test_a_step_with_an_infinite_gradient_is_skipped(level):
    made, net = fabric(level, **({} if level == "bf16_mixed" else {"loss_scale": None})), Net()
    model, optimizer = made.setup(net, net.configure_optimizers())
    engine = Engine.of(net)
    first, second = list(loader())[:2]
    for part, factor in ((first, 1.0), (second, float("inf")), (second, 1.0)):
        before = {name: value.clone() for name, value in model.state_dict().items()}
        optimizer.zero_grad()
        made.backward(model.training_step(part, 0) * factor)
        optimizer.step()
        same = all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        assert same == (factor != 1.0) == (optimizer.optimizer in engine.step.skipped)


def test_clipping_raises_for_infinite_gradients_unless_it_is_told_not_to():
    made, model, optimizer = set_up("bf16_with_fp8_mixed")
    made.backward(model(**batches("llama")[0]).loss * float("inf"))
    with pytest.raises(RuntimeError, match=r"norm of order 2\.0 is nan"):
        made.clip_gradients(model, optimizer, max_norm=1.0)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    made.clip_gradients(model, optimizer, max_norm=1.0, error_if_nonfinite=False)
    optimizer.step()
    assert_same(model.state_dict(), before)


@pytest.mark.parametrize("level", [*FACE_LEVELS, "msamp_o3", "fp16_mixed"])
def test_a_run_resumes_bit_for_bit(level, tmp_path):
    options = {"initial_loss_scale": 2.0**20, "loss_scale": None} if level == "fp16_mixed" else {}
    data = batches("llama")
    made, model, optimizer = set_up(level, **options)
    losses = [step(made, model, optimizer, part) for part in data[:6]]
    made.save(tmp_path / "run.ckpt", {"model": model, "optimizer": optimizer, "step": 6, "extra": {"a": 1}})
    losses += [step(made, model, optimizer, part) for part in data[6:]]

    made, model, optimizer = set_up(level, **options)
    state = {"model": model, "optimizer": optimizer, "step": 0}
    assert made.load(tmp_path / "run.ckpt", state) == {"extra": {"a": 1}} and state["step"] == 6
    assert [step(made, model, optimizer, part) for part in data[6:]] == losses[6:]


def test_a_checkpoint_holds_plain_tensors_that_any_fabric_opens(tmp_path):
    made, model, optimizer = set_up("msamp_o2")
    step(made, model, optimizer, batches("llama")[0])
    made.save(tmp_path / "run.ckpt", {"model": model, "optimizer": optimizer})

    saved = torch.load(tmp_path / "run.ckpt", weights_only=True)
    assert saved["model"].keys() == make_model("llama").state_dict().keys()
    assert {type(value) for value in saved["model"].values()} == {torch.Tensor}
    for other in (Fabric(accelerator="cpu", devices=1), fabric("bf16_with_fp8_mixed")):
        plain = make_model("llama")
        plain, adamw = other.setup(plain, make_optimizer(plain))
        other.load(tmp_path / "run.ckpt", {"model": plain, "optimizer": adamw})
        assert step(other, plain, adamw, batches("llama")[1]) < 5.6
    loaded = made.load(tmp_path / "run.ckpt")
    made.save(tmp_path / "raw.ckpt", loaded["model"])
    made.load_raw(tmp_path / "raw.ckpt", model)
    assert_same(model.state_dict(), loaded["model"])


def test_each_model_gets_its_own_histories_from_a_checkpoint(tmp_path):
    def both(order):
        made, nets = fabric("bf16_with_fp8_mixed"), {"student": Net(), "teacher": Net()}
        with torch.no_grad():
            nets["teacher"].inp.weight.mul_(8.0)
        done = {name: made.setup(nets[name], nets[name].configure_optimizers()) for name in order}
        return made, {name: done[name] for name in ("student", "teacher")}

    def train(made, models):
        for part in loader():
            for model, optimizer in models.values():
                optimizer.zero_grad()
                made.backward(model.training_step(part, 0))
                optimizer.step()
        return [clone(dict(model.state_dict())) for model, _ in models.values()]

    made, models = both(("student", "teacher"))
    train(made, models)
    for name, (model, optimizer) in models.items():
        made.save(tmp_path / name, {"model": model, "optimizer": optimizer})
    want = train(made, models)
    again, models = both(("teacher", "student"))
    for name, (model, optimizer) in models.items():
        again.load(tmp_path / name, {"optimizer": optimizer, "model": model})
    assert_same(train(again, models), want)


def test_a_full_disk_leaves_the_earlier_checkpoint(tmp_path, monkeypatch):
    made, model, _ = set_up("msamp_o2")
    path = tmp_path / "run.ckpt"
    made.save(path, {"model": model})
    before = path.read_bytes()

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(RuntimeError, match="could not be written: No space left on device"):
        made.save(path, {"model": model})
    assert path.read_bytes() == before and [p.name for p in tmp_path.iterdir()] == ["run.ckpt"]


@AT_LEVELS
def test_a_closure_is_called_once_and_lbfgs_calls_it_as_often_as_it_needs(level):
    made, net = fabric(level), Net()
    model, optimizer = made.setup(net, net.configure_optimizers())
    for index, part in enumerate(loader()):

        def closure(part=part, index=index):
            optimizer.zero_grad()
            loss = model.training_step(part, index)
            made.backward(loss)
            return loss

        assert optimizer.step(closure).item() == net.losses[-1] and len(net.losses) == index + 1
    under_trainer = Net()
    trainer(plugin(level), max_steps=4).fit(under_trainer, loader())
    assert net.losses == under_trainer.losses


def test_lbfgs_evaluates_the_loss_with_the_weights_of_the_moment():
    made, net = fabric("bf16_mixed"), Net()
    model, optimizer = made.setup(net, torch.optim.LBFGS(net.parameters(), lr=0.1, max_iter=4))
    part = next(iter(loader()))

    def closure():
        optimizer.zero_grad()
        loss = model.training_step(part, 0)
        made.backward(loss)
        return loss

    optimizer.step(closure)
    assert len(net.losses) == 4 and net.losses == sorted(net.losses, reverse=True) and net.losses[0] > net.losses[-1]


def test_outputs_are_fp32_and_the_autocast_is_the_levels():
    made, model, _ = set_up("bf16_with_fp8_mixed", "vit")
    for context in (nullcontext(), torch.no_grad()):
        with context:
            assert model(**batches("vit")[0]).logits.dtype == torch.float32
    with made.autocast():
        assert torch.ones(2, 2).mm(torch.ones(2, 2)).dtype == torch.bfloat16


@pytest.mark.parametrize("level", ["bf16_mixed", *FACE_LEVELS])
def test_a_model_may_be_compiled_after_it_is_set_up(level):
    losses = []
    for backend in (None, "eager"):
        made, net = fabric(level), Net()
        model, optimizer = made.setup(net, net.configure_optimizers())
        model = model if backend is None else torch.compile(model, backend=backend)
        for part in loader():
            loss = F.cross_entropy(model(part["x"]), part["y"])
            made.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    half = len(losses) // 2
    assert losses[:half] == losses[half:]


def test_two_models_with_an_optimizer_each_are_trained_in_turn():
    made, nets = fabric("msamp_o2"), [Net(), Net()]
    set_up_both = [made.setup(net, net.configure_optimizers()) for net in nets]
    part = next(iter(loader()))
    for index in range(4):
        (model, optimizer), (other, _) = set_up_both[index % 2], set_up_both[1 - index % 2]
        before = [[stored(p).clone() for p in net.parameters()] for net in nets]
        optimizer.zero_grad()
        made.backward(model.training_step(part, 0) + F.mse_loss(model(part["x"]), other(part["x"])))
        optimizer.step()
        moved = [
            any(not torch.equal(stored(p), b) for p, b in zip(net.parameters(), olds, strict=True))
            for net, olds in zip(nets, before, strict=True)
        ]
        assert moved == [index % 2 == 0, index % 2 == 1]


@pytest.mark.parametrize("kind", [DataParallelStrategy, DeepSpeedStrategy, FSDPStrategy])
def test_a_strategy_without_levels_is_refused_by_name(kind):
    with pytest.raises(ValueError, match=f"bf16_mixed does not train with Fabric's {kind.__name__}.*shard_blocks"):
        object.__new__(kind).precision = plugin("bf16_mixed")


def test_a_second_model_is_refused_where_the_loss_is_scaled():
    made = fabric("fp16_mixed")
    made.setup(Net())
    with pytest.raises(ValueError, match=r"fp16_mixed scales the loss of one model\..*one module.*a Fabric for each"):
        made.setup(Net())


def test_an_optimizer_of_no_model_or_of_two_is_refused():
    made, first, second = fabric("bf16_mixed"), Net(), Net()
    made.setup(first)
    with pytest.raises(ValueError, match="parameters of 0 models that Fabric has set up"):
        made.setup_optimizers(torch.optim.SGD(second.parameters(), 0.1))
    made.setup(second)
    with pytest.raises(ValueError, match="parameters of 2 models that Fabric has set up"):
        made.setup_optimizers(torch.optim.SGD([*first.parameters(), *second.parameters()], 0.1))


def test_an_optimizer_without_low_bit_states_is_refused_before_training():
    net = Net()
    with pytest.raises(ValueError, match="RMSprop"):
        fabric("msamp_o2").setup(net, torch.optim.RMSprop(net.parameters()))


def test_a_model_on_another_device_is_refused():
    with pytest.raises(ValueError, match="The model is on meta, and Fabric's device is cpu"):
        fabric("bf16_mixed").setup(nn.Linear(64, 64, device="meta"), move_to_device=False)


def test_a_plain_backward_is_refused():
    _, model, _ = set_up("bf16_mixed")
    with pytest.raises(RuntimeError, match=r"fabric\.backward"):
        model(**batches("llama")[0]).loss.backward()


def test_gradient_release_steps_in_backward_and_refuses_clipping():
    made, model, optimizer = set_up("msamp_o2", gradient_release=True)
    losses = [step(made, model, optimizer, part) for part in batches("llama")]
    assert losses == trainer_losses("llama", "msamp_o2", gradient_release=True) and len(losses) == STEPS
    made.backward(model(**batches("llama")[0]).loss)
    for how in ({"max_norm": 1.0}, {"clip_val": 1.0}):
        with pytest.raises(ValueError, match="gradient_release=True has stepped"):
            made.clip_gradients(model, optimizer, **how)


def test_a_model_is_given_back_when_fabric_is_torn_down():
    made, net = fabric("msamp_o3"), Net()
    made.setup(net, net.configure_optimizers())
    assert Engine.of(net) is not None
    made.strategy.teardown()
    assert Engine.of(net) is None and {type(p) for p in net.parameters()} == {nn.Parameter}
    assert "training_step" not in vars(net)
    assert net.training_step(next(iter(loader())), 0) > 0


def test_the_monitor_watches_a_model_in_fabric(tmp_path):
    made, model, optimizer = set_up("bf16_with_fp8_mixed")
    with nemo_lowprec.monitor(model.module, tmp_path, every_n_steps=3):
        losses = [step(made, model, optimizer, part) for part in batches("llama")]
    records = [json.loads(line) for line in (tmp_path / "monitor.jsonl").read_text().splitlines()]
    assert losses == trainer_losses("llama", "bf16_with_fp8_mixed")
    assert [record["step"] for record in records if record["record"] == "sample"][-4:] == [3, 6, 9, STEPS]


def test_precision_and_a_level_together_are_refused():
    with pytest.raises(ValueError, match="Received both"):
        Fabric(accelerator="cpu", devices=1, precision="bf16-mixed", plugins=plugin("bf16_mixed"))


def test_fabric_without_a_level_is_as_ever():
    made = Fabric(accelerator="cpu", devices=1, precision="bf16-mixed")
    net = Net()
    model, optimizer = made.setup(net, net.configure_optimizers())
    made.backward(model(next(iter(loader()))["x"]).sum())
    optimizer.step()
    assert Engine.of(net) is None and {p.dtype for p in net.parameters()} == {torch.float32}
