"""Plain loops on two processes of gloo: torch's DDP, and ``all_reduce_grads`` without it."""

import copy
import gc
import weakref
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import nemo_lowprec
from nemo_lowprec.comm.buckets import Fp8Bucket
from nemo_lowprec.formats import GradientTensor, StoredTensor
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
    return tensor.detach().dequantize() if isinstance(tensor, StoredTensor) else tensor.detach().clone()


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


CASES = {f.__name__: f for f in (accumulated, trained, released, wrapped_before, unusual)}


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
def test_what_cannot_go_together_is_refused(ranks, level):
    for rank in ranks:
        assert "gradient_release=True steps before gradients are averaged" in rank["released"][level]
        assert rank["wrapped_before"][level] == "Call initialize before DistributedDataParallel wraps the model."


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
