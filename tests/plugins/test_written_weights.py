"""Weights that somebody else than the optimizer writes: what was written is trained on, saved and given back."""

import copy

import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, StochasticWeightAveraging, WeightAveraging
from support import CASES, Net, is_low_bit, kept, level_of, loader, train, values_of
from torch import nn
from torch.nn.utils import parameters_to_vector, prune, vector_to_parameters

import nemo_lowprec

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


# Other ways to write, and to read


def by_foreach(module, value):
    weight = module.mid.weight
    with torch.no_grad():
        torch._foreach_zero_([weight])
        torch._foreach_add_([weight], [value.to(weight.dtype)])


def by_rows(module, value):
    with torch.no_grad():
        for i in range(128):
            module.mid.weight[i] = value[i].to(module.mid.weight.dtype)


def after_a_swap(module, value):
    """Averages take the weights' places for an evaluation, and leave them."""
    in_place(module, value)
    weights = {name: param.data for name, param in module.named_parameters()}
    for param in module.parameters():
        param.data = torch.zeros_like(param.data)
    for name, param in module.named_parameters():
        param.data = weights[name]


def and_cast(module, value):
    in_place(module, value)
    module.float()


def by_a_parametrization(module, value):
    in_place(module, value)
    nn.utils.parametrizations.weight_norm(module.mid)
    nn.utils.parametrize.remove_parametrizations(module.mid, "weight")


def by_tying(module, value):
    with torch.no_grad():
        module.other.weight.copy_(value)
    module.mid.weight = module.other.weight


def by_a_new_parameter(module, value):
    module.mid.weight = nn.Parameter(value.to(module.mid.weight.dtype))


def by_loading_a_part(module, value):
    module.mid.load_state_dict({"weight": value})


def by_the_saved_tensor(module, value):
    module.state_dict()["mid.weight"].copy_(value)


MORE = [by_foreach, by_rows, after_a_swap, and_cast, by_a_parametrization, by_tying, by_a_new_parameter,
        by_loading_a_part, by_the_saved_tensor]  # fmt: skip


class WritesOtherwise(Writes):
    def __init__(self, write, at_the_end):
        super().__init__(write, at_the_end)
        self.other = nn.Linear(128, 128, bias=False)

    def on_train_end(self):
        super().on_train_end()
        x = torch.randn(16, 128, generator=torch.Generator().manual_seed(1))
        with torch.no_grad(), self.trainer.precision_plugin.forward_context():
            out = self.mid(x).float()
        self.error = float((out - x @ self.want.t()).norm() / (x @ self.want.t()).norm())


@pytest.mark.parametrize("case", CASES)
def test_other_ways_to_write(case):
    for i, write in enumerate(MORE):
        at_the_end = i % 2 == list(CASES).index(case) % 2  # each is made at either time, and not at every level
        if write is by_the_saved_tensor and level_of(case).master_weight == "fp16":
            continue  # values of blocks, which no plain tensor shares memory with
        model = WritesOtherwise(write, at_the_end)
        train(model, case, max_steps=3)
        for found in (model.saved["mid.weight"], model.mid.weight.detach()):
            if write is by_a_parametrization:  # computed from norm and direction, in half
                torch.testing.assert_close(found.float(), model.want, rtol=2**-6, atol=1e-3)
            else:
                assert_close(found, model.want, write, case)
        assert model.error < (0.2 if level_of(case).compute == "nvfp4" else 0.08), (write.__name__, model.error)


@pytest.mark.parametrize("case", [case for case in HALF if not is_low_bit(case)])
def test_casting_a_model_in_training_keeps_its_masters(case):
    class Casts(Net):
        def on_train_batch_start(self, batch, batch_idx):
            if batch_idx == 2:
                before = {name: value.clone() for name, value in self.state_dict().items()}
                self.float()
                after = self.state_dict()
                assert all(torch.equal(before[name], after[name]) for name in before)

        def on_train_end(self):
            self.kinds = {p.dtype for p in self.parameters()}

    model = Casts()
    train(model, case, max_steps=4)
    assert torch.float32 not in model.kinds


@pytest.mark.parametrize("case", [case for case in HALF if not is_low_bit(case)])
def test_a_few_elements_that_are_written_through_data_are_found_where_they_are_written_always(case):
    class Masks(Net):
        def on_train_batch_start(self, batch, batch_idx):
            self.inp.weight.data[0, 0] = 0.5

    with pytest.raises(RuntimeError, match=r"inp\.weight was written in place through \.data"):
        train(Masks(), case.partition("+")[0], max_steps=4)


@pytest.mark.parametrize("case", [case for case in HALF if not isinstance_stored(case)])
def test_a_hook_that_writes_behind_a_step_is_told(case):
    class Hooks(Net):
        def on_train_start(self):
            def clamp(*_):
                with torch.no_grad():
                    self.inp.bias.clamp_(-0.01, 0.01)

            self.trainer.optimizers[0].register_step_pre_hook(clamp)

    with pytest.raises(RuntimeError, match=r"inp\.bias was written while its optimizer stepped"):
        train(Hooks(), case, max_steps=2)


@pytest.mark.parametrize("case", CASES)
def test_a_layer_that_gets_a_parametrization_in_training_is_saved_exactly_and_given_back(case):
    class Double(nn.Module):
        def forward(self, weight):
            return 2 * weight

    class Gets(Net):
        def on_train_batch_start(self, batch, batch_idx):
            if batch_idx == 1:
                self.before = self.state_dict()["mid.weight"].clone()
                nn.utils.parametrize.register_parametrization(self.mid, "weight", Double())

        def on_train_end(self):
            self.saved = self.state_dict()
            self.load_state_dict({name: value.clone() for name, value in self.saved.items()})

    model = Gets(optimizer=still)
    train(model, case, max_steps=3)
    name = "mid.parametrizations.weight.original"
    assert type(model.saved[name]) is torch.Tensor
    assert torch.equal(model.saved[name], model.before)
    assert torch.equal(model.mid.parametrizations.weight.original.float(), model.before.float())
    assert torch.equal(model.mid.weight, 2 * model.mid.parametrizations.weight.original)
    assert type(model.mid).__bases__ == (nn.Linear,) and type(model.inp) is nn.Linear
    model(loader().dataset.x)
    nn.utils.parametrize.remove_parametrizations(model.mid, "weight")
    assert type(model.mid) is nn.Linear


@pytest.mark.parametrize("case", HALF)
def test_parameters_in_one_memory_are_refused(case):
    model = Net()
    model.other = nn.Linear(128, 128, bias=False)
    model.other.weight.data = model.mid.weight.data
    with pytest.raises(ValueError, match=r"\.weight are two parameters in one memory"):
        train(model, case, max_steps=1)
    columns = torch.randn(128, 256)
    model.mid.weight.data, model.other.weight.data = columns[:, :128], columns[:, 128:]
    train(model, case, max_steps=1)


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_arrays_of_weights_are_copies_that_nobody_writes_in_vain(level):
    model, _ = nemo_lowprec.initialize(Net(), opt_level=level)
    weight = model.mid.weight.detach()
    array = weight.numpy()
    assert torch.equal(torch.tensor(array), weight.float())
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 1
    assert torch.equal(torch.from_dlpack(weight), weight.float())


@pytest.mark.parametrize("case", HALF)
def test_loading_by_swapping_tensors_is_refused(case):
    class Loads(Net):
        def on_train_start(self):
            torch.__future__.set_swap_module_params_on_conversion(True)
            try:
                self.load_state_dict(self.state_dict())
            finally:
                torch.__future__.set_swap_module_params_on_conversion(False)

    with pytest.raises(RuntimeError, match="set it to False for load_state_dict"):
        train(Loads(), case, max_steps=1)
