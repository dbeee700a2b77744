"""Checkpoints hold the exact weights under the user's names, and open at any level."""

import copy
import pickle

import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from support import (
    CASES,
    HALF_LEVELS,
    MSAMP_LEVELS,
    Net,
    assert_same,
    is_low_bit,
    kept,
    kept_state,
    level_of,
    linear_optimizer,
    loader,
    plugin,
    save_at,
    snapshot,
    stored,
    train,
    trainer,
    values_of,
)

from nemo_lowprec.weights import master_of

FP32 = "an FP32 Trainer"


def precision(case):
    return None if case == FP32 else plugin(case)


def kept_weights(case, weights):
    return {name: kept(case, name, value.float()) for name, value in weights.items()}


def kept_states(case, optimizers):
    return [
        {**o, "state": {i: {k: kept_state(case, k, v.float()) for k, v in s.items()} for i, s in o["state"].items()}}
        for o in optimizers
    ]


@pytest.mark.parametrize("weights_only", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_a_checkpoint_holds_exact_weights_under_the_users_names(case, weights_only, tmp_path):
    observed = train(Net(), case, save_at(tmp_path, 2, save_weights_only=weights_only), max_steps=2)
    saved = torch.load(tmp_path / "step=2.ckpt", weights_only=True)
    weights = saved["state_dict"]
    assert list(weights) == list(Net().state_dict())
    for name, value in weights.items():
        assert type(value) is torch.Tensor and value.dtype == kept(case, name, value).dtype, name
        assert value.dtype == torch.float32 or (case in MSAMP_LEVELS and value.dtype == torch.float16)
        assert torch.equal(value, kept(case, name, value)), name
        assert torch.equal(value, observed.state["masters"].get(name, value)), name
        assert not torch.equal(value, kept(case, name, Net().state_dict()[name])), name
    state = saved.get("LowPrecision", {})  # Lightning's key is the class's name
    assert ("optimizer_states" in saved) == bool(state) == (not weights_only)
    Net().load_state_dict(weights, strict=True)


def test_an_fp32_trainers_checkpoint_has_no_state_of_ours(tmp_path):
    train(Net(), None, save_at(tmp_path, 1), max_steps=1)
    assert "LowPrecision" not in torch.load(tmp_path / "step=1.ckpt", weights_only=True)


class AtStart(Callback):
    """A snapshot before the first step."""

    def on_train_start(self, trainer, pl_module):
        self.state = snapshot(trainer, pl_module)


def test_a_checkpoint_opens_at_any_other_level(tmp_path):
    """One run handed from level to level, a step each: weights and moments arrive bit for bit.

    At an MS-AMP level they arrive rounded once to what it stores, and leave it bit for bit.
    """
    chain = [FP32]
    for case in CASES:
        chain += ["bf16_mixed", case] if case != "bf16_mixed" else []
    chain += [FP32, "msamp_o1", "msamp_o2", "msamp_o3", FP32, "msamp_o3", "msamp_o1", FP32]
    path = None
    for step, case in enumerate(chain):
        start, folder = AtStart(), tmp_path / str(step)
        model, run = Net(), trainer(precision(case), start, save_at(folder, 1), max_steps=step + 1)
        run.fit(model, loader(count=200), ckpt_path=path)
        if path is not None:
            saved = torch.load(path, weights_only=True)
            assert_same(start.state["weights"], kept_weights(case, saved["state_dict"]), case)
            assert_same(start.state["optimizers"], kept_states(case, saved["optimizer_states"]), case)
        assert len(model.losses) == 1 and model.losses[0] < 5
        path = folder / f"step={step + 1}.ckpt"


class Reload(Callback):
    """Loads other weights before the second step."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx != 1:
            return
        level = trainer.precision_plugin.level
        other = {name: value.float() + 0.003 for name, value in pl_module.state_dict().items()}
        with pytest.raises(RuntimeError, match=r"would part (inp|head)\.weight from its storage: use assign=False"):
            pl_module.load_state_dict(other, assign=True)
        pl_module.load_state_dict(other)
        half = trainer.precision_plugin.dtype
        for name, param in pl_module.named_parameters():
            master = master_of(param)
            value = kept(level.name, name, other[name])
            if not level.is_low_bit or (value.dtype == torch.float32 and param.dim() > 1):
                assert torch.equal(values_of(master), value)
            elif param.dim() > 1:
                assert master is None and torch.equal(stored(param), value)
            if level.is_low_bit and param.dim() == 1:
                assert param.dtype == torch.float32 and torch.equal(param, value)
            elif param.dtype == half and stored(param).dtype != torch.uint8:
                assert torch.equal(values_of(param), value.to(half))
            else:
                torch.testing.assert_close(param.float(), other[name], rtol=0.07, atol=1e-3)
        self.loaded = other


@pytest.mark.parametrize("case", [*HALF_LEVELS, *(c for c in CASES if "+" in c)])
def test_loading_into_a_converted_model_updates_masters_and_copies(case):
    reload = Reload()
    state = train(Net(optimizer=linear_optimizer(case, 1e-6)), case, reload, max_steps=2).state
    for name, value in reload.loaded.items():  # and training goes on from there
        want = kept(case, name, value).float()
        torch.testing.assert_close(state["weights"][name].float(), want, rtol=0, atol=1e-5)


@pytest.mark.parametrize("case", CASES)
def test_fit_test_and_another_fit(case, tmp_path):
    model = Net()
    best = ModelCheckpoint(tmp_path, monitor="val/loss")
    run = trainer(plugin(case), best, max_epochs=1)
    run.fit(model, loader(), loader())
    fitted = model.state_dict()["mid.weight"].clone()
    [result] = run.test(model, loader(), ckpt_path="best", verbose=False)
    assert result["val/loss"] == pytest.approx(float(run.callback_metrics["val/loss"]))
    assert torch.equal(model.state_dict()["mid.weight"], fitted)
    [validated] = run.validate(model, loader(), verbose=False)
    assert validated["val/loss"] == result["val/loss"]
    outputs = run.predict(model, loader())
    assert len(outputs) == 4 and outputs[0].dtype == plugin(case).dtype
    run.fit_loop.max_epochs = 2
    run.fit(model, loader(), loader())
    assert len(model.losses) == 8
    assert not torch.equal(model.state_dict()["mid.weight"], fitted)


@pytest.mark.parametrize("case", CASES)
def test_validation_and_prediction_alone_leave_the_weights(case):
    model = Net()
    start = copy.deepcopy(model.state_dict())
    trainer(plugin(case)).validate(model, loader(), verbose=False)
    assert_same(dict(model.state_dict()), dict(start))
    outputs = trainer(plugin(case)).predict(model, loader())
    assert_same(dict(model.state_dict()), dict(start))
    want = torch.cat([model(batch["x"]) for batch in loader()]).detach()
    assert (torch.cat(outputs).float() - want).norm() < 0.3 * want.norm()


def test_another_level_on_the_same_model():
    model = Net()
    weights = None
    for case in [*CASES, FP32]:
        start = AtStart()
        trainer(precision(case), start, max_steps=1).fit(model, loader())
        if weights is not None:
            assert_same(start.state["weights"], kept_weights(case, weights), case)
        weights = {name: value.clone() for name, value in model.state_dict().items()}
    assert len(model.losses) == len(CASES) + 1


@pytest.mark.parametrize("case", CASES)
def test_one_plugin_in_two_trainers(case):
    shared, model = plugin(case), Net()
    train(model, shared, max_steps=2)
    train(model, shared, max_steps=1)
    assert len(model.losses) == 3
    # Another model starts as with a new plugin.
    observed, fresh = train(Net(), shared, max_steps=2), train(Net(), case, max_steps=2)
    assert_same(observed.state, fresh.state)


class CopiesItself(Callback):
    """Keeps a deep copy of the model, as hand-made averages do."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.copy = copy.deepcopy(pl_module)
        # Copies are plain FP32, of the exact values.
        self.want = pl_module.state_dict()["mid.weight"].float().clone()
        with torch.no_grad(), torch.autocast("cpu", trainer.precision_plugin.dtype):
            self.outputs = pl_module.eval()(batch["x"]), self.copy.eval()(batch["x"])
        pl_module.train()


@pytest.mark.parametrize("case", CASES)
def test_a_deep_copy_is_a_model_of_its_own(case):
    copies = CopiesItself()
    observed = train(Net(), case, copies, max_steps=1)
    ours, theirs = copies.outputs
    if case == "msamp_o3":  # whose weights have power-of-two scales, and the copy's operands have not
        assert (ours - theirs).norm() <= 0.1 * ours.norm()
    elif level_of(case).has_half_weights and not is_low_bit(case):  # half weights, and the copy's are exact
        assert (ours - theirs).norm() <= 0.05 * ours.norm()
    else:
        assert torch.equal(ours, theirs)
    copied = copies.copy
    assert torch.equal(stored(copied.mid.weight), copies.want)
    saved = observed.state["weights"]["mid.weight"].float()
    assert_same(saved, observed.trainer.lightning_module.state_dict()["mid.weight"])
    train(copied, case, max_steps=1)
    assert len(copied.losses) == 2 and all(p.dtype == torch.float32 for p in copied.parameters())
    assert torch.isfinite(copied.mid.weight).all()


def test_a_checkpoint_of_another_model_is_an_error(tmp_path):
    class Other(Net):
        def __init__(self):
            super().__init__()
            self.mid = torch.nn.Linear(128, 64, bias=False)

    train(Net(), "bf16_mixed", save_at(tmp_path, 1), max_steps=1)
    path = tmp_path / "step=1.ckpt"
    content = path.read_bytes()
    model = Other()
    with pytest.raises(RuntimeError, match=r"size mismatch for mid\.weight"):
        train(model, "bf16_with_fp8_mixed", ckpt=path, max_steps=2)
    assert not model.losses and path.read_bytes() == content


def test_a_half_written_checkpoint_is_an_error(tmp_path):
    train(Net(), "bf16_mixed", save_at(tmp_path, 1), max_steps=1)
    path = tmp_path / "step=1.ckpt"
    path.write_bytes(path.read_bytes()[:5000])
    model = Net()
    with pytest.raises(ValueError, match=r"step=1\.ckpt is no complete checkpoint"):
        train(model, "bf16_mixed", ckpt=path, max_steps=2)
    assert not model.losses and len(path.read_bytes()) == 5000


@pytest.mark.parametrize("case", CASES)
def test_a_plugin_can_be_pickled_before_use(case):
    again = pickle.loads(pickle.dumps(plugin(case)))
    assert repr(again) == repr(plugin(case))
    assert_same(train(Net(), again, max_steps=2).state, train(Net(), case, max_steps=2).state)


@pytest.mark.parametrize("case", CASES)
def test_weights_loaded_during_an_evaluation_stay(case):
    other = {name: value + 0.5 for name, value in Net().state_dict().items()}

    class Loads(Net):
        def on_validation_start(self):
            self.load_state_dict(other)

    model = Loads()
    trainer(plugin(case)).validate(model, loader(), verbose=False)
    want = {name: value.float() for name, value in kept_weights(case, other).items()}
    assert_same(dict(model.state_dict()), want)
