"""Every level sharded over two processes with FSDP2, against one process."""

import functools

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from nemo_lowprec.data.loader import ResumableLoader
from nemo_lowprec.report import Audit
from nemo_lowprec.strategies import LowPrecisionShardedStrategy
from nemo_lowprec.strategies.shard import blocks_of
from nemo_lowprec.tensors import BlockShard, HalfShard, PlainShard, QuantizedTensor
from nemo_lowprec.tensors.dtensor import local_shard
from tests.processes import on_processes
from tests.support import (
    CASES,
    FP16_HALF,
    Net,
    Samples,
    assert_same,
    is_low_bit,
    level_of,
    linear_optimizer,
    plugin_on,
    trainer,
)  # fmt: skip

ALL = [*CASES, *FP16_HALF]
AT_CASES = pytest.mark.parametrize("case", ALL)
RANDOM = {"bf16_with_nvfp4_mixed"}  # rounds gradients stochastically, on each process differently
OPTIONS = {
    "plain": {},
    "zero2": {"strategy": {"reshard_after_forward": False}},
    "hybrid": {"strategy": {"shard_size": 1}},
    "clipped": {"gradient_clip_val": 0.05},
    "accumulated": {"accumulate": 2},
}


class Blocks(Net):
    """Blocks in a list, one of them only a container; sizes that two processes do not share evenly; a frozen layer."""

    def __init__(self, **options):
        super().__init__(**options)
        block = lambda: nn.Sequential(nn.LayerNorm(128), nn.Linear(128, 144), nn.GELU(), nn.Linear(144, 128))  # noqa: E731
        self.blocks = nn.ModuleList([block(), nn.ModuleList([block()]), block()])
        self.odd = nn.Linear(128, 33, bias=False)
        self.head = nn.Linear(33, 32)
        self.gain = nn.Parameter(torch.ones(()).repeat(128))
        self.blocks[2][1].requires_grad_(False)

    def middle(self, x):
        x = super().middle(x) * self.gain
        return self.odd(self.blocks[2](self.blocks[1][0](self.blocks[0](x))))


def whole(tensor):
    """All rows of a sharded tensor, as plain FP32 values."""
    return wholes({"it": tensor})["it"]


def wholes(tensors):
    """The same of many by name, which processes send each other in one message."""
    local = {name: local_shard(tensor) for name, tensor in tensors.items()}
    values = {
        name: (t.dequantize() if isinstance(t, QuantizedTensor) else t.detach()).float().cpu().clone()
        for name, t in local.items()
    }
    sharded = [name for name, t in local.items() if t is not tensors[name]]
    groups = {mesh.get_group(mesh.ndim - 1) for mesh in (tensors[name].device_mesh for name in sharded)}
    for group in groups:  # one model has one
        parts = [None] * dist.get_world_size(group)
        dist.all_gather_object(parts, [values[name] for name in sharded], group)
        values |= {name: torch.cat(rows) for name, *rows in zip(sharded, *parts, strict=True)}
    assert len(groups) <= 1
    return values


def weights_of(module):
    """Those that count: masters where there are some."""
    return wholes({n: getattr(p, "master_weight", p) for n, p in module.named_parameters()})


class Watch(Callback):
    def __init__(self):
        self.grads, self.weights, self.kinds = [], {}, {}

    def on_before_optimizer_step(self, trainer, module, optimizer):
        self.grads.append(wholes({n: p.grad for n, p in module.named_parameters() if p.grad is not None}))

    def on_train_end(self, trainer, module):
        self.weights = weights_of(module)
        self.kinds = {n: type(local_shard(p)).__name__ for n, p in module.named_parameters()}
        self.units = [n for n, m in module.named_modules() if isinstance(m, FSDPModule)]


def run(case, rank=None, net=Net, accumulate=1, strategy=None, callbacks=(), world=2, **options):
    backend, level = options.pop("backend", None), options.pop("level", {})
    model, watch = net(optimizer=linear_optimizer(case, 0.1)), Watch()
    if rank is not None:
        sharded = LowPrecisionShardedStrategy(**(strategy or {}))
        options |= {"devices": world, "strategy": sharded, "use_distributed_sampler": False}
    options["accumulate_grad_batches"] = accumulate if rank is not None else 2 * accumulate
    processes = (rank, world) if rank is not None else (0, 1)
    data = ResumableLoader(Samples(32), 8 // world, 3, *processes, global_batch_size=8 * accumulate)
    trainer(plugin_on(backend, case, **level), watch, *callbacks, **options).fit(model, data)
    return {"grads": watch.grads, "weights": watch.weights, "kinds": watch.kinds, "losses": model.losses,
            "units": watch.units}  # fmt: skip


def every_case(rank):
    found = {case: {name: run(case, rank, **options) for name, options in OPTIONS.items()} for case in ALL}
    for case in ALL:
        found[case]["blocks"] = run(case, rank, Blocks)
        found[case]["audits"] = {name: audit(case, rank, strategy) for name, strategy in AUDITED.items()}
    return found | {"ways": ways(rank)}


class Groups(Callback):
    def on_train_end(self, trainer, module):
        self.found = {p.device_mesh.get_group() for p in module.parameters() if isinstance(p, DTensor)}


def ways(rank):
    """The processes of the group that carries FP8 gradients, and whether weights are gathered by it, too."""
    sent, groups, collective = set(), Groups(), dist.all_to_all_single

    def watched(*args, group, **options):
        sent.add(group)
        return collective(*args, group=group, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_to_all_single", watched)
        run("msamp_o2", rank, callbacks=[groups], max_steps=1)
    return {"by": [dist.get_process_group_ranks(group) for group in sent], "shared": bool(sent & groups.found)}


AUDITED = {"zero3": {}, "zero2": {"reshard_after_forward": False}, "hybrid": {"shard_size": 1}}


def audit(case, rank, strategy, **options):
    watch = Audit()
    run(case, rank, strategy=strategy, callbacks=[watch], max_steps=2, **options)
    report = watch.report
    found = [(f.column, f.part, f.declared, f.observed, f.bytes_per_param) for f in report.findings]
    return {"findings": found, "agrees": report.agrees, "bytes": report.total_bytes}


def assert_audited(audits, case, name):
    """Of all processes."""
    level = level_of(case)
    for found in audits:
        assert found["agrees"], found["findings"]
        for column, part, _, observed, size in found["findings"]:  # none is left out
            if column not in ("Computation (GEMM)", "Comm") and observed != "–":
                assert size >= {"fp32": 4, "fp16": 2, "bf16": 2, "fp8": 1}[observed], (column, part)
        comm = {part: (declared, size) for column, part, declared, _, size in found["findings"] if column == "Comm"}
        assert set(comm) == ({"matrices", "vectors"} if level.vectors else {"all"})
        # Of two processes each sends half of every gradient to its shard, or half of it twice to be averaged in place.
        share = 1 if name == "hybrid" else 0.5
        bytes_of = {"fp32": 4, "fp16": 2, "fp8": 288 * 129 / (128 * 32 + 128 * 128 + 32 * 128)}
        for part, (declared, size) in comm.items():
            assert size == pytest.approx(share * bytes_of[declared], rel=0.01), part


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What every case returned on each of two processes, all run by one pair of them."""
    return on_processes(2, tmp_path_factory.mktemp("ranks"), every_case)


def test_gradients_travel_beside_the_weights_that_are_gathered(ranks):
    assert [found["ways"] for found in ranks] == [{"by": [[0, 1]], "shared": False}] * 2


@functools.cache
def of_one_process(case, **options):
    return run(case, **options)


def alone(case, name):
    """One process has no strategy: it runs once for all of them."""
    options = {k: v for k, v in OPTIONS.get(name, {"net": Blocks}).items() if k != "strategy"}
    return of_one_process(case, **options)


@AT_CASES
@pytest.mark.parametrize("name", [*OPTIONS, "blocks"])
def test_gradients_and_weights_are_those_of_one_process(ranks, case, name):
    """FP8 gradients: two roundings to nearest on the way, where one process rounds the sum once, stochastically."""
    got, want = ranks[0][case][name], alone(case, name)
    assert_same(got["grads"], ranks[1][case][name]["grads"])
    bound = 0.3 if case in RANDOM else 0.12 if is_low_bit(case) else 2**-9 if level_of(case).comm == "fp16" else 2**-20
    assert got["grads"][0].keys() == want["grads"][0].keys()
    for key, value in want["grads"][0].items():
        assert (got["grads"][0][key] - value).norm() <= bound * value.norm() + 1e-12, key
    for key, value in want["weights"].items():  # biases start from zero: they are sums of such gradients
        of_sums = 2 * bound if is_low_bit(case) else max(bound, 0.02)
        assert (got["weights"][key] - value).norm() <= of_sums * value.norm() + 1e-6, key


@AT_CASES
def test_shards_are_the_masters(ranks, case):
    level, fp8_params = level_of(case), case.endswith("fp8_params")
    kinds = ranks[0][case]["blocks"]["kinds"]
    converted = {"inp.weight", "mid.weight", "blocks.0.1.weight", "blocks.1.0.3.weight"}
    for name, kind in kinds.items():
        matrix = name.endswith("weight") and "norm" not in name and name not in ("blocks.0.0.weight",)
        if not level.is_low_bit:
            assert kind == ("PlainShard" if fp8_params and name in converted else kind)
        elif name in converted:
            assert kind == (BlockShard if level.master_weight else HalfShard).__name__, name
        elif name in ("head.weight", "odd.weight") and matrix:
            assert kind == HalfShard.__name__, name
        elif "bias" in name or name == "gain":
            assert kind == "Tensor", name
    if fp8_params:
        assert kinds["mid.weight"] == PlainShard.__name__


@AT_CASES
@pytest.mark.parametrize("name", list(AUDITED))
def test_a_sharded_run_is_found_to_do_what_the_chart_declares(ranks, case, name):
    assert_audited([rank[case]["audits"][name] for rank in ranks], case, name)


def two_copies(rank):
    return {
        case: [run(case, rank, Blocks, strategy={"shard_size": size}, world=4) for size in (2, 4)] for case in OF_FOUR
    }


OF_FOUR = ["msamp_o2", "msamp_o3", "fp16_mixed", "bf16_with_fp8_mixed+fp8_params"]


def test_two_copies_of_two_shards_train_as_four_shards(tmp_path):
    ranks = on_processes(4, tmp_path, two_copies)
    for case in OF_FOUR:
        first, *others = (rank[case][0] for rank in ranks)
        for other in others:
            assert_same(first["grads"], other["grads"])
            assert_same(first["weights"], other["weights"])
        # Of FP8, a rounding more than without copies, on the way between them.
        bound = 0.15 if is_low_bit(case) else 2**-9
        for name, value in ranks[0][case][1]["grads"][0].items():
            assert (first["grads"][0][name] - value).norm() <= bound * value.norm() + 1e-12, (case, name)


def test_blocks_are_units_and_containers_are_descended_into(ranks):
    assert ranks[0]["bf16_mixed"]["blocks"]["units"] == ["", "blocks.0", "blocks.1.0", "blocks.2"]
    assert [type(b) for b in blocks_of(Net())] == []
