"""Any torch optimizer that takes dense gradients steps on FP32 masters and stays the object it was."""

import pytest
import torch
from support import (
    CASES,
    FP16_LEVELS,
    HALF_LEVELS,
    MSAMP_LEVELS,
    Net,
    is_low_bit,
    kept_state,
    level_of,
    loader,
    plugin,
    train,
)
from torch import optim

from nemo_lowprec.weights import master_of


class OddStates(optim.Optimizer):
    """Averages its weights as schedule-free AdamW does, with SOAP's eigenbases: states of other shapes, and numbers.

    Sources: arXiv:2405.15682, arXiv:2409.11321.
    """

    def __init__(self, params, lr=1e-2, every=2):
        super().__init__(params, {"lr": lr, "every": every, "betas": (0.9, 0.95)})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for param in group["params"]:
                if param.grad is None:
                    continue
                state, grad = self.state[param], param.grad
                if not state:
                    state |= {"count": 0, "z": param.detach().clone(), "second": torch.zeros_like(param)}
                    state["grams"] = [torch.zeros(n, n) for n in param.shape] if param.dim() == 2 else []
                    state["bases"] = []
                state["count"] += 1
                for i, gram in enumerate(state["grams"]):
                    gram.lerp_(grad @ grad.T if i == 0 else grad.T @ grad, 1 - beta2)
                if state["count"] % group["every"] == 1:
                    state["bases"] = [torch.linalg.eigh(gram)[1] for gram in state["grams"]]
                turned = state["bases"][0].T @ grad @ state["bases"][1] if state["bases"] else grad
                state["second"].mul_(beta2).addcmul_(turned, turned, value=1 - beta2)
                update = turned / (state["second"] / (1 - beta2 ** state["count"])).sqrt().add(1e-8)
                update = state["bases"][0] @ update @ state["bases"][1].T if state["bases"] else update
                state["z"].sub_(update, alpha=group["lr"])
                param.mul_(beta1).add_(state["z"], alpha=1 - beta1)


OPTIMIZERS = {
    "adamw": lambda p: optim.AdamW(p, lr=1e-2, weight_decay=0.1),
    "adamw_foreach": lambda p: optim.AdamW(p, lr=1e-2, foreach=True),
    "adamw_fused": lambda p: optim.AdamW(p, lr=1e-2, fused=True),
    "adamw_amsgrad": lambda p: optim.AdamW(p, lr=1e-2, amsgrad=True),
    "sgd": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adagrad": lambda p: optim.Adagrad(p, lr=1e-2),
    "adafactor": lambda p: optim.Adafactor(p, lr=1e-2),
    "muon": lambda p: optim.Muon([q for q in p if q.ndim == 2], lr=1e-2),
    "rmsprop": lambda p: optim.RMSprop(p, lr=1e-3, momentum=0.9),
    "nadam": lambda p: optim.NAdam(p, lr=1e-2),
    "radam": lambda p: optim.RAdam(p, lr=1e-2),
    "adamax": lambda p: optim.Adamax(p, lr=1e-2),
    "asgd": lambda p: optim.ASGD(p, lr=1e-1),
    "rprop": lambda p: optim.Rprop(p, lr=1e-3),
    "adadelta": lambda p: optim.Adadelta(p, lr=1.0),
    "odd_states": lambda p: OddStates(p),
}
WITH_LOW_BIT_FORM = ("adamw", "adamw_foreach", "adamw_fused", "sgd", "muon")


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("case", ["bf16_mixed", "fp16_mixed", "bf16_with_fp8_mixed+fp8_params"])
def test_masters_equal_a_loop_in_fp32_bit_for_bit(case, name):
    """The loop steps an FP32 model with the gradients that the plugin showed before each step."""
    run = train(Net(optimizer=OPTIMIZERS[name]), case, max_steps=3)
    by_hand = Net()
    optimizer = OPTIMIZERS[name](by_hand.parameters())
    mine = {p for group in optimizer.param_groups for p in group["params"]}
    for grads in run.grads:
        for param_name, param in by_hand.named_parameters():
            if param in mine:
                param.grad = grads[param_name]
        optimizer.step()
    changed = 0
    for param_name, param in by_hand.named_parameters():
        assert torch.equal(run.state["masters"][param_name], param), param_name
        changed += not torch.equal(param, dict(Net().named_parameters())[param_name])
    assert changed >= 3
    half = torch.float16 if case.startswith("fp16") else torch.bfloat16
    for param_name, copy in run.state["copies"].items():
        if copy.dtype != torch.uint8:
            assert torch.equal(copy, run.state["masters"][param_name].to(half)), param_name
    states = run.state["optimizers"][0]["state"].values()
    floats = [v for s in states for v in s.values() if isinstance(v, torch.Tensor)]
    assert name != "odd_states" or any(s["grams"] and s["count"] == 3 for s in states)
    assert {v.dtype for v in floats} == {torch.float32}


@pytest.mark.parametrize("case", CASES)
def test_optimizer_states_are_fp32(case):
    """At O2 and O3 those of matrices are values of E4M3 and FP16 in blocks, which BF16 and FP32 hold exactly."""
    state = train(Net(), case, max_steps=1).state["optimizers"][0]["state"]
    assert len(state) == 7
    for index, param in enumerate(Net().parameters()):
        for key in ("exp_avg", "exp_avg_sq"):
            value = state[index][key]
            assert torch.equal(value, kept_state(case, key, value)) and value.abs().max() > 0
            low = case in ("msamp_o2", "msamp_o3") and param.dim() > 1
            assert value.dtype == (torch.bfloat16 if low and key == "exp_avg" else torch.float32)


@pytest.mark.parametrize("name", [n for n in OPTIMIZERS if n not in WITH_LOW_BIT_FORM])
@pytest.mark.parametrize("case", MSAMP_LEVELS)
def test_an_optimizer_without_a_low_bit_form_is_refused_before_the_first_step(case, name):
    model = Net(optimizer=OPTIMIZERS[name])
    start = {n: p.detach().clone() for n, p in model.named_parameters()}
    message = (
        "AdamW with amsgrad=True has no low-bit form" if name == "adamw_amsgrad" else "has no low-bit form: the MS"
    )
    with pytest.raises(ValueError, match=message):
        train(model, case)
    assert not model.losses
    for key, param in model.named_parameters():
        assert type(param) is torch.nn.Parameter and param.dtype == torch.float32
        torch.testing.assert_close(param.detach(), start[key], rtol=2**-11, atol=2**-25)


class Closure(Net):
    """Trained by LBFGS; keeps each evaluation's weights."""

    def __init__(self):
        super().__init__(optimizer=lambda p: optim.LBFGS(p, lr=0.5, max_iter=4))
        self.seen = []

    def training_step(self, batch, batch_idx):
        self.seen.append(self.mid.weight.detach().float().clone())
        master = master_of(self.mid.weight)
        if master is not None:
            assert torch.equal(self.mid.weight, master.to(self.mid.weight.dtype))
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("case", ["te_fp8", "bf16_mixed", "bf16_with_fp8_mixed", "bf16_with_fp8_current_scaling_mixed"])
def test_lbfgs_sees_new_weights_at_every_evaluation(case):
    model = Closure()
    train(model, case, data=loader(16), max_epochs=2)
    assert len(model.seen) == 8
    assert all(not torch.equal(a, b) for a, b in zip(model.seen[:4], model.seen[1:4], strict=False))
    assert model.losses[-1] < 0.8 * model.losses[0]


@pytest.mark.parametrize("case", FP16_LEVELS)
def test_lbfgs_is_refused_with_a_loss_scale(case):
    model = Closure()
    with pytest.raises(ValueError, match=r"LBFGS evaluates the loss inside its step.*Use a bf16 level"):
        train(model, case)
    assert not model.losses


class Hooked(Net):
    """Registers hooks on its optimizer, as profilers and trackers do."""

    def configure_optimizers(self):
        self.calls = []
        self.optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        self.groups = self.optimizer.param_groups
        self.first_list = self.groups[0]["params"]
        self.optimizer.register_step_pre_hook(lambda o, a, k: self.calls.append(("before", self.has_own(o))))
        self.optimizer.register_step_post_hook(lambda o, a, k: self.calls.append(("after", self.has_own(o))))
        scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.5)
        return {"optimizer": self.optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def has_own(self, optimizer):
        return all(a is b for a, b in zip(optimizer.param_groups[0]["params"], self.parameters(), strict=True))

    def training_step(self, batch, batch_idx):
        assert self.has_own(self.optimizer)
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("case", CASES)
def test_the_optimizer_stays_the_object_it_was(case):
    model = Hooked()
    run = train(model, case, max_steps=2)
    [optimizer], [config] = run.trainer.optimizers, run.trainer.lr_scheduler_configs
    assert optimizer is model.optimizer and config.scheduler.optimizer is model.optimizer
    assert optimizer.param_groups is model.groups and optimizer.param_groups[0]["params"] is model.first_list
    assert model.has_own(optimizer)
    assert set(map(id, optimizer.state)) == set(map(id, model.parameters()))
    assert optimizer.param_groups[0]["lr"] == 0.01 * 0.5**2
    # User's hooks run around each step and see the model's own parameters.
    assert model.calls == [("before", True), ("after", True)] * 2


@pytest.mark.parametrize("case", HALF_LEVELS)
def test_zero_grad_frees_what_the_masters_held(case):
    model = Net()
    run = train(model, case, max_steps=1)
    run.trainer.optimizers[0].zero_grad()
    for param in model.parameters():
        assert param.grad is None
        master = master_of(param)
        assert master is None or master.grad is None


class Sparse(Net):
    """With a table of sparse gradients, which SGD or SparseAdam updates, and rows that occur several times."""

    def __init__(self, table, optimizer, infinite_at=None):
        super().__init__(optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
        self.table = table(32, 32, sparse=True)
        self.table_optimizer, self.infinite_at = optimizer, infinite_at
        self.automatic_optimization = optimizer is torch.optim.SGD

    def loss(self, batch):
        rows = torch.stack([batch["y"], batch["y"] // 2, batch["y"] // 2], 1)
        found = self.table(rows)
        found = found.sum(1) if isinstance(self.table, torch.nn.Embedding) else found
        loss = super().loss({"x": batch["x"] + found, "y": batch["y"]})
        return loss * (float("inf") if self.trainer.global_step == self.infinite_at else 1.0)

    def configure_optimizers(self):
        if self.automatic_optimization:
            return super().configure_optimizers()
        rest = [p for n, p in self.named_parameters() if not n.startswith("table")]
        return [torch.optim.SGD(rest, lr=0.1), self.table_optimizer(self.table.parameters(), lr=0.01)]

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if self.automatic_optimization:
            return loss
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in self.optimizers():
            optimizer.step()
        return None


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.SparseAdam])
@pytest.mark.parametrize("table", [torch.nn.Embedding, torch.nn.EmbeddingBag])
@pytest.mark.parametrize("case", [case for case in CASES if not is_low_bit(case)])
def test_sparse_gradients_train_as_in_fp32(case, table, optimizer):
    models = [Sparse(table, optimizer) for _ in range(2)]
    start = models[0].table.weight.detach().clone()
    for model, precision in zip(models, (plugin(case), None), strict=True):
        train(model, precision, max_steps=6, max_epochs=-1)
    got, want = (m.table.weight.detach() - start for m in models)
    assert torch.equal(got.abs().sum(1) > 0, want.abs().sum(1) > 0) and (want.abs().sum(1) == 0).any()
    similar = torch.nn.functional.cosine_similarity(got.flatten(), want.flatten(), dim=0)
    assert similar > (0.7 if level_of(case).compute == "nvfp4" else 0.9)  # SparseAdam's first steps know signs only
    assert models[0].losses[-1] == pytest.approx(models[1].losses[-1], rel=0.05)


@pytest.mark.parametrize("case", [case for case in CASES if not is_low_bit(case)])
def test_an_overflow_skips_the_step_of_sparse_gradients(case):
    model = Sparse(torch.nn.Embedding, torch.optim.SGD, infinite_at=0)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    train(model, case, max_steps=1)
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())


class ScheduleFree(optim.Optimizer):
    """SGD of arXiv:2405.15682: the weights are y in training and the average x in evaluation."""

    def __init__(self, params, lr=0.5, beta=0.9):
        super().__init__(params, {"lr": lr, "beta": beta, "steps": 0, "trains": False})

    @torch.no_grad()
    def _move(self, weight_of, trains):
        for group in self.param_groups:
            for param in group["params"] if group["trains"] != trains else ():
                if param in self.state:
                    param.lerp_(self.state[param]["z"], weight_of(group["beta"]))
            group["trains"] = trains

    def train(self):
        self._move(lambda beta: 1 - beta, True)

    def eval(self):
        self._move(lambda beta: 1 - 1 / beta, False)

    @torch.no_grad()
    def step(self, closure=None):
        if closure is not None:
            with torch.enable_grad():
                closure()
        for group in self.param_groups:
            assert group["trains"]
            group["steps"] += 1
            share = 1 / group["steps"]
            for param in group["params"]:
                z = self.state[param].setdefault("z", param.detach().clone())
                param.lerp_(z, share).add_(param.grad, alpha=group["lr"] * (group["beta"] * (1 - share) - 1))
                z.sub_(param.grad, alpha=group["lr"])


class Averaged(Net):
    def __init__(self):
        super().__init__(optimizer=ScheduleFree)
        self.averages = {}

    def on_train_epoch_start(self):
        self.optimizers().optimizer.train()

    def on_train_epoch_end(self):
        self.optimizers().optimizer.eval()
        self.averages = {n: p.detach().float().clone() for n, p in self.named_parameters()}


@pytest.mark.parametrize("case", ["te_fp8", "bf16_mixed", "fp16_mixed", "bf16_with_fp8_mixed+fp8_params"])
def test_a_schedule_free_optimizer_averages_the_masters(case):
    model, plain = Averaged(), Averaged()
    train(plain, None, max_epochs=3)
    run = train(model, case, max_epochs=3)
    assert model.losses == pytest.approx(plain.losses, rel=0.1) and model.losses[-1] < 0.8 * model.losses[0]
    for name, value in model.averages.items():  # what is evaluated is rounded from what is saved
        exact = run.state["masters"].get(name, value)
        assert (value - exact).abs().max() <= 0.07 * exact.abs().max() + 1e-6
        z = next(o for o in run.trainer.optimizers).state[dict(model.named_parameters())[name]]["z"]
        assert z.dtype == torch.float32 and not torch.equal(z, exact.to(z))
    [optimizer] = run.trainer.optimizers
    assert not {"train", "eval"} & vars(optimizer).keys()
