"""The user's Adam or AdamW at the MS-AMP levels: adopted in place and given back, or refused by name."""

import pytest
import torch
from low_bit import REFUSED
from support import MSAMP_LEVELS, Net, assert_same, clone, kept, level_of, loader, plugin, stateful_loader, train
from torch import nn, optim

from nemo_lowprec.optim import LowBitStates


class OwnInit(optim.AdamW):
    """AdamW with other defaults and a method, and torch's step."""

    def __init__(self, params):
        super().__init__(params, lr=1e-2, weight_decay=0.3)
        self.cleared = 0

    def zero_grad(self, set_to_none=True):
        self.cleared += 1
        super().zero_grad(set_to_none)


class TwoOptimizers(Net):
    """A good optimizer, and one that may be refused; both made before the Trainer."""

    automatic_optimization = False

    def __init__(self, make):
        super().__init__()
        self.good = optim.AdamW(self.inp.parameters())
        self.other = make([*self.mid.parameters(), *self.head.parameters()])

    def configure_optimizers(self):
        return self.good, self.other


@pytest.mark.parametrize("message", REFUSED)
@pytest.mark.parametrize("case", MSAMP_LEVELS)
def test_a_refused_optimizer_leaves_everything_as_it_was(case, message):
    model = TwoOptimizers(REFUSED[message])
    start = {n: p.detach().clone() for n, p in model.named_parameters()}
    before = [type(m) for m in model.modules()]
    optimizers = [(o, type(o), list(o.param_groups[0]["params"]), dict(vars(o))) for o in (model.good, model.other)]
    with pytest.raises(ValueError, match=message):
        train(model, case)
    assert not model.losses and [type(m) for m in model.modules()] == before
    for optimizer, cls, params, attributes in optimizers:
        assert type(optimizer) is cls and not optimizer.state and vars(optimizer).keys() == attributes.keys()
        assert all(a is b for a, b in zip(optimizer.param_groups[0]["params"], params, strict=True))
    for name, param in model.named_parameters():
        assert type(param) is nn.Parameter and param.dtype == torch.float32
        assert torch.equal(param, start[name]), name
    assert all(not m._state_dict_hooks and not m._load_state_dict_pre_hooks for m in model.modules())


@pytest.mark.parametrize("case", MSAMP_LEVELS)
@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda m: m.head.weight.data[3].fill_(-65600.0), r"head\.weight has values beyond 65504"),
        (lambda m: m.inp.weight.data[0].fill_(float("inf")), r"inp\.weight has values beyond 65504"),
        (lambda m: m.register_parameter("c", nn.Parameter(torch.ones(2, 2, dtype=torch.complex64))), "c is complex"),
    ],
)
def test_parameters_that_fp16_cannot_hold_are_refused_before_anything_changes(case, spoil, message):
    model = Net()
    spoil(model)
    start = {n: p.detach().clone() for n, p in model.named_parameters()}
    with pytest.raises(ValueError, match=message):
        train(model, case)
    assert not model.losses
    assert_same({n: p.detach() for n, p in model.named_parameters()}, start)
    assert type(model.mid) is nn.Linear


@pytest.mark.parametrize("case", MSAMP_LEVELS)
def test_parameters_in_a_live_graph_are_refused_and_lazy_ones_stay_fp32(case):
    model = Net()
    view = model.mid.weight[0]
    with pytest.raises(ValueError, match=r"mid\.weight is held by a view or the graph of an earlier forward pass"):
        train(model, case)
    del view
    train(model, case, max_steps=1)

    class Lazy(Net):
        def __init__(self):
            super().__init__()
            self.first = nn.LazyLinear(32)

        def forward(self, x):
            return super().forward(self.first(x))

    lazy = Lazy()
    state = train(lazy, case, max_steps=2).state
    assert state["weights"]["first.weight"].dtype == torch.float32 and len(lazy.losses) == 2


@pytest.mark.parametrize("case", [*MSAMP_LEVELS, "msamp_o2+fp16"])
def test_sparse_gradients_are_refused_at_the_start(case):
    class Sparse(Net):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(32, 32, sparse=True)

        def loss(self, batch):
            return super().loss({"x": batch["x"] + self.table(batch["y"]), "y": batch["y"]})

    model = Sparse()
    with pytest.raises(ValueError, match="table has sparse gradients"):
        train(model, case)
    assert not model.losses


class Schedules(Net):
    """Two groups, two schedulers made before the Trainer sees the optimizer, and hooks."""

    def __init__(self, make=optim.AdamW):
        super().__init__()
        params = {n: p for n, p in self.named_parameters() if n != "norm.bias"}
        frozen = [params.pop("head.weight")]
        self.optimizer = make([{"params": list(params.values())}, {"params": frozen, "lr": 0.0, "weight_decay": 0.0}])
        self.optimizer.param_groups[0]["lr"] = 1e-2
        self.calls = []
        self.optimizer.register_step_pre_hook(lambda *_: self.calls.append("before"))
        self.optimizer.register_step_post_hook(lambda *_: self.calls.append("after"))
        self.schedulers = [
            optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1 / (step + 1)),
            optim.lr_scheduler.StepLR(self.optimizer, 2, 0.1),
        ]

    def configure_optimizers(self):
        return [self.optimizer], [{"scheduler": s, "interval": "step"} for s in self.schedulers]


@pytest.mark.parametrize("make", [optim.AdamW, optim.Adam])
@pytest.mark.parametrize("case", MSAMP_LEVELS)
def test_groups_hooks_and_schedulers_work_on_the_adopted_object(case, make, recwarn):
    model, plain = Schedules(make), Schedules(make)
    train(plain, None, max_steps=3)
    seen = []
    model.on_train_batch_end = lambda *_: seen.append((type(model.optimizer), model.optimizer.param_groups[0]["lr"]))
    run = train(model, case, max_steps=3)
    assert isinstance(model.optimizer, make) and all(issubclass(cls, LowBitStates) for cls, _ in seen)
    assert run.trainer.optimizers == [model.optimizer] and model.calls == ["before", "after"] * 3
    assert [g["lr"] for g in model.optimizer.param_groups] == [g["lr"] for g in plain.optimizer.param_groups]
    assert len({lr for _, lr in seen}) == 3
    assert not [w for w in recwarn if "lr_scheduler.step()" in str(w.message)]
    start = Net().state_dict()
    for name, value in run.state["weights"].items():  # of a learning rate of 0, or in no group
        still = name in ("head.weight", "norm.bias")
        assert torch.equal(value, kept(case, name, start[name])) == still, name
    assert model.losses == pytest.approx(plain.losses, rel=0.05)


@pytest.mark.parametrize("case", MSAMP_LEVELS)
def test_a_subclass_with_torchs_step_keeps_its_methods(case):
    model = Net(optimizer=OwnInit)
    seen = []
    model.on_train_batch_end = lambda *_: seen.append(model.optimizers().optimizer)
    observed = train(model, case, max_steps=2)
    [optimizer] = observed.trainer.optimizers
    assert seen == [optimizer] * 2 and type(optimizer) is OwnInit and optimizer.cleared >= 2
    assert observed.state["optimizers"][0]["param_groups"][0]["weight_decay"] == 0.3
    same = train(Net(optimizer=lambda p: optim.AdamW(p, lr=1e-2, weight_decay=0.3)), case, max_steps=2)
    assert_same(observed.state["weights"], same.state["weights"])


class Held(Net):
    """Its optimizer is made with it and goes with it from fit to fit."""

    def __init__(self):
        super().__init__()
        self.optimizer = optim.AdamW(self.parameters(), lr=1e-2)

    def configure_optimizers(self):
        return self.optimizer


@pytest.mark.parametrize("case", [*MSAMP_LEVELS, "msamp_o3+fp16"])
def test_the_optimizer_and_model_are_torchs_own_after_the_trainer(case):
    model = Held()
    params = list(model.parameters())
    held = model.optimizer
    state = train(model, case, max_steps=2).state
    assert type(held) is optim.AdamW and "step" not in vars(held) and "formats" not in vars(held)
    assert all(a is b for a, b in zip(held.param_groups[0]["params"], params, strict=True))
    assert all(a is b for a, b in zip(model.parameters(), params, strict=True))
    for index, (name, param) in enumerate(model.named_parameters()):
        assert type(param) is nn.Parameter and param.dtype == torch.float32 and not hasattr(param, "master_weight")
        assert torch.equal(param, state["weights"][name].float())
        for key in ("exp_avg", "exp_avg_sq"):
            value = held.state[param][key]
            assert type(value) is torch.Tensor and value.dtype == torch.float32
            assert torch.equal(value, state["optimizers"][0]["state"][index][key].float())
    # A plain step by hand, as torch does it.
    batch = next(iter(loader()))
    twin = Held()
    twin.load_state_dict(model.state_dict())
    twin.optimizer.load_state_dict(clone(held.state_dict()))
    for each in (model, twin):
        each.optimizer.zero_grad()
        each.loss(batch).backward()
        each.optimizer.step()
    assert_same(dict(model.state_dict()), dict(twin.state_dict()))


@pytest.mark.parametrize("case", MSAMP_LEVELS)
def test_two_fits_equal_one_of_the_same_length(case):
    """Between them weights and states are FP32: storing them again changes no bit."""
    whole, parts = Held(), Held()
    want = train(whole, case, data=stateful_loader(), max_epochs=2).state
    precision, data = plugin(case), stateful_loader()
    first = train(parts, precision, data=data, max_epochs=1)
    data.load_state_dict(first.trainer.train_dataloader.state_dict())
    got = train(parts, precision, data=data, max_epochs=1).state
    assert len(parts.losses) == len(whole.losses) == 8
    assert parts.losses[:4] == whole.losses[:4]
    assert parts.losses[4:] == whole.losses[4:]
    for part in ("weights", "copies", "masters", "optimizers"):
        assert_same(got[part], want[part], part)


@pytest.mark.parametrize("case", MSAMP_LEVELS)
def test_parameters_without_a_gradient_are_left_alone(case):
    class Partly(Net):
        def __init__(self):
            super().__init__()
            self.unused = nn.Linear(32, 32)
            self.empty = nn.Parameter(torch.zeros(0, 4))
            self.scalar = nn.Parameter(torch.tensor(1.0))

        def forward(self, x):
            return super().forward(x) * self.scalar + self.empty.sum()

    state = train(Partly(), case, max_steps=2).state
    start = Partly().state_dict()
    for name in ("unused.weight", "unused.bias", "empty"):
        assert torch.equal(state["weights"][name], kept(case, name, start[name])), name
    assert state["weights"]["scalar"] != 1 and state["weights"]["scalar"].dtype == torch.float32
    states = state["optimizers"][0]["state"]
    assert level_of(case).is_low_bit and len(states) == 9  # without unused
