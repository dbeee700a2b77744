"""Weights that somebody else than the optimizer writes: what was written is trained on, saved and given back."""

import copy

import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, StochasticWeightAveraging, WeightAveraging
from support import CASES, Net, is_low_bit, kept, level_of, loader, train, values_of
from torch import nn
from torch.nn.utils import parameters_to_vector, prune, vector_to_parameters

HALF = [case for case in CASES if level_of(case).has_half_weights]


def still(params):
    """An optimizer whose step changes nothing."""
    return torch.optim.AdamW(params, lr=0.0, weight_decay=0.0)


def through_data(module, value):
    module.mid.weight.data = value.to(module.mid.weight.dtype)


def in_place(module, value):
    with torch.no_grad():
        module.mid.weight.copy_(value)


def by_a_vector(module, value):
    with torch.no_grad():
        flat = parameters_to_vector(module.mid.parameters())
        assert flat.shape == (value.numel(),)
        vector_to_parameters(value.reshape(-1), module.mid.parameters())


def added(module, value):
    with torch.no_grad():
        module.mid.weight.add_(value - module.state_dict()["mid.weight"].to(value))


def added_to_data(module, value):
    weight = module.mid.weight
    weight.data += (value - module.state_dict()["mid.weight"].to(value)).to(weight.dtype)


def initialized(module, value):
    torch.manual_seed(3)
    nn.init.xavier_uniform_(module.mid.weight)
    module.want = module.mid.weight.detach().float().clone()


WRITES = [in_place, added, by_a_vector, through_data, added_to_data, initialized]


def wanted():
    """Values that every format of weights holds: FP8 has three bits."""
    torch.manual_seed(3)
    return torch.randn(128, 128).sign() * 2.0 ** torch.randint(-6, -2, (128, 128))


def assert_close(found, want, write, case):
    """Exact where values were set; sums are rounded to what the weight is stored in, or reads as."""
    half = level_of(case).has_half_weights and not isinstance_stored(case)  # a master may keep more bits
    step = 2**-3 if write is initialized else 2**-7 if write in (added, added_to_data) else 2**-8 if half else 0
    torch.testing.assert_close(found.float(), want, rtol=step, atol=step / 64)


class Writes(Net):
    """Writes a weight once, before a step that changes nothing or at the end of training."""

    def __init__(self, write, at_the_end):
        super().__init__(optimizer=still)
        self.write, self.at_the_end, self.want = write, at_the_end, wanted()

    def on_train_batch_start(self, batch, batch_idx):
        if batch_idx == 1 and not self.at_the_end:
            self.write(self, self.want)

    def on_train_end(self):
        if self.at_the_end:
            self.write(self, self.want)
        self.saved = {name: value.clone() for name, value in self.state_dict().items()}


@pytest.mark.parametrize("write", WRITES, ids=lambda write: write.__name__)
@pytest.mark.parametrize("at_the_end", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_what_was_written_is_trained_on_saved_and_given_back(case, at_the_end, write):
    model = Writes(write, at_the_end)
    if write is added_to_data and not at_the_end and level_of(case).has_half_weights and not isinstance_stored(case):
        with pytest.raises(RuntimeError, match=r"mid\.weight was written in place through \.data"):
            train(model, case, max_steps=3)
        return
    train(model, case, max_steps=3)
    assert_close(model.saved["mid.weight"], model.want, write, case)
    assert_close(model.mid.weight.detach(), model.want, write, case)


def isinstance_stored(case):
    """Whether a converted weight is of a class of ours, which sees what is written through ``.data``."""
    return is_low_bit(case) or case.endswith("fp8_params")


@pytest.mark.parametrize("case", CASES)
def test_a_write_that_leaves_some_values_keeps_their_bits(case):
    class Clamps(Net):
        def on_train_end(self):
            before = self.state_dict()["mid.weight"].float().clone()
            with torch.no_grad():
                self.mid.weight.clamp_(-0.05, 0.05)
            after = self.state_dict()["mid.weight"].float()
            self.outside = before.abs() > 0.0505
            assert self.outside.any() and after.abs().max() < 0.0502
            left = before.abs() < 0.0495
            assert torch.equal(after[left], before[left])

    model = Clamps()
    train(model, case, max_steps=2)
    assert model.mid.weight.abs().max() < 0.0502 and hasattr(model, "outside")


@pytest.mark.parametrize("case", CASES)
def test_a_pruned_weight_stays_pruned(case):
    class Pruned(Net):
        def on_train_start(self):
            prune.random_unstructured(self.mid, "weight", amount=0.5)
            self.mask = self.mid.weight_mask.bool()

        def on_train_end(self):
            prune.remove(self.mid, "weight")
            assert not self.state_dict()["mid.weight"][~self.mask].any()

    model = Pruned()
    train(model, case, max_steps=2)
    assert not model.mid.weight[~model.mask].any() and model.mid.weight[model.mask].all()


@pytest.mark.parametrize("case", HALF)
def test_weights_that_clip_themselves_every_step(case):
    class Critic(Net):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            with torch.no_grad():
                for param in self.parameters():
                    param.clamp_(-0.05, 0.05)

    model = Critic()
    train(model, case, max_steps=6)
    assert max(float(p.abs().max()) for p in model.parameters()) <= 0.0502


# Averages


class Average(WeightAveraging):
    """Of every step, kept beside the masters that it was made of."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        self.seen = [*getattr(self, "seen", []), pl_module.state_dict()["mid.weight"].float().clone()]


@pytest.mark.parametrize("case", CASES)
def test_an_average_is_of_the_exact_weights(case):
    average = Average()
    model = Net(optimizer=lambda params: torch.optim.AdamW(params, lr=1e-4))
    train(model, case, average, data=(loader(), loader()), max_epochs=2)
    want = torch.stack(average.seen).mean(0)
    found = model.mid.weight.detach()
    torch.testing.assert_close(found, kept(case, "mid.weight", want).float(), rtol=2**-10, atol=2**-24)
    assert not torch.equal(model.mid.weight, average.seen[-1])


@pytest.mark.parametrize("case", CASES)
def test_swa_and_ema_train_and_validate(case):
    for average in (StochasticWeightAveraging(1e-3, swa_epoch_start=1), EMAWeightAveraging(decay=0.999)):
        model = Net()
        fit = train(model, case, average, data=(loader(), loader()), max_epochs=3).trainer
        assert len(model.losses) == 12 and fit.callback_metrics["val/loss"].isfinite()
        means = average._average_model
        means = means.module if hasattr(means, "module") else means
        assert all(p.dtype == torch.float32 for p in means.parameters())
        a, b = model.mid.weight.detach(), means.mid.weight.detach()
        torch.testing.assert_close(kept(case, "mid.weight", a).float(), kept(case, "mid.weight", b).float())


@pytest.mark.parametrize("case", HALF)
def test_an_average_by_hand_within_the_model_moves(case):
    class Teacher(Net):
        def __init__(self):
            super().__init__(optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3))
            self.teacher = copy.deepcopy(nn.Sequential(self.mid)).requires_grad_(False)
            self.want = self.teacher[0].weight.clone().double()

        def on_train_batch_end(self, outputs, batch, batch_idx):
            with torch.no_grad():
                self.teacher[0].weight.lerp_(values_of(self.mid.weight).to(self.teacher[0].weight), 0.001)
            self.want.lerp_(values_of(self.mid.weight).double(), 0.001)
            self.teacher(batch["x"].new_zeros(1, 128))

    model = Teacher()
    start = model.teacher[0].weight.clone()
    train(model, case, max_epochs=4)
    found = model.teacher[0].weight
    moved, far = (model.want - start).norm(), (found - model.want).norm()
    assert moved > 0 and far < 0.3 * moved + 2**-11 * start.norm()


# Frozen weights


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("case", HALF)
def test_frozen_weights_have_no_masters_and_come_back_as_they_came(case, dtype):
    class Frozen(Net):
        def __init__(self):
            super().__init__(optimizer=lambda params: torch.optim.AdamW([p for p in params if p.requires_grad]))
            self.mid.to(dtype).requires_grad_(False)

        def on_train_end(self):
            self.saved = self.state_dict()["mid.weight"].clone()
            weight = self.mid.weight
            self.bytes = weight.stored_bytes() if hasattr(weight, "stored_bytes") else weight.nbytes

    rounding = {"rtol": 2**-11, "atol": 2**-25} if is_low_bit(case) else {"rtol": 0, "atol": 0}
    model = Frozen()
    want = model.mid.weight.detach().clone()
    train(model, case, max_steps=3)
    assert model.bytes <= 2 * want.numel() + 4
    assert model.saved.dtype == (torch.float16 if is_low_bit(case) and dtype == torch.float32 else dtype)
    torch.testing.assert_close(model.saved.float(), want.float(), **rounding)
    assert model.mid.weight.dtype == (torch.float32 if dtype == torch.float32 else dtype)
    torch.testing.assert_close(model.mid.weight.float(), want.float(), **rounding)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("case", HALF)
def test_weights_that_are_unfrozen_train_as_any(case, dtype):
    class Thaws(Net):
        def __init__(self):
            super().__init__(optimizer=lambda params: torch.optim.AdamW(params, lr=1e-4))
            self.mid.to(dtype).requires_grad_(False)

        def on_train_batch_start(self, batch, batch_idx):
            if batch_idx == 1:
                self.mid.requires_grad_(True)

    model = Thaws()
    start = model.mid.weight.detach().float().clone()
    observed = train(model, case, max_steps=4)
    moved = (model.mid.weight.float() - start).abs()
    # Updates of 1e-4 are lost in BF16 weights of 0.1, and not in masters.
    assert (moved > 0).float().mean() > 0.9 and moved.max() < 5e-4
    assert observed.grads[1]["mid.weight"].any()
