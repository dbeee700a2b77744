"""What models and loops of users' own meet when they are sharded, each beside the run that it must equal."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from nemo_lowprec.comm import reducer
from nemo_lowprec.data.loader import ResumableLoader
from nemo_lowprec.grads import Fp8Gradients
from nemo_lowprec.strategies import LowPrecisionShardedStrategy
from nemo_lowprec.tensors import QuantizedTensor
from nemo_lowprec.tensors.gradient import DETACHED_GRADS
from tests.processes import on_processes
from tests.strategies.test_sharded import ALL, Blocks, run, whole
from tests.support import Net, Samples, assert_same, is_low_bit, linear_optimizer, loader, plugin, plugin_on, trainer

SOME = ["te_fp8", "msamp_o1", "msamp_o2", "msamp_o3", "fp16_mixed", "bf16_mixed", "bf16_with_fp8_mixed+fp8_params"]
AT_CASES = pytest.mark.parametrize("case", SOME)
ROWS = 32


class Cut(Blocks):
    """Sharded by its user."""

    policy = MixedPrecisionPolicy()

    def configure_model(self):
        for module in (self.blocks[0], self.blocks[1][0], self.blocks[2], self):
            fully_shard(module, mesh=self.device_mesh["data_parallel"], mp_policy=self.policy)


class CutOtherwise(Cut):
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)


class CutInPart(Blocks):
    def configure_model(self):
        fully_shard(self.blocks[0], mesh=self.device_mesh["data_parallel"])


class CutOnFirst(Cut):
    def configure_model(self):
        with self.trainer.strategy.init_on_first_process():
            self.more = nn.Linear(128, 128)
        super().configure_model()


class Extra(Blocks):
    """A layer that counts on the first process only."""

    def __init__(self, **options):
        super().__init__(**options)
        self.extra = nn.Linear(32, 128, bias=False)

    def forward(self, x):
        return super().forward(x) + self.more(x)

    def more(self, x):
        return (self.global_rank == 0) * self.extra(x)[:, :32]


class Unused(Extra):
    """The same, which the second process does not even use; and a layer that nobody uses."""

    def __init__(self, **options):
        super().__init__(**options)
        self.idle = nn.Linear(128, 128, bias=False)

    def more(self, x):
        # Of gradients that FSDP2 reduces itself there must be as many on every process.
        return super().more(x) if self.global_rank == 0 or not self.trainer.precision_plugin.level.is_low_bit else 0


class Compiled(Blocks):
    """One block compiled in place, one wrapped."""

    def __init__(self, **options):
        super().__init__(**options)
        self.blocks[0].compile(backend="aot_eager")
        self.blocks[2] = torch.compile(self.blocks[2], backend="aot_eager")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(128), nn.Linear(128, 144), nn.Linear(144, 128)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x)))).to(x.dtype)


class Alike(Net):
    """Blocks of the same code, compiled in place unless ``backend`` is None."""

    def __init__(self, depth, backend, **options):
        super().__init__(**options)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        for block in self.blocks if backend is not None else ():
            block.compile(backend=backend, fullgraph=True)

    def middle(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class Manual(Blocks):
    """The same as automatic optimization does, by hand."""

    def __init__(self, **options):
        super().__init__(**options)
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()


class Keeps(Blocks):
    """Looks at what autograd has saved of weights, once forward is over."""

    def __init__(self, compiled, **options):
        super().__init__(**options)
        for block in (self.blocks[0], self.blocks[1][0], self.blocks[2]) if compiled else ():
            block.compile(backend="aot_eager")

    def training_step(self, batch, batch_idx):
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
            loss = super().training_step(batch, batch_idx)
        # Rows of inputs: no side of a weight has as many.
        weights = (t for t in saved if t.dim() == 2 and ROWS not in t.shape)
        parts = (t.parts()[0] if isinstance(t, QuantizedTensor) else t for t in weights)
        self.kept = [t.untyped_storage().size() for t in parts]
        return loss


def errors(rank, net, case="bf16_mixed", **options):
    with pytest.raises(ValueError) as found:
        run(case, rank, net, **options)
    return str(found.value)


def stages(case, rank):
    """Fit, validate, test and fit again, one model and two Trainers with options that each stage meets anew."""
    model = Blocks(optimizer=linear_optimizer(case, 0.1))
    data, held = (
        ResumableLoader(Samples(16), 4, 3, rank or 0, 2 if rank is not None else 1, global_batch_size=8),
        loader(8),
    )
    seen = []
    for _ in range(2):
        options = {"accumulate_grad_batches": 2}
        if rank is not None:
            strategy = LowPrecisionShardedStrategy(shard_size=2, reshard_after_forward=False)
            options = {"devices": 2, "strategy": strategy, "use_distributed_sampler": False}
        one = trainer(plugin(case), **options)
        one.fit(model, data, held)
        seen += [float(one.callback_metrics["val/loss"])]
        for stage in (one.validate, one.test):
            seen += [float(stage(model, held, verbose=False)[0]["val/loss"])]
    return seen


def overflow(case, rank, backend=None, **options):
    """One process's gradients are NaN at the second of three steps."""

    class Overflows(Blocks):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            factor = float("nan") if self.global_rank == 1 and batch_idx == 1 else 1.0
            return loss * factor

        def on_train_batch_end(self, *_):
            self.history = [*getattr(self, "history", []), whole(self.blocks[0][1].weight)]

    model = Overflows(optimizer=linear_optimizer(case, 0.1))
    options |= {"devices": 2, "strategy": LowPrecisionShardedStrategy(), "use_distributed_sampler": False}
    one = trainer(plugin_on(backend, case), max_steps=3, **options)
    one.fit(model, ResumableLoader(Samples(32), 4, 3, rank, 2, global_batch_size=8))
    return model.history


def keeps(case, rank, reshard, compiled=False):
    model = Keeps(compiled, optimizer=linear_optimizer(case, 0.1))
    strategy = LowPrecisionShardedStrategy(reshard_after_forward=reshard)
    options = {"devices": 2, "strategy": strategy, "use_distributed_sampler": False, "max_steps": 1}
    trainer(plugin(case), **options).fit(model, ResumableLoader(Samples(2 * ROWS), ROWS, 3, rank, 2))
    return model.kept


def waiting(case, rank):
    """(the most gradients of whole matrices that were there at a time, matrices) in the first backward pass."""
    bucket, store = reducer.BUCKET_BYTES, Fp8Gradients._store
    seen, params = [], []

    def counted(stored, param):
        store(stored, param)
        params.append(param)
        seen.append(sum(param in DETACHED_GRADS for param in params))

    reducer.BUCKET_BYTES, Fp8Gradients._store = 1, counted
    try:
        run(case, rank, Blocks, max_steps=1)
    finally:
        reducer.BUCKET_BYTES, Fp8Gradients._store = bucket, store
    return [max(seen), len(seen)]


def graphs(case, rank, depth):
    """How many graphs compiled blocks of the same code have."""
    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    run(case, rank, partial(Alike, depth, counter), max_steps=2)
    return counter.frame_count


def every_case(rank):
    found = {}
    for case in SOME:
        torch.compiler.reset()  # torch limits the graphs of all cases together
        nets = {"plain": Blocks, "cut": Cut, "recomputed": partial(Blocks, recompute="non_reentrant"), "extra": Extra,
                "unused": Unused, "compiled": Compiled, "manual": Manual}  # fmt: skip
        found[case] = {name: run(case, rank, net, max_steps=2) for name, net in nets.items()}
        found[case]["stages"] = stages(case, rank)
        found[case]["kept"] = [keeps(case, rank, *options) for options in ((True,), (True, True), (False,))]
        found[case]["graphs"] = [graphs(case, rank, depth) for depth in (1, 4)]
        if is_low_bit(case):
            found[case]["waiting"] = waiting(case, rank)
    found["errors"] = [errors(rank, net) for net in (CutOtherwise, CutInPart)]
    found["no effect"] = [errors(rank, Cut, strategy=s) for s in ({"shard_size": 2}, {"reshard_after_forward": False})]
    found["on first"] = errors(rank, CutOnFirst)
    found["levels"] = errors(rank, Blocks, "te_fp8" if rank else "bf16_mixed")
    found["overflow"] = {case: overflow(case, rank) for case in ALL}
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return on_processes(2, tmp_path_factory.mktemp("ranks"), every_case)


@AT_CASES
def test_units_of_the_user_train_as_ours(ranks, case):
    for got, want in ((r[case]["cut"], r[case]["plain"]) for r in ranks):
        assert got["units"] == want["units"] == ["", "blocks.0", "blocks.1.0", "blocks.2"]
        assert got["kinds"] == want["kinds"]
        assert got["losses"] == want["losses"]
        assert_same(got["weights"], want["weights"])


def test_units_of_the_user_that_cannot_be_taken_over_are_refused(ranks):
    for policy, part in (r["errors"] for r in ranks):
        assert "mp_policy" in policy and "Leave mp_policy out" in policy
        assert "gain is in no unit of FSDP2" in part


@AT_CASES
@pytest.mark.parametrize("name", ["recomputed", "manual"])
def test_activation_checkpointing_and_manual_optimization_change_nothing(ranks, case, name):
    got, want = ranks[0][case][name], ranks[0][case]["plain"]
    assert got["losses"] == want["losses"]
    assert_same(got["weights"], want["weights"])


@AT_CASES
def test_compiled_blocks_train_as_plain_ones(ranks, case):
    got, want = ranks[0][case]["compiled"], ranks[0][case]["plain"]
    assert got["losses"] == want["losses"]
    assert_same({n.replace("_orig_mod.", ""): weight for n, weight in got["weights"].items()}, want["weights"])


@AT_CASES
def test_blocks_of_the_same_code_share_their_graphs(ranks, case):
    one, four = ranks[0][case]["graphs"]
    assert four == one == 1


@AT_CASES
def test_a_layer_that_one_process_uses_counts_as_zero_on_the_other(ranks, case):
    got, want = ranks[0][case]["unused"], ranks[0][case]["extra"]
    assert_same(got["grads"], ranks[1][case]["unused"]["grads"])
    assert not [n for grads in got["grads"] for n in grads if n.startswith("idle")]
    assert got["grads"][0]["extra.weight"].norm() > 0
    bound = 0.12 if is_low_bit(case) else 1e-6
    for name, value in want["grads"][0].items():
        assert (got["grads"][0][name] - value).norm() <= bound * value.norm() + 1e-12, name


def test_options_that_units_of_the_user_would_not_see_are_refused(ranks):
    for rank in ranks:
        assert all(text.startswith("This model is sharded already") for text in rank["no effect"])


def test_processes_that_differ_are_refused_on_all(ranks):
    for rank in ranks:
        assert "where a model that fully_shard cuts is made (without init_on_first_process)" in rank["on first"]
        assert "on the meta device on rank 1" in rank["on first"]
        assert rank["levels"].startswith("Processes that train one model must agree on the level")


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"tensor_parallel_size": 2}, TypeError, "Leave tensor_parallel_size out"),
        ({"data_parallel_size": 2}, TypeError, "Leave data_parallel_size out"),
        ({"shard_size": 0}, ValueError, "shard_size=0"),
        ({"shard_size": -1}, ValueError, "shard_size=-1"),
    ],
)
def test_bad_options_are_refused(options, error, text):
    with pytest.raises(error, match=text):
        LowPrecisionShardedStrategy(**options)


@AT_CASES
def test_stages_follow_each_other_on_one_model(ranks, case):
    seen = ranks[0][case]["stages"]
    for after in (seen[:3], seen[3:]):
        assert after == [after[0]] * 3
    assert seen[3] < seen[0]
    assert seen == pytest.approx(stages(case, None), rel=0.05)


@AT_CASES
def test_weights_are_freed_between_forward_and_backward(ranks, case):
    """But for those of the root, which backward begins with: its first and its last layer."""
    *freed, kept = ranks[0][case]["kept"]
    for sizes in freed:
        assert len(sizes) > 4 and not any(sizes[1:-1])
    assert all(kept)


@pytest.mark.parametrize("case", [case for case in SOME if is_low_bit(case)])
def test_gradients_are_sent_while_the_first_backward_goes_on(ranks, case):
    most, matrices = ranks[0][case]["waiting"]
    assert matrices == 9  # without the frozen one
    assert most <= 2


@pytest.mark.parametrize("case", ALL)
def test_a_nan_on_one_process_skips_the_step_of_all(ranks, case):
    for first, second, third in (r["overflow"][case] for r in ranks):
        assert torch.equal(first, second)
        assert not torch.equal(second, third) and third.isfinite().all()
    assert_same(ranks[0]["overflow"], ranks[1]["overflow"])


class Penalized(Blocks):
    """A penalty on the gradient of the input; or that gradient alone, which nobody differentiates."""

    create_graph = True

    def loss(self, batch):
        x = batch["x"].clone().requires_grad_()
        loss = super().loss({"x": x, "y": batch["y"]})
        (grad,) = torch.autograd.grad(loss, x, create_graph=self.create_graph, retain_graph=True)
        return loss + grad.float().square().mean()


class First(Penalized):
    create_graph = False


def refusals(rank):
    told = {}
    for case in SOME:
        try:
            run(case, rank, Penalized, max_steps=1)
        except RuntimeError as error:
            told[case] = str(error)
    run("msamp_o2", rank, First, max_steps=1)
    return told


def test_second_derivatives_are_refused_before_they_read_freed_weights(tmp_path):
    for told in on_processes(2, tmp_path, refusals):
        assert set(told) == set(SOME)
        assert all("create_graph=True" in sentence for sentence in told.values())
