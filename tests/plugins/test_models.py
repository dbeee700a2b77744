"""Models with tied, frozen, late and odd parameters, buffers and norms of every kind."""

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import BaseFinetuning, LambdaCallback
from support import (
    CASES,
    MASTER_LEVELS,
    MSAMP_LEVELS,
    Net,
    assert_same,
    is_low_bit,
    kept,
    level_of,
    loader,
    plugin,
    save_at,
    stateful_loader,
    train,
)
from torch import nn

from nemo_lowprec.tensors import Fp8Weight
from nemo_lowprec.weights import master_of


class Watching(Net):
    """Looks at itself in the last training step."""

    def on_before_zero_grad(self, optimizer):
        self.look()

    def look(self):
        raise NotImplementedError


@pytest.mark.parametrize("case", CASES)
def test_tied_weights_stay_tied(case, tmp_path):
    class Tied(Watching):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(32, 128)
            self.head.weight = self.embed.weight
            self.twin = nn.Linear(128, 128, bias=False)
            self.twin.weight = self.mid.weight
            self.seen = 0

        def forward(self, x):
            ids = x.argmax(-1)
            return self.head(self.twin(self.middle(self.inp(x))) + self.embed(ids))

        def look(self):
            assert self.head.weight is self.embed.weight and self.twin.weight is self.mid.weight
            self.seen += 1

    model, again = Tied(), Tied()
    observed = train(model, case, save_at(tmp_path, 2), max_steps=2)
    assert model.seen
    assert model.head.weight is model.embed.weight and model.twin.weight is model.mid.weight
    weights = torch.load(tmp_path / "step=2.ckpt", weights_only=True)["state_dict"]
    assert torch.equal(weights["head.weight"], weights["embed.weight"])
    assert not torch.equal(weights["head.weight"], kept(case, "head.weight", Tied().head.weight.detach()))
    resumed = train(again, case, ckpt=tmp_path / "step=2.ckpt", max_steps=3)
    assert again.head.weight is again.embed.weight and len(again.losses) == 1
    assert len(resumed.state["optimizers"][0]["state"]) == len(observed.state["optimizers"][0]["state"]) == 7


@pytest.mark.parametrize("case", CASES)
def test_buffers_and_batch_norm_stay_fp32(case):
    class Buffers(Watching):
        def __init__(self):
            super().__init__()
            self.batch_norm = nn.BatchNorm1d(128)
            self.register_buffer("shift", torch.full((32,), 0.1))
            self.register_buffer("count", torch.zeros(3, dtype=torch.int64))

        def forward(self, x):
            self.count += 1
            return self.head(self.batch_norm(self.middle(self.inp(x + self.shift))))

        def look(self):
            self.dtypes = {n: b.dtype for n, b in self.named_buffers()}
            self.norm_dtype = self.batch_norm.weight.dtype

    model = Buffers()
    state = train(model, case, data=(loader(), loader()), max_steps=4).state["weights"]
    assert model.dtypes.pop("count") == model.dtypes.pop("batch_norm.num_batches_tracked") == torch.int64
    assert set(model.dtypes.values()) == {torch.float32} and model.norm_dtype == torch.float32
    assert state["count"].tolist() == [4 + 4] * 3
    assert state["batch_norm.running_mean"].abs().sum() > 0
    assert not torch.equal(state["batch_norm.weight"], torch.ones(128))


@pytest.mark.parametrize("case", CASES)
def test_frozen_parameters_stay_put(case):
    class Frozen(Net):
        def __init__(self):
            super().__init__()
            self.mid.requires_grad_(False)
            self.norm.requires_grad_(False)

    state = train(Frozen(), case, max_steps=2).state
    start = Net().state_dict()
    weights = state["weights"].items()
    case = case.replace("o3", "o2")  # a frozen weight is FP16 there, too
    same = {name.split(".")[0] for name, value in weights if torch.equal(value, kept(case, name, start[name]))}
    assert same == {"mid", "norm"}


@pytest.mark.parametrize("case", CASES)
def test_parameters_of_odd_dtypes(case):
    """Parameters that came in bf16 train; complex and integer ones keep their dtype and value.

    MS-AMP levels refuse the complex one by name.
    """

    class Odd(Watching):
        def __init__(self, real=False):
            super().__init__()
            self.inp.to(torch.bfloat16)
            self.gain = nn.Parameter(torch.ones(32, dtype=torch.bfloat16))
            dtype = torch.float32 if real else torch.complex64
            self.phase = nn.Parameter(torch.ones(4, dtype=dtype), requires_grad=False)
            self.ids = nn.Parameter(torch.arange(4), requires_grad=False)

        def forward(self, x):
            return super().forward(x) * self.gain

        def look(self):
            self.dtypes = self.phase.dtype, self.ids.dtype

    if is_low_bit(case):
        refused = Odd()
        with pytest.raises(ValueError, match=r"phase is complex, which has no low-bit form"):
            train(refused, case)
        assert not refused.losses and refused.inp.weight.dtype == torch.bfloat16
    model, start = Odd(is_low_bit(case)), Odd(is_low_bit(case)).state_dict()
    state = train(model, case, max_steps=2).state["weights"]
    assert model.dtypes == (start["phase"].dtype, torch.int64)
    assert torch.equal(state["phase"], start["phase"]) and torch.equal(state["ids"], start["ids"])
    for name in ("gain", "inp.weight", "mid.weight"):
        assert torch.isfinite(state[name]).all(), name
        assert not torch.equal(state[name], kept(case, name, start[name])), name


@pytest.mark.parametrize("case", CASES)
def test_attributes_and_hooks_of_parameters_and_modules_stay(case):
    class Marked(Watching):
        def __init__(self):
            super().__init__()
            self.calls = []
            for module in (self.mid, self.head, self.norm):
                module.weight.mark = "kept"
                module.note = "kept"
                module.register_forward_hook(lambda m, a, out: self.calls.append("forward"))
            self.mid.weight.register_hook(lambda grad: self.calls.append("grad"))
            self.mid.weight.register_post_accumulate_grad_hook(lambda param: self.calls.append("accumulated"))

        def look(self):
            for module in (self.mid, self.head, self.norm):
                assert module.weight.mark == module.note == "kept"
            assert isinstance(self.mid, nn.Linear)

    model = Marked()
    mid = model.mid
    train(model, case, max_steps=2)
    train(model, case, max_steps=1)
    assert model.calls.count("forward") == 3 * 3 and model.calls.count("grad") == 3
    assert model.calls.count("accumulated") == 3
    assert model.mid is mid and mid.weight.mark == mid.note == "kept"
    assert type(mid) is nn.Linear and type(mid.weight) is nn.Parameter and mid.weight.dtype == torch.float32


class Unfreeze(BaseFinetuning):
    """Trains the middle from the second epoch on, in a parameter group of its own."""

    def freeze_before_training(self, pl_module):
        self.freeze([pl_module.mid, pl_module.extra], train_bn=False)

    def finetune_function(self, pl_module, epoch, optimizer):
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.mid, optimizer, lr=1e-2, initial_denom_lr=1.0)


class Finetuned(Net):
    """A batch norm is frozen with its neighbours, and ``extra`` is never trained."""

    def __init__(self):
        super().__init__(dropout=0.1)
        self.extra = nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32))
        self.per_epoch = []

    def forward(self, x):
        return super().forward(self.extra(x))

    def configure_optimizers(self):
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)

    def on_train_epoch_end(self):
        self.per_epoch.append({k: v.clone() for k, v in self.state_dict().items()})


@pytest.mark.parametrize("case", CASES)
def test_base_finetuning_unfreezes_in_mid_training_and_resumes(case, tmp_path):
    start = Finetuned().state_dict()
    model = Finetuned()
    whole = train(model, case, Unfreeze(), data=stateful_loader(8), max_epochs=2)
    first, second = model.per_epoch
    # A frozen weight is FP16 at O3, too.
    start = {name: kept(case.replace("o3", "o2"), name, value) for name, value in start.items()}
    assert torch.equal(first["mid.weight"], start["mid.weight"])
    assert not torch.equal(second["mid.weight"].float(), start["mid.weight"].float())
    assert torch.equal(second["extra.0.weight"], start["extra.0.weight"])
    [optimizer] = whole.trainer.optimizers
    assert [len(g["params"]) for g in optimizer.param_groups] == [6, 1]
    assert optimizer.param_groups[1]["params"][0] is model.mid.weight

    # Saved before it unfreezes: Lightning's callback does not remember afterwards which parameters train.
    train(Finetuned(), case, Unfreeze(), save_at(tmp_path, 1), data=stateful_loader(8), max_epochs=2)
    saved = tmp_path / "step=1.ckpt"
    resumed = train(Finetuned(), case, Unfreeze(), data=stateful_loader(8), ckpt=saved, max_epochs=2)
    assert_same(resumed.state, whole.state)


@pytest.mark.parametrize("case", ["bf16_mixed", "bf16_with_fp8_mixed+fp8_params", "fp16_amp", *MSAMP_LEVELS])
def test_targets_and_inputs_are_not_cast(case):
    class Regression(Net):
        def loss(self, batch):
            assert batch["x"].dtype == torch.float32
            out = self(batch["x"])
            assert out.dtype == level_dtype
            return F.mse_loss(out, batch["x"] + 1e-4)

    level_dtype = torch.float16 if level_of(case).autocast == "fp16" else torch.bfloat16
    model = Regression()
    train(model, case, max_steps=3)
    assert model.losses[-1] < model.losses[0]


@pytest.mark.parametrize("case", [*MASTER_LEVELS, *(c for c in CASES if "+" in c)])
def test_memory_of_copies_and_masters(case):
    class Measured(Watching):
        def look(self):
            stored, plain = 0, 0
            for param in self.parameters():
                master = master_of(param)
                self.master_bytes = getattr(self, "master_bytes", 0) + master.nbytes
                if isinstance(param, Fp8Weight):
                    assert param.data_fp8.nbytes == param.numel() and param.scale_inv.nbytes == 4
                    stored += param.numel()
                else:
                    assert param.element_size() == 2
                    plain += param.numel()
            self.counts = stored, plain
            assert self.master_bytes == 4 * (stored + plain)

    model = Measured()
    train(model, case, max_steps=1)
    total = sum(p.numel() for p in model.parameters())
    assert model.counts == ((128 * 32 + 128 * 128, total - 128 * 32 - 128 * 128) if "+" in case else (0, total))


@pytest.mark.parametrize("case", MSAMP_LEVELS)
def test_memory_without_fp32_masters(case):
    """Bytes of matrices; blocks of 128 elements take a byte more each, and vectors stay FP32."""

    class Measured(Watching):
        def on_after_backward(self):
            self.gradients = [p.grad.stored_bytes() for p in self.matrices()]

        def matrices(self):
            return [self.inp.weight, self.mid.weight, self.head.weight]

        def look(self):
            weights = [p.stored_bytes() for p in self.matrices()]
            masters = [master_of(p) for p in self.matrices()]
            self.bytes = weights, [0 if m is None else m.stored_bytes() for m in masters]
            vectors = [self.inp.bias, self.norm.weight, self.norm.bias, self.head.bias]
            assert all(type(p) is nn.Parameter and p.dtype == torch.float32 for p in vectors)
            self.states = self.trainer.optimizers[0].state

    model = Measured()

    def end(trainer, module):
        states = [[model.states[p][k] for k in ("exp_avg", "exp_avg_sq")] for p in model.matrices()]
        model.state_bytes = [sum(getattr(s, "stored_bytes", lambda s=s: s.nbytes)() for s in pair) for pair in states]

    train(model, case, LambdaCallback(on_train_batch_end=lambda t, m, *a: end(t, m)), max_steps=1)
    sizes, blocks = [128 * 32, 128 * 128, 32 * 128], [128, 128, 32]
    fp8 = [case == "msamp_o3"] * 2 + [False]
    weights, masters = model.bytes
    assert weights == [n + 4 if low else 2 * n for n, low in zip(sizes, fp8, strict=True)]
    assert masters == [2 * n + b if low else 0 for n, b, low in zip(sizes, blocks, fp8, strict=True)]
    assert model.gradients == [n + b + 8 for n, b in zip(sizes, blocks, strict=True)]
    wide = case == "msamp_o1"
    assert model.state_bytes == [8 * n if wide else 3 * n + 2 * b for n, b in zip(sizes, blocks, strict=True)]


@pytest.mark.parametrize("case", ["bf16_mixed", "bf16_with_fp8_mixed", *MSAMP_LEVELS])
def test_a_compiled_model_trains_as_the_plain_one(case):
    compiled = torch.compile(Net(), backend="aot_eager")
    observed = train(compiled, case, max_steps=2)
    plain = train(Net(), case, max_steps=2)
    assert observed.state["weights"].keys() == plain.state["weights"].keys()
    for name, value in plain.state["weights"].items():
        torch.testing.assert_close(observed.state["weights"][name], value, rtol=0, atol=2e-3)


def test_a_parameter_frozen_between_backward_and_step_is_still_written_back():
    class FreezesLate(Net):
        def on_before_optimizer_step(self, optimizer):
            self.mid.weight.requires_grad_(False)

    state = train(FreezesLate(), plugin("bf16_mixed"), max_steps=1).state
    assert torch.equal(state["copies"]["mid.weight"], state["masters"]["mid.weight"].bfloat16())


@pytest.mark.parametrize("case", CASES)
def test_an_exception_in_a_step_leaves_a_model_that_trains_on(case):
    class Breaks(Net):
        fine = False

        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            if batch_idx == 1 and not self.fine:
                raise ArithmeticError("broken off")
            return loss

    model = Breaks()
    with pytest.raises(ArithmeticError, match="broken off"):
        train(model, case)
    assert all(p.dtype == torch.float32 and type(p) is nn.Parameter for p in model.parameters())
    model.fine = True
    before = model.mid.weight.detach().clone()
    train(model, case, max_steps=2)
    assert not torch.equal(model.mid.weight, before)
