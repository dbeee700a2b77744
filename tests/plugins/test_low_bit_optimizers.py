"""SGD, Lion and Muon under the Trainer, at the MS-AMP levels and at levels with FP32 masters."""

import pytest
import torch
from support import MSAMP_LEVELS, Net, assert_same, plugin, save_at, stateful_loader, train
from torch import optim

from nemo_lowprec.models import muon_groups
from nemo_lowprec.optim import Lion, LowBitStates, Muon
from nemo_lowprec.report import Audit
from nemo_lowprec.tensors import BlockScaledTensor


class Optimized(Net):
    """Trained by an optimizer that is made of the model."""

    def __init__(self, make, **options):
        super().__init__(**options)
        self.make = make
        self.held = None

    def configure_optimizers(self):
        self.held = self.make(self)
        return self.held


class Two(Optimized):
    """Manual optimization with torch's Muon for matrices and torch's AdamW for the rest."""

    automatic_optimization = False

    def configure_optimizers(self):
        groups = muon_groups(self)
        rest = [p for group in groups[1:] for p in group["params"]]
        return optim.Muon(groups[0]["params"], 1e-2), optim.AdamW(rest, 1e-2)

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        both = self.optimizers()
        for optimizer in both:
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in both:
            optimizer.step()


MODELS = {
    "sgd": lambda: Optimized(lambda m: optim.SGD(m.parameters(), 0.05, momentum=0.9, nesterov=True)),
    "lion": lambda: Optimized(lambda m: Lion(m.parameters(), 3e-3, weight_decay=0.1)),
    "muon": lambda: Optimized(lambda m: Muon(muon_groups(m), 1e-2, adamw_lr=1e-2)),
    "muon_and_adamw": lambda: Two(None),
}
FIRST = {"sgd": "momentum_buffer", "lion": "exp_avg"}
LEVELS = [*MSAMP_LEVELS, "msamp_o2+fp16"]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("case", LEVELS)
def test_trains_like_fp32_with_the_states_of_the_row(case, name):
    plain, model = MODELS[name](), MODELS[name]()
    train(plain, None, max_epochs=4)
    kinds = []
    model.on_train_batch_end = lambda *_: kinds.append(
        [
            (p.dim(), type(value) if value.dim() else None, key)
            for o in model.trainer.optimizers
            for p, state in o.state.items()
            for key, value in state.items()
            if key != "step"
        ]
    )
    audit = Audit()
    run = train(model, case, audit, max_epochs=4)
    assert plain.losses[-1] < 0.8 * plain.losses[0]
    assert model.losses == pytest.approx(plain.losses, rel=0.08, abs=0.1)
    low = not case.startswith("msamp_o1")
    assert kinds and all(kinds)
    for dim, kind, _ in kinds[-1]:
        assert kind is (BlockScaledTensor if low and dim > 1 else torch.Tensor)
    assert name == "muon_and_adamw" or audit.report.agrees  # an audit looks at one optimizer's step
    assert not any(isinstance(o, LowBitStates) and o.formats.exp_avg == "fp8" for o in run.trainer.optimizers)


@pytest.mark.parametrize("name", ["sgd", "lion", "muon"])
def test_four_bytes_a_parameter_at_o2(name):
    model = MODELS[name]()
    audit = Audit()
    train(model, "msamp_o2", audit, max_steps=2)
    sizes = {(f.column, f.part): f.bytes_per_param for f in audit.report.findings}
    held = [sizes[column, "converted"] for column in ("Weight", "Weight gradient", "Optimizer states")]
    assert 4 < sum(held) <= 4.2


@pytest.mark.parametrize("name", ["sgd", "lion", "muon"])
@pytest.mark.parametrize(("case", "stochastic"), [("msamp_o1", False), ("msamp_o2", True), ("msamp_o3", False)])
def test_a_run_resumes_bit_for_bit(tmp_path, case, name, stochastic):
    options = {"data": stateful_loader(), "max_steps": 8, "max_epochs": 2}
    at = lambda: plugin(case, stochastic_rounding=stochastic)  # noqa: E731
    whole = train(MODELS[name](), at(), save_at(tmp_path, 4), **options).state
    options["data"] = stateful_loader()
    again = train(MODELS[name](), at(), ckpt=tmp_path / "step=4.ckpt", **options).state
    for part in ("weights", "copies", "masters", "optimizers"):
        assert_same(again[part], whole[part], part)


@pytest.mark.parametrize("name", ["sgd", "lion", "muon"])
def test_levels_may_be_changed_from_checkpoint_to_checkpoint(tmp_path, name):
    """FP32 states into low-bit ones and back; the loss goes on."""
    plain = MODELS[name]()
    train(plain, None, data=stateful_loader(), max_steps=12, max_epochs=3)
    losses, ckpt = [], None
    for i, level in enumerate(["bf16_mixed", "msamp_o2", "msamp_o3", "msamp_o1", "te_fp8", "msamp_o2"]):
        model = MODELS[name]()
        saved = save_at(tmp_path / str(i), 2 * (i + 1))
        train(model, level, saved, data=stateful_loader(), max_steps=2 * (i + 1), max_epochs=3, ckpt=ckpt)
        ckpt = tmp_path / str(i) / f"step={2 * (i + 1)}.ckpt"
        losses += model.losses
    assert losses == pytest.approx(plain.losses, rel=0.08, abs=0.05)


@pytest.mark.parametrize("name", ["lion", "muon"])
@pytest.mark.parametrize("case", ["te_fp8", "bf16_mixed", "fp16_mixed", "bf16_with_fp8_mixed+fp8_params"])
def test_own_optimizers_step_fp32_masters(case, name):
    model, plain = MODELS[name](), MODELS[name]()
    run = train(model, case, max_steps=3)
    optimizer = plain.configure_optimizers()
    for grads in run.grads:
        for key, param in plain.named_parameters():
            param.grad = grads[key]
        optimizer.step()
    exact = run.state["masters"] or run.state["weights"]
    for key, param in plain.named_parameters():
        assert torch.equal(exact[key], param), key
    found = [v for s in run.state["optimizers"][0]["state"].values() for v in s.values()]
    assert {v.dtype for v in found} == {torch.float32}


@pytest.mark.parametrize("name", ["sgd", "lion", "muon"])
def test_gradient_release_and_accumulation_and_clipping(name):
    released = train(MODELS[name](), plugin("msamp_o2", gradient_release=True), max_steps=4).state
    kept = train(MODELS[name](), "msamp_o2", max_steps=4).state
    for key, value in kept["weights"].items():
        torch.testing.assert_close(released["weights"][key].float(), value.float(), rtol=0, atol=5e-4)
    model = MODELS[name]()
    train(model, "msamp_o2", max_epochs=4, accumulate_grad_batches=2, gradient_clip_val=0.5)
    assert model.losses[-1] < model.losses[0]


@pytest.mark.parametrize("case", MSAMP_LEVELS)
def test_a_vector_in_a_muon_group_is_refused_before_anything_changes(case):
    model = Optimized(lambda m: Muon(m.parameters()))
    with pytest.raises(ValueError, match=r"Muon group holds a parameter of shape \(128,\).*muon_groups"):
        train(model, case)
    assert not model.losses
