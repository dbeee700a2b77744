"""Two processes and what loops do: parts that are not used, manual optimization, overflows, many steps; the audit."""

from contextlib import nullcontext

import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

from nemo_lowprec.data.loader import ResumableLoader
from nemo_lowprec.plugins import processes
from nemo_lowprec.report import Audit
from nemo_lowprec.strategies import LowPrecisionDDPStrategy
from tests.processes import on_processes
from tests.support import (
    CASES,
    FP16_HALF,
    Net,
    Samples,
    assert_same,
    level_of,
    loader,
    plugin,
    plugin_on,
    train,
    trainer,
    values_of,
)

ALL = [*CASES, *FP16_HALF]
STRATEGIES = ["ddp", "lowprec_ddp"]
BY_STRATEGY = pytest.mark.parametrize("strategy", STRATEGIES)
SOME = ["fp16_amp", "te_fp8", "msamp_o2", "msamp_o3", "fp16_mixed", "bf16_with_fp8_mixed+fp8_params"]
AT_SOME = pytest.mark.parametrize("case", SOME)
MANY = 1000


def fit(model, case, rank, strategy, *callbacks, steps=3, accumulate=1, precision=None, **options):
    data = ResumableLoader(Samples(8 * 4), 4, 3, rank, 2, global_batch_size=8 * accumulate, stop_at_epoch_end=False)
    return train(
        model, precision or plugin(case), *callbacks, data=data, devices=2, strategy=strategy, max_epochs=-1,
        use_distributed_sampler=False, max_steps=steps, accumulate_grad_batches=accumulate, **options,
    )  # fmt: skip


def ends(observer, *names):
    return {"weights": observer.state["weights"], "grads": [
        {n: values_of(g) for n, g in step.items()} for step in observer.grads
    ]} | {n: observer.state[n] for n in names}  # fmt: skip


# What runs on each process.


def run_audit(rank, case, strategy):
    audit = Audit()
    fit(Net(), case, rank, strategy, audit)
    found = [(f.column, f.part, f.declared, f.observed, f.bytes_per_param) for f in audit.report.findings]
    return {"findings": found, "agrees": audit.report.agrees, "bytes": audit.report.total_bytes}


class Parts(Net):
    """The first process uses one branch, the second the other one; nobody uses a third; a fourth is frozen."""

    def __init__(self):
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(128, 128) for _ in range(4))
        self.branches[3].requires_grad_(False)
        self.gain = nn.Parameter(torch.ones(128))

    def middle(self, x):
        return self.branches[3](self.branches[self.global_rank](super().middle(x) * self.gain))


def run_parts(rank, case, strategy):
    model = Parts()
    if strategy == "ddp":
        strategy = "ddp_find_unused_parameters_true"
    return ends(fit(model, case, rank, strategy, accumulate=2), "optimizers")


class TwoOptimizers(Net):
    """Manual optimization: two micro-batches a step, the first without communication, an optimizer for each half."""

    def __init__(self, case):
        super().__init__()
        self.automatic_optimization = False
        self.synced = []

    def configure_optimizers(self):
        halves = [[*self.inp.parameters(), *self.norm.parameters()], [*self.mid.parameters(), *self.head.parameters()]]
        return [torch.optim.AdamW(half, lr=1e-2) for half in halves]

    def training_step(self, batch, index):
        wrapper = self.trainer.strategy.model
        blocked = wrapper.no_sync if wrapper is not self else self.trainer.strategy.block_backward_sync
        with blocked() if index % 2 == 0 else nullcontext():
            self.manual_backward(self.loss(batch))
        grads = {n: values_of(p.grad).clone() for n, p in self.named_parameters()}
        self.synced.append(grads)
        if index % 2:
            for optimizer in self.optimizers():
                optimizer.step()
                optimizer.zero_grad()


def run_manual(rank, case, strategy):
    model = TwoOptimizers(case)
    observer = fit(model, case, rank, strategy, steps=6)
    return {"weights": observer.state["weights"], "grads": model.synced}


class Overflow(Net):
    """The second process's gradients are NaN at the second step."""

    def training_step(self, batch, index):
        loss = super().training_step(batch, index)
        return loss * torch.nan if index == 1 and self.global_rank == 1 else loss


def run_overflow(rank, case, strategy, backend=None, **options):
    dynamic = {"loss_scale": None, "initial_loss_scale": 256.0, "hysteresis": 1}
    precision = plugin_on(backend, case, **dynamic if level_of(case).has_loss_scale else {})
    model = Overflow(stepwise=True)
    observer = fit(model, case, rank, strategy, precision=precision, **options)
    steps = {float(s["step"]) for o in observer.state["optimizers"] for s in o["state"].values()}
    rates = [group["lr"] for o in observer.trainer.optimizers for group in o.param_groups]
    return {
        "weights": observer.state["weights"],
        "steps": steps,
        "rates": rates,
        "fp8": precision.engine.state_dict().get("fp8"),
        "scale": precision.engine.step.loss_scale and precision.engine.step.loss_scale.scale,
    }


def assert_overflow_skipped(found):
    assert found["steps"] == {2.0} and found["scale"] in (128.0, None)
    assert all(w.isfinite().all() for w in found["weights"].values())
    assert found["rates"] == [pytest.approx(1e-2 * 0.9**2)]


class Normed(Net):
    """Other weights on each process, and a norm with statistics."""

    def __init__(self, rank):
        super().__init__()
        torch.manual_seed(rank)
        self.norm = nn.BatchNorm1d(128)
        nn.init.normal_(self.mid.weight)

    def training_step(self, batch, index):
        self.statistics = self.norm.running_mean.clone()
        return super().training_step(batch, index)


def run_many(rank, case, strategy):
    observer = fit(Normed(rank), case, rank, strategy, steps=MANY)
    model = observer.trainer.lightning_module
    weights = {n: w for n, w in observer.state["weights"].items() if not n.startswith("norm.running")}
    return {
        "weights": weights, "masters": observer.state["masters"], "statistics": model.statistics,
        "losses": torch.tensor(model.losses),
    }  # fmt: skip


def message(rank, case, strategy, model=None, precision=None, **options):
    try:
        if precision == "none":
            trainer(None, devices=2, strategy=strategy).fit(Net(), loader())
        else:
            fit(model or Net(), case, rank, strategy, precision=precision, **options)
    except (ValueError, TypeError) as error:
        return str(error)
    return ""


class Sharded(Net):
    def configure_model(self):
        pass


class Sparse(Net):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(8, 8, sparse=True)


def other_version(rank):
    """Of another library on the second process."""
    own = processes.version
    processes.version = lambda name: "0.1" if rank and name == "lightning" else own(name)
    try:
        return message(rank, "bf16_mixed", "ddp")
    finally:
        processes.version = own


def run_refused(rank):
    hook = DDPStrategy(ddp_comm_hook=bf16_compress_hook)
    return {
        "hook": message(rank, "msamp_o2", hook),
        "averaging": message(rank, "bf16_mixed", DDPStrategy(model_averaging_period=2)),
        "release": message(rank, "msamp_o2", "ddp", precision=plugin("msamp_o2", gradient_release=True)),
        "sparse": message(rank, "bf16_mixed", "lowprec_ddp", Sparse()),
        "level": message(rank, "", "ddp", precision=plugin("msamp_o2" if rank else "msamp_o3")),
        "option": message(rank, "", "ddp", precision=plugin("te_fp8", fp8_margin=rank)),
        "strategy": message(rank, "te_fp8", ModelParallelStrategy(2, 1), Sharded()),
        "model": message(rank, "bf16_mixed", "ddp", Net() if rank else Parts()),
        "plain": message(rank, "", LowPrecisionDDPStrategy(), precision="none"),
        "version": other_version(rank),
    }


def run_refit(rank):
    """A model that DDP was to ignore trains with DDP alone, and once more with other parameters frozen."""
    model, options = Net(), {"devices": 2, "strategy": "ddp", "use_distributed_sampler": False}

    def fit(*precision):
        trainer(*precision, max_steps=3, **options).fit(model, ResumableLoader(Samples(32), 4, 3, rank, 2))
        return {n: p.detach().clone() for n, p in model.named_parameters()}

    fit(plugin("bf16_mixed"))
    found = {"by DDP": fit(), "te_fp8": fit(plugin("te_fp8"))}
    for param in (model.norm.weight, model.norm.bias, model.head.bias):
        param.requires_grad_(False)
    return found | {"frozen": fit(plugin("msamp_o2"))}


def every_case(rank):
    found = {"refused": run_refused(rank), "refit": run_refit(rank)}
    for strategy in STRATEGIES:
        for case in ALL:
            found[f"audit {case} {strategy}"] = run_audit(rank, case, strategy)
        for case in SOME:
            found[f"parts {case} {strategy}"] = run_parts(rank, case, strategy)
            found[f"manual {case} {strategy}"] = run_manual(rank, case, strategy)
        for case in ALL:
            found[f"overflow {case} {strategy}"] = run_overflow(rank, case, strategy)
    found["many msamp_o2"] = run_many(rank, "msamp_o2", "ddp")
    found["many msamp_o3"] = run_many(rank, "msamp_o3", "lowprec_ddp")
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What every case returned on each of two processes, all run by one pair of them."""
    return on_processes(2, tmp_path_factory.mktemp("ranks"), every_case)


# What is asserted of it.


@pytest.mark.parametrize("case", ALL)
@BY_STRATEGY
def test_what_is_sent_is_what_the_chart_declares(ranks, case, strategy):
    level = level_of(case)
    for rank in ranks:
        found = rank[f"audit {case} {strategy}"]
        assert found["agrees"], found["findings"]
        # DDP's own, where it averages: a copy of all gradients; a number where it does not.
        buckets = found["bytes"].get("DDP's buckets, beside the gradients")
        parameters = sum(p.numel() for p in Net().parameters())
        assert buckets == (None if strategy == "lowprec_ddp" else 4 if level.has_half_weights else 4 * parameters)
        comm = {part: (declared, size) for column, part, declared, _, size in found["findings"] if column == "Comm"}
        assert set(comm) == ({"matrices", "vectors"} if level.vectors else {"all"})
        # Of two processes each sends every gradient once. FP8 goes in blocks of a row with a byte for the exponent;
        # 288 blocks, since 128 of the rows have 32 elements.
        bytes_of = {"fp32": 4, "fp16": 2, "fp8": 288 * 129 / (128 * 32 + 128 * 128 + 32 * 128)}
        for part, (declared, size) in comm.items():
            assert size == bytes_of[declared], part


@AT_SOME
@BY_STRATEGY
def test_branches_that_one_process_uses(ranks, case, strategy):
    first, second = (rank[f"parts {case} {strategy}"] for rank in ranks)
    assert_same(first, second)
    for step in first["grads"]:
        names = {n for n in step if n.startswith("branches")}
        assert names == {f"branches.{i}.{kind}" for i in (0, 1) for kind in ("weight", "bias")}
        assert all(step[n].norm() > 0 for n in names)


@AT_SOME
@BY_STRATEGY
def test_manual_optimization_communicates_where_it_says(ranks, case, strategy):
    first, second = (rank[f"manual {case} {strategy}"] for rank in ranks)
    assert_same(first["weights"], second["weights"])
    for index, (a, b) in enumerate(zip(first["grads"], second["grads"], strict=True)):
        same = all(torch.equal(a[n], b[n]) for n in a)
        assert same == bool(index % 2)


@pytest.mark.parametrize("case", ALL)
@BY_STRATEGY
def test_a_nan_on_one_process_skips_the_step_on_all(ranks, case, strategy):
    first, second = (rank[f"overflow {case} {strategy}"] for rank in ranks)
    assert_same(first, second)
    assert_overflow_skipped(first)


@pytest.mark.parametrize("case", ["msamp_o2", "msamp_o3"])
def test_weights_and_statistics_are_the_same_after_many_steps(ranks, case):
    first, second = (rank[f"many {case}"] for rank in ranks)
    assert_same(first["weights"], second["weights"])
    assert_same(first["masters"], second["masters"])
    assert_same(first["statistics"], second["statistics"])  # as they were when the last step began
    assert len(first["losses"]) == MANY and first["losses"][-50:].mean() < 0.1 * first["losses"][:5].mean()


def test_ddp_takes_the_parameters_back_after_a_level_that_averages_by_itself(ranks):
    assert_same(ranks[0]["refit"], ranks[1]["refit"])


def test_what_would_have_no_effect_or_differs_is_refused_on_all(ranks):
    for rank in ranks:
        refused = rank["refused"]
        assert refused["hook"].startswith("ddp_comm_hook would have no effect: msamp_o2 averages gradients in FP8")
        assert refused["averaging"].startswith("model_averaging_period would have no effect")
        assert "gradient_release=True steps before gradients are averaged" in refused["release"]
        assert refused["sparse"].startswith("table has sparse gradients")
        expected = "Processes that train one model must agree on the level. There is "
        assert (
            refused["level"]
            == expected + "msamp_o3(backend='reference') on rank 0; msamp_o2(backend='reference') on rank 1."
        )
        assert refused["option"].startswith("Processes that train one model must agree on the level")
        assert refused["strategy"].startswith("te_fp8 does not train with ModelParallelStrategy. Use strategy='ddp'")
        assert refused["model"].startswith("Processes that train one model must agree on the model's parameters")
        assert refused["version"].startswith("Processes that train one model must agree on the version of lightning.")
        assert refused["version"].endswith("; 0.1 on rank 1.")
        assert refused["plain"].startswith("lowprec_ddp needs a level of nemo_lowprec")


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"find_unused_parameters": True}, TypeError, "find_unused_parameters"),
        ({"bucket_cap_mb": 0}, ValueError, "bucket_cap_mb=0"),
    ],
)
def test_bad_options_of_the_strategy(options, error, text):
    with pytest.raises(error, match=text):
        LowPrecisionDDPStrategy(**options)
