"""Plain loops on two processes of gloo: torch's DDP, and ``all_reduce_grads`` without it."""

import copy
import gc
import warnings
import weakref
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import nemo_lowprec
from nemo_lowprec.comm.buckets import Fp8Bucket
from nemo_lowprec.tensors import GradientTensor, QuantizedTensor
from tests.processes import on_processes

LEVELS = ["O1", "O2", "O3"]
AT_LEVELS = pytest.mark.parametrize("level", LEVELS)


class Net(nn.Module):
    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.conv = nn.Conv2d(1, 4, 3, padding=1)
        self.norm = nn.LayerNorm(64)
        self.mid = nn.Linear(64, 128)
        self.frozen = nn.Linear(128, 128)
        self.frozen.requires_grad_(False)
        self.unused = nn.Linear(16, 16)
        self.head = nn.Linear(128, 10)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        x = self.norm(self.conv(x).mean(1).flatten(1))
        return self.head(torch.tanh(self.frozen(torch.tanh(self.mid(x)))))


def batch(rank, part):
    generator = torch.Generator().manual_seed(10 * rank + part)
    return torch.randn(8, 1, 8, 8, generator=generator), torch.randint(0, 10, (8,), generator=generator)


def backward(model, rank, part, parts=1):
    x, y = batch(rank, part)
    (nn.functional.cross_entropy(model(x), y) / parts).backward()


def read(tensor):
    return tensor.detach().dequantize() if isinstance(tensor, QuantizedTensor) else tensor.detach().clone()


def grads(model):
    return {n: read(p.grad) for n, p in model.named_parameters() if p.grad is not None}


def weights(model):
    return {n: read(getattr(p, "master_weight", p)) for n, p in model.named_parameters()}


def make(rank, level, ddp=True, same=False, **options):
    model = Net(0 if same else rank)
    model, optimizer = nemo_lowprec.initialize(
        model, torch.optim.AdamW(model.parameters(), lr=1e-2), opt_level=level, **options
    )
    wrapped = DistributedDataParallel(model, find_unused_parameters=True) if ddp else model
    return model, optimizer, wrapped


# What runs on each process.


def accumulated(rank, level):
    """Gradients of two micro-batches, by DDP (the first under no_sync) and without."""
    sent, launch = [], Fp8Bucket.launch
    Fp8Bucket.launch = lambda bucket: (sent.append(len(bucket.params)), launch(bucket))
    try:
        model, _, wrapped = make(rank, level, same=True)
        for part in range(2):
            with wrapped.no_sync() if part == 0 else nullcontext():
                backward(wrapped, rank, part, 2)
            if part == 0:
                local = grads(model)
        by_ddp, calls = grads(model), list(sent)
    finally:
        Fp8Bucket.launch = launch
    model, optimizer, _ = make(rank, level, ddp=False, same=True)
    for part in range(2):
        backward(model, rank, part, 2)
    own = grads(model)
    optimizer.all_reduce_grads(model)
    kinds = {n: isinstance(p.grad, GradientTensor) for n, p in model.named_parameters()}
    return {"local": local, "ddp": by_ddp, "own": own, "reduced": grads(model), "calls": calls, "kinds": kinds}


def trained(rank, level):
    """Weights after some steps of DDP from different initial ones, with a GradScaler and an overflow on one process."""
    model, optimizer, wrapped = make(rank, level, stochastic_rounding=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    with torch.no_grad():
        wrapped(batch(0, 0)[0])
    start, losses = weights(model), []
    for part in range(6):
        optimizer.zero_grad()
        x, y = batch(rank, part % 2)
        with torch.autocast("cpu", dtype=torch.float16):
            output = wrapped(x)
        loss = nn.functional.cross_entropy(output.float(), y)
        spoil = float("inf") if (part, rank) == (3, 1) else 1.0
        scaler.scale(loss * spoil).backward()
        scaler.unscale_(optimizer)
        nemo_lowprec.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    steps = {n: float(optimizer.state[p]["step"]) for n, p in model.named_parameters() if p in optimizer.state}
    return {"start": start, "end": weights(model), "losses": losses, "scale": scaler.get_scale(), "steps": steps}


def spoiled(rank, level):
    """Weights and scales after steps whose gradients a hook spoils on one process once they are averaged."""
    found = {}
    for name, ddp in ((n, ddp) for n in ("mid.weight", "head.bias") for ddp in (True, False)):
        model, optimizer, wrapped = make(rank, level, ddp, same=True)
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
        for part in range(4):
            optimizer.zero_grad()
            x, y = batch(rank, part % 2)
            scaler.scale(nn.functional.cross_entropy(wrapped(x), y)).backward()
            if not ddp:
                optimizer.all_reduce_grads(model)
            if (part, rank) == (2, 1):
                model.get_parameter(name).grad.mul_(torch.inf)
            if part % 2:
                scaler.unscale_(optimizer)
                nemo_lowprec.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
        steps = sorted({float(s["step"]) for s in optimizer.state.values()})
        histories = optimizer.state_dict()["fp8_histories"]["updates"]
        found[f"{name} {ddp}"] = {"end": weights(model), "rest": (scaler.get_scale(), steps, histories)}
    return found


def apart(rank, level):
    """Weights and buffers of processes with other seeds, after steps without DDP: averaged, whole or by parts; not."""
    found = {}
    for name, parts in {"whole": [""], "parts": ["conv", "norm", "mid", "unused", "head"], "never": []}.items():
        model, optimizer, _ = make(rank, level, ddp=False)
        model.count.fill_(rank)
        caught = []
        for part in range(3):
            optimizer.zero_grad()
            backward(model, rank, part)
            own = grads(model)
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                for each in parts:
                    optimizer.all_reduce_grads(model.get_submodule(each))
            caught.append(sum("others than those of the first" in str(w.message) for w in said))
            averaged = grads(model)
            optimizer.step()
        found[name] = {"end": weights(model), "count": model.count, "warned": caught, "grads": (own, averaged)}
    return found


def others(rank, level):
    """Processes with models of other sizes, on purpose: nothing is exchanged."""
    torch.manual_seed(rank)
    model, optimizer = nemo_lowprec.initialize(nn.Linear(64, 64 * (1 + rank)), opt_level=level)
    for _ in range(1 + rank):
        model(torch.ones(2, 64)).square().mean().backward()
        optimizer.step()
    return weights(model)


def fully_sharded(model, **options):
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"), **options)


def refused(rank, level):
    """What each wrapper is told, before and after initialize."""
    found, parallelize = {}, {"0": ColwiseParallel(), "2": RowwiseParallel()}
    plain = lambda: nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))  # noqa: E731
    before = {
        "FSDP1": lambda: fully_sharded(plain()),
        "FSDP1's own parameters": lambda: fully_sharded(plain(), use_orig_params=True),
        "FSDP1 within": lambda: nn.Sequential(plain(), fully_sharded(plain())),
        "DataParallel": lambda: nn.DataParallel(plain()),
        "DeepSpeed": lambda: type("Engine", (nn.Sequential,), {"__module__": "deepspeed.runtime.engine"})(plain()),
        "tensor-parallel": lambda: parallelize_module(plain(), init_device_mesh("cpu", (2,)), parallelize),
    }
    for name, wrap in before.items():
        model = wrap()
        found[name] = told(lambda: nemo_lowprec.initialize(model, opt_level=level))  # noqa: B023
    after = {
        "FSDP1 after": fully_sharded,
        "FSDP1's own parameters after": lambda model: fully_sharded(model, use_orig_params=True),
        "FSDP1 within after": lambda model: (setattr(model, "2", fully_sharded(model[2])), model)[1],
        "FSDP2 after": fully_shard,
        "DataParallel after": lambda model: model._replicate_for_data_parallel(),
    }
    for name, wrap in after.items():
        model, _ = nemo_lowprec.initialize(plain(), opt_level=level)
        found[name] = told(lambda: wrap(model)(torch.ones(2, 64)))  # noqa: B023
    model, optimizer = nemo_lowprec.initialize(plain(), opt_level=level)
    found["none of its"] = told(lambda: optimizer.all_reduce_grads(plain()))
    return found


def told(act):
    try:
        act()
    except ValueError as error:
        return str(error)
    return ""


def released(rank, level):
    try:
        _, _, wrapped = make(rank, level, gradient_release=True)
        wrapped(batch(rank, 0)[0])
    except ValueError as error:
        return str(error)
    return ""


def wrapped_before(rank, level):
    model = DistributedDataParallel(Net(0))
    before = [type(m) for m in model.modules()]
    optimizer = torch.optim.AdamW(model.parameters())
    try:
        nemo_lowprec.initialize(model, optimizer, opt_level=level)
    except ValueError as error:
        same = [type(m) for m in model.modules()] == before and type(optimizer) is torch.optim.AdamW
        return str(error) if same else "changed"
    return ""


class Gated(nn.Module):
    """The first process uses its layers, the other one only vectors; no process uses a bias."""

    def __init__(self, rank):
        super().__init__()
        torch.manual_seed(0)
        self.rank, self.gain = rank, nn.Parameter(torch.ones(64))
        self.body = nn.Linear(64, 64, bias=False)

    def forward(self, x):
        x = x.flatten(1) * self.gain
        return self.body(x) if self.rank == 0 else x


class Recomputed(nn.Module):
    """Every layer in reentrant checkpointing, whose gradients come in backward passes of their own."""

    def __init__(self, _):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))

    def forward(self, x):
        x = x.flatten(1).requires_grad_()
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=True)
        return x


def without_vectors(_):
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 128, bias=False), nn.Tanh(), nn.Linear(128, 64, bias=False))


def others_between(model, wrapped, rank):
    """An evaluation and a forward of the bare module before the backward."""
    loss = wrapped(batch(rank, 0)[0]).square().mean()
    with torch.no_grad():
        wrapped(batch(rank, 1)[0])
    model(batch(rank, 1)[0])
    loss.backward()


def plainly(model, wrapped, rank):
    wrapped(batch(rank, 0)[0]).square().mean().backward()


def unfrozen_later(model, wrapped, rank):
    model[3].requires_grad_(True)
    plainly(model, wrapped, rank)


def freeze_last(rank):
    model = without_vectors(rank)
    model[3].requires_grad_(False)
    return model


UNUSUAL = {
    "gated": (Gated, plainly),
    "recomputed": (Recomputed, plainly),
    "without_vectors": (without_vectors, plainly),
    "others_between": (Recomputed, others_between),
    "unfrozen_later": (freeze_last, unfrozen_later),
}


def unusual(rank, level):
    """By case: each process's own gradients and the averaged ones; and what a copy and a second DDP do."""
    found = {}
    for name, (make, run) in UNUSUAL.items():
        grads_of = []
        for ddp in (False, True):
            model, _ = nemo_lowprec.initialize(make(rank), opt_level=level)
            run(model, DistributedDataParallel(model) if ddp else model, rank)
            grads_of.append(grads(model))
        found[name] = grads_of
        copy.deepcopy(model)
    with torch.no_grad():
        model[1].weight.mul_(1.0 + rank)
    DistributedDataParallel(model)(batch(rank, 0)[0])
    return found, weights(model)


CASES = {
    f.__name__: f for f in (accumulated, trained, spoiled, apart, others, refused, released, wrapped_before, unusual)
}


def every_case(rank):
    return {name: {level: case(rank, level) for level in LEVELS} for name, case in CASES.items()}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What every case returned on each of two processes, all run by one pair of them."""
    return on_processes(2, tmp_path_factory.mktemp("ranks"), every_case)


# What is asserted of it.


def assert_equal(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


@AT_LEVELS
def test_gradients_are_the_same_on_both_with_and_without_ddp(ranks, level):
    first, second = (rank["accumulated"][level] for rank in ranks)
    for key in ("ddp", "reduced"):
        assert_equal(first[key], second[key])
    unused = {"unused.weight", "unused.bias"}
    for name in first["ddp"].keys() - unused:
        assert torch.equal(first["ddp"][name], first["reduced"][name]), name


@AT_LEVELS
def test_no_sync_averages_once_and_all_of_it(ranks, level):
    first, second = (rank["accumulated"][level] for rank in ranks)
    assert first["calls"] == second["calls"] == [4]  # conv, mid, unused, head
    for name, value in first["local"].items():  # nothing was sent yet
        assert not torch.equal(value, second["local"][name]), name
    names = [n for n, _ in Net(0).named_parameters() if not n.startswith(("frozen", "unused"))]
    assert set(first["own"]) == set(names) == set(first["reduced"])
    for name in names:
        mean = (first["own"][name] + second["own"][name]) / 2
        error = (first["ddp"][name] - mean).abs()
        if first["kinds"][name]:
            assert (error <= mean.abs() * 2**-4 + mean.abs().max() * 2**-17).all(), name
            assert torch.equal(first["ddp"][name], GradientTensor.from_float(mean).dequantize()), name
        else:
            assert (error <= 1e-6 * mean.abs().max()).all(), name
    assert first["kinds"]["conv.weight"] and not first["kinds"]["norm.weight"]


@AT_LEVELS
def test_the_mean_is_the_gradient_of_one_big_batch(ranks, level):
    plain = Net(0)
    parts = [batch(rank, part) for rank in range(2) for part in range(2)]
    x, y = (torch.cat(t) for t in zip(*parts, strict=True))
    nn.functional.cross_entropy(plain(x), y).backward()
    for name, want in grads(plain).items():
        if name != "conv.bias":  # which the norm takes out again
            got = ranks[0]["accumulated"][level]["ddp"][name]
            assert (got - want).norm() <= 0.2 * want.norm(), name


@AT_LEVELS
def test_ddp_starts_and_ends_with_the_same_weights_and_learns(ranks, level):
    first, second = (rank["trained"][level] for rank in ranks)
    assert_equal(first["start"], second["start"])
    assert_equal(first["end"], second["end"])
    assert not torch.equal(first["end"]["mid.weight"], first["start"]["mid.weight"])
    for rank in (first, second):
        assert rank["losses"][-1] < 0.9 * rank["losses"][1]
        assert rank["scale"] == 128 and rank["steps"]["mid.weight"] == rank["steps"]["norm.bias"] == 5


@AT_LEVELS
def test_a_gradient_spoiled_on_one_process_skips_the_step_on_both(ranks, level):
    first, second = (rank["spoiled"][level] for rank in ranks)
    for name, found in first.items():
        assert found["rest"] == second[name]["rest"] == (128.0, [3.0], 4), name
        assert_equal(found["end"], second[name]["end"])
        assert all(value.isfinite().all() for value in found["end"].values())


@AT_LEVELS
@pytest.mark.parametrize("name", ["whole", "parts"])
def test_processes_that_average_without_ddp_get_the_weights_of_the_first(ranks, level, name):
    first, second = (rank["apart"][level][name] for rank in ranks)
    assert_equal(first["end"], second["end"])
    assert first["count"] == second["count"] == 0
    assert (first["warned"], second["warned"]) == ([0, 0, 0], [1, 0, 0])
    for key, got in first["grads"][1].items():
        mean = sum(each["grads"][0].get(key, torch.zeros_like(got)) for each in (first, second)) / 2
        assert ((got - mean).abs() <= mean.abs() * 2**-4 + mean.abs().max() * 2**-17).all(), key
        assert torch.equal(got, second["grads"][1][key]), key


@AT_LEVELS
def test_processes_that_average_nothing_stay_apart(ranks, level):
    first, second = (rank["apart"][level]["never"] for rank in ranks)
    assert (first["count"], second["count"]) == (0, 1)
    assert not torch.equal(first["end"]["mid.weight"], second["end"]["mid.weight"])
    assert [rank["others"][level]["weight"].shape for rank in ranks] == [(64, 64), (128, 64)]


@AT_LEVELS
def test_wrappers_that_take_parameters_away_are_refused_with_the_way_out(ranks, level):
    for rank in ranks:
        found = rank["refused"][level]
        for name in ("FSDP1", "FSDP1's own parameters", "FSDP1 within"):
            assert "FullyShardedDataParallel (FSDP1)" in found[name] and "strategy='lowprec_sharded'" in found[name]
        assert "wrapped in DataParallel" in found["DataParallel"] and "DistributedDataParallel" in found["DataParallel"]
        assert "Leave DeepSpeed out" in found["DeepSpeed"]
        assert found["tensor-parallel"].startswith("0.weight is a DTensor")
        assert "FSDP gives it such" in found["FSDP1's own parameters after"]
        assert "are sharded (by fully_shard)" in found["FSDP2 after"]
        for name in ("FSDP1 after", "FSDP1 within after"):
            assert found[name].startswith("FSDP has taken the parameters"), name
        assert found["DataParallel after"].startswith("DataParallel computes with copies")
        assert found["none of its"].startswith("This module has parameters that are none of the model's")


@AT_LEVELS
def test_what_cannot_go_together_is_refused(ranks, level):
    for rank in ranks:
        assert "gradient_release=True steps before gradients are averaged" in rank["released"][level]
        assert rank["wrapped_before"][level] == "Prepare the model before DistributedDataParallel wraps it."


@AT_LEVELS
@pytest.mark.parametrize("name", UNUSUAL)
def test_every_matrix_is_averaged_in_one_rounding_whatever_the_loop_does(ranks, level, name):
    (own, first), (other, second) = (rank["unusual"][level][0][name] for rank in ranks)
    assert_equal(first, second)
    assert set(first) == set(own) | set(other)
    for key, got in first.items():
        mean = sum(each.get(key, torch.zeros_like(got)) for each in (own, other)) / 2
        error = (got - mean).abs()
        assert (error <= mean.abs() * 2**-4 + mean.abs().max() * 2**-17).all(), key


@AT_LEVELS
def test_another_ddp_gives_every_process_the_same_weights_again(ranks, level):
    assert_equal(*(rank["unusual"][level][1] for rank in ranks))


def let_go_of(rank, level, ddp):
    """How many parameters and models are left of one that was trained and let go of."""

    def trained():
        model, optimizer, wrapped = make(rank, level, ddp)
        backward(wrapped, rank, 0)
        if not ddp:
            optimizer.all_reduce_grads(model)
        optimizer.step()
        return [weakref.ref(thing) for thing in (model, *model.parameters())]

    left = trained()
    gc.collect()
    return sum(ref() is not None for ref in left)


@pytest.mark.parametrize("ddp", [True, False], ids=["ddp", "all_reduce_grads"])
def test_a_model_that_is_let_go_of_is_freed(ddp, tmp_path):
    assert on_processes(2, tmp_path, let_go_of, "O2", ddp) == [0, 0]
