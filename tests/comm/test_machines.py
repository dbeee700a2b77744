"""FP8 gradients averaged within machines and then between machines: four processes of gloo, two on each machine."""

import os

import pytest
import torch
import torch.distributed as dist
from torch import nn

from nemo_lowprec.comm import GradientReducer, exchange
from nemo_lowprec.comm.topology import Machines, backend_of, machines_by_rank, peer_access_is_off, second
from nemo_lowprec.comm.wire import Messages, Packer, mean_of_messages
from nemo_lowprec.compat.distributed import timeout_of
from nemo_lowprec.observers import Observer, Observers
from nemo_lowprec.tensors import GradientTensor
from tests.comm.test_reducer import SHAPES, assert_same_bits, make, put_infinity, randn, result, wire
from tests.processes import SECONDS, on_processes

LARGE = [(64, 512), (300, 129)]
WAYS = [("all_gather", False), ("all_to_all", True)]  # whether the group is the one that others use, too
PLACES = {"in turn": "aabb", "mixed": "abba", "alone": "abcd", "uneven": "aaab", "together": "aaaa"}


def placed(rank, places):
    os.environ["NCCL_HOSTID"] = PLACES[places][rank]
    # Machines are told apart once for each group.
    return dist.new_group(range(4))


def members(group):
    return dist.get_process_group_ranks(group)


def every_case(rank):
    return {name: case(rank) for name, case in CASES.items()}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What every case returned on each of four processes, all run by one set of them."""
    return on_processes(4, tmp_path_factory.mktemp("ranks"), every_case)


# What runs on each process.


def run_groups(rank):
    found = {}
    for places in PLACES:
        group = placed(rank, places)
        machines = Machines.of(group)
        assert Machines.of(group) is machines  # made once
        found[places] = None if machines is None else [members(machines.within), members(machines.across)]
    half = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    assert machines_by_rank(half) == ["a", "a"] and Machines.of(half) is None
    os.environ["NCCL_HOSTID"] = PLACES["in turn"][rank]
    both = dist.new_group(range(4), backend="cpu:gloo,cuda:gloo")  # as torch names what it chooses by itself
    found["both"] = Machines.of(both) is not None
    found["backends"] = [backend_of(group, device) for group in (both, None) for device in ("cpu", "cuda", "xpu")]
    return found


def averaged(rank, places, shapes=SHAPES, **options):
    params = make(rank, shapes)
    reducer = GradientReducer(params, placed(rank, places), wire, **options)
    reducer.reduce()
    return params, reducer


def run_average(rank):
    return result(averaged(rank, "in turn")[0])


def run_mixed(rank):
    return result(averaged(rank, "mixed")[0])


def run_flat(rank):
    return result(averaged(rank, "together", LARGE)[0])


def run_large(rank):
    return result(averaged(rank, "in turn", LARGE)[0])


def run_many_buckets(rank):
    params, reducer = averaged(rank, "in turn", bucket_bytes=600)
    return {**result(params), "sizes": [len(b.params) for b in reducer._buckets]}


def run_backward(rank):
    """Two passes of five buckets, two of them in FP32, that are sent while backward goes on."""
    params = [nn.Parameter(torch.zeros(s)) for s in [(8, 300), (5,), (4, 128), (7,), (37, 129)]]
    for param in params:
        if param.dim() > 1:
            param.grad_dtype = None
            param.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", GradientTensor.from_float(p.grad)))
    reducer = GradientReducer(params, placed(rank, "in turn"), wire, bucket_bytes=1)
    found = []
    for step in range(2):
        for param in params:
            param.grad = None
        factors = [randn(p.shape, i + 7 * step, rank) for i, p in enumerate(params)]
        reducer.begin()
        sum((p * f).sum() for p, f in zip(params, factors, strict=True)).backward()
        during = reducer._launched
        reducer.finish()
        found.append({**result(params), "during": during, "own": factors})
    return {"passes": found, "bits": found[1]["bits"], "buckets": len(reducer._buckets)}


def run_missing(rank):
    params = make(rank)
    if rank != 3:
        params[0].grad = None
    params[3].grad = None
    GradientReducer(params, placed(rank, "in turn"), wire).reduce()
    unused = params.pop(3)
    return result(params) | {"unused": unused.grad is None}


def run_not_finite(rank):
    params = make(rank)
    if rank == 1:
        put_infinity(params[0])
    GradientReducer(params, placed(rank, "in turn"), wire).reduce()
    return result(params) | {"flags": [float(p.grad.nonfinite) for p in params]}


class Seen(Observer):
    def __init__(self):
        self.messages, self.means = [], []

    def message(self, kind, tensor, bytes, purpose):
        self.messages.append((kind, tensor.numel(), purpose))

    def mean(self, received, own, layout, mean):
        self.means.append((layout.world, mean.numel()))


def run_observed(rank):
    observers, seen = Observers(), Seen()
    observers.add(seen)
    averaged(rank, "in turn", [(64, 256)], observers=observers)
    return {"messages": seen.messages, "means": seen.means}


def run_ways(rank):
    """The collectives of a pass, each with its group: its processes, and whether it has connections of its own."""
    ways = set()
    whole = placed(rank, "in turn")

    def watched(kind, collective):
        def call(*args, group, **options):
            machines = Machines.of(whole)
            ways.add((kind, tuple(members(group)), group in (whole, machines.within, machines.across)))
            return collective(*args, group=group, **options)

        return call

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_to_all_single", watched("all_to_all", dist.all_to_all_single))
        patch.setattr(exchange, "all_gather_single", watched("all_gather", exchange.all_gather_single))
        GradientReducer(make(rank), whole, wire, bucket_bytes=600).reduce()
    twin = second(whole)
    same = twin is second(whole) and members(twin) == members(whole)
    seconds = timeout_of(second(None), torch.device("cpu")).total_seconds()
    return {"ways": sorted(ways), "same": same, "timeout": seconds}


CASES = {name.removeprefix("run_"): function for name, function in list(globals().items()) if name.startswith("run_")}


# What is asserted of it.


def rounded(values):
    return GradientTensor.from_float(values).dequantize()


def reference(gradients, places):
    """The mean of each machine rounded once, and their mean rounded once more; of values as they are stored."""
    machines = {}
    for rank, place in enumerate(PLACES[places]):
        machines.setdefault(place, []).append(gradients[rank])
    means = [rounded((first + second) / 2) for first, second in machines.values()]
    return rounded((means[0] + means[1]) / 2)


def stored(shapes=SHAPES):
    """For each parameter, the gradients of the four processes."""
    return list(zip(*([p.grad.dequantize() for p in make(rank, shapes)] for rank in range(4)), strict=True))


def test_the_groups_of_machines(ranks):
    for rank, found in enumerate(one["groups"] for one in ranks):
        assert found["in turn"] == [[[0, 1], [2, 3]][rank // 2], [[0, 2], [1, 3]][rank % 2]]
        assert found["mixed"] == [[[0, 3], [1, 2], [1, 2], [0, 3]][rank], [[0, 1], [0, 1], [2, 3], [2, 3]][rank]]
        assert found["both"] and found["backends"] == ["gloo", "gloo", None] * 2
        assert found["alone"] is found["uneven"] is found["together"] is None


def test_the_means_travel_on_connections_of_their_own(ranks):
    for rank, found in enumerate(one["ways"] for one in ranks):
        levels = sorted([((0, 1), (2, 3))[rank // 2], ((0, 2), (1, 3))[rank % 2]])
        gathers, sends = ([(kind, level, shared) for level in levels] for kind, shared in WAYS)
        assert found["ways"] == [*gathers, *sends]
        assert found["same"] and found["timeout"] == SECONDS


@pytest.mark.parametrize(("case", "places"), [("average", "in turn"), ("mixed", "mixed")])
def test_the_mean_is_rounded_once_on_each_level(ranks, case, places):
    for got, gradients in zip(ranks[0][case]["read"], stored(), strict=True):
        assert torch.equal(got, reference(gradients, places))


@pytest.mark.parametrize("case", ["average", "mixed", "large", "many_buckets", "backward", "missing", "not_finite"])
@pytest.mark.parametrize("other", [1, 2, 3])
def test_bit_for_bit_the_same_on_all(ranks, case, other):
    assert_same_bits([ranks[0], ranks[other]], case)


def test_buckets_change_nothing(ranks):
    assert ranks[0]["many_buckets"]["sizes"] == [2, 3, 1]
    for a, b in zip(ranks[0]["many_buckets"]["bits"], ranks[0]["average"]["bits"], strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_the_error_beside_that_of_averaging_at_once(ranks):
    """Errors of independent gradients, as norms over that of the exact mean: each level's rounding adds as many squares
    as the rounding of the gradients, so there are three parts in place of two."""
    at_once, in_two = ranks[0]["flat"]["read"], ranks[0]["large"]["read"]
    for i, (one, two) in enumerate(zip(at_once, in_two, strict=True)):
        exact = torch.stack([randn(LARGE[i], i, rank) for rank in range(4)]).mean(0)
        first, second = (float((got - exact).norm() / exact.norm()) for got in (one, two))
        assert 0.034 < first < 0.042
        assert 1.15 < second / first < 1.3  # the root of 3 / 2


def test_means_of_a_backward_pass(ranks):
    for rank in ranks:
        assert rank["backward"]["buckets"] == 5
        first, second = rank["backward"]["passes"]
        assert (first["during"], second["during"]) == (0, 5)
    for step in range(2):
        passes = [rank["backward"]["passes"][step] for rank in ranks]
        for i, got in enumerate(passes[0]["read"]):
            own = [one["own"][i] for one in passes]
            if got.dim() == 1:  # summed in FP32, in the order of gloo
                assert torch.allclose(got, torch.stack(own).mean(0), rtol=0, atol=1e-6 * float(got.abs().max()))
            else:
                assert torch.equal(got, reference([rounded(g) for g in own], "in turn"))


def test_a_gradient_missing_on_some_processes_counts_as_zero(ranks):
    gradients = stored()
    first = [torch.zeros_like(g) for g in gradients[0][:3]] + [gradients[0][3]]
    assert torch.equal(ranks[0]["missing"]["read"][0], reference(first, "in turn"))
    assert all(rank["missing"]["unused"] for rank in ranks)


def test_an_overflow_on_one_is_seen_on_all(ranks):
    for rank in ranks:
        case = rank["not_finite"]
        assert case["flags"] == [1, 0, 0, 0, 0, 0]
        assert case["read"][0].isnan().nonzero().tolist() == [[2, 150]]


def test_a_machine_sends_the_bytes_of_one_process(ranks):
    """128 blocks: two messages of 64 blocks within a machine, and of each two messages of 32 blocks to the other."""
    whole, part, block = 2 * 64, 2 * 32, 129
    for rank in ranks:
        assert rank["observed"]["messages"] == [
            ("all_to_all", whole * block, "gradient"),
            ("all_reduce", 1, "flag"),
            ("all_to_all", part * block, "gradient"),
            ("all_gather", part // 2 * block, "gradient"),
            ("all_gather", whole // 2 * block, "gradient"),
        ]
        assert rank["observed"]["means"] == [(2, 64 * block), (2, 32 * block)]


def test_the_reference_of_the_wire_agrees():
    """``mean_of_messages`` twice, as processes call it, is the reference of this file."""
    gradients = [make(rank, [(64, 256)])[0].grad for rank in range(4)]
    layout = Messages.in_turn([torch.Size((64, 256))], 1)
    messages = torch.zeros(4, layout.bytes, dtype=torch.uint8)
    for gradient, message in zip(gradients, messages, strict=True):
        Packer(layout).pack([(gradient.data_blocks, gradient.exponent, gradient.nonfinite)], message.view(1, -1))
    two = Messages(layout.shapes, layout.first, layout.chunk, 2)
    means = torch.zeros(2, layout.bytes, dtype=torch.uint8)
    for machine in range(2):
        mean_of_messages(messages[2 * machine : 2 * machine + 2], two, means[machine])
    out = torch.zeros(layout.bytes, dtype=torch.uint8)
    mean_of_messages(means, two, out)
    got = GradientTensor.empty(torch.empty(64, 256, dtype=torch.float32))
    Packer(layout).unpack(out.view(1, -1), [(got.data_blocks, got.exponent, got.nonfinite)])
    assert torch.equal(got.dequantize(), reference([g.dequantize() for g in gradients], "in turn"))


@pytest.mark.parametrize(
    ("name", "value", "off"),
    [("NCCL_P2P_DISABLE", "1", True), ("NCCL_P2P_DISABLE", "0", False), ("NCCL_P2P_LEVEL", "LOC", True),
     ("NCCL_P2P_LEVEL", "0", True), ("NCCL_P2P_LEVEL", "NVL", False)],
)  # fmt: skip
def test_gpus_that_nccl_keeps_apart(monkeypatch, name, value, off):
    for variable in ("NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL"):
        monkeypatch.delenv(variable, raising=False)
    assert not peer_access_is_off()
    monkeypatch.setenv(name, value)
    assert peer_access_is_off() is off
