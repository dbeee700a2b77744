"""FP8 gradients averaged over two processes of gloo."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from nemo_lowprec.comm import GradientReducer, broadcast_weights
from nemo_lowprec.formats import E4M3, FP16
from nemo_lowprec.tensors import BlockScaledTensor, Fp8Weight, Fp16Weight, GradientTensor
from tests.processes import on_processes

SHAPES = [(8, 300), (4, 128), (1, 1), (3, 2, 5, 5), (37, 129), (0, 4)]


def wire(param):
    return torch.float8_e4m3fn if param.dim() > 1 else torch.float32


def average_gradients(params, group=None, **options):
    GradientReducer(params, group, wire, **options).reduce()


def every_case(rank):
    return {name: case(rank) for name, case in CASES.items()}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What every case returned on each of two processes, all run by one pair of them."""
    return on_processes(2, tmp_path_factory.mktemp("ranks"), every_case)


def randn(shape, seed, rank):
    return torch.randn(shape, generator=torch.Generator().manual_seed(100 * rank + seed)) * 10.0**-seed


def make(rank, shapes=SHAPES):
    params = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
    for i, param in enumerate(params):
        param.grad_dtype = None
        param.grad = GradientTensor.from_float(randn(param.shape, i, rank))
    return params


def bits(grad):
    return [p.view(torch.uint8) if p.element_size() == 1 else p for p in grad.parts()]


def result(params):
    grads = [p.grad for p in params]
    read = [g.dequantize() if isinstance(g, GradientTensor) else g for g in grads]
    return {"read": read, "bits": [bits(g) if isinstance(g, GradientTensor) else [g] for g in grads]}


# What runs on each process.


def run_average(rank):
    params = make(rank)
    average_gradients(params)
    return result(params)


def run_factors(rank):
    params = make(rank)
    for param in params:
        param.grad.mul_(0.3 + rank)
    average_gradients(params)
    return result(params)


def run_many_buckets(rank):
    params = make(rank)
    reducer = GradientReducer(params, None, wire, bucket_bytes=600)
    reducer.reduce()
    return {**result(params), "sizes": [len(b.params) for b in reducer._buckets]}


def run_missing(rank):
    params = make(rank)
    params[rank].grad = None  # each is missing on one
    params[3].grad = None  # on both
    params.append(nn.Parameter(torch.zeros(5)))
    if rank == 1:
        params[-1].grad = torch.full((5,), 4.0)
    params.append(nn.Parameter(torch.zeros(4, 4), requires_grad=False))
    average_gradients(params)
    unused = params.pop(3)
    assert unused.grad is None and params[-1].grad is None
    return result(params[:-1])


def put_infinity(param):
    """Put an infinite value into the FP8 gradient of ``param``."""
    values = param.grad.dequantize()
    values[2, 150] = float("inf")
    param.grad = GradientTensor.from_float(values)


def run_not_finite(rank):
    params = make(rank)
    if rank == 1:
        put_infinity(params[0])
    average_gradients(params)
    return result(params) | {"flags": [float(p.grad.nonfinite) for p in params]}


def run_abandoned(rank):
    """A backward pass fails; the next one is none that averages."""
    param = nn.Parameter(torch.ones(300))
    reducer = GradientReducer([param], None, lambda _: torch.float32)
    for _ in range(2):  # the second sends as soon as it can
        param.grad = None
        reducer.begin()
        (param * (rank + 1.0)).sum().backward()
        reducer.finish()
    averaged = param.grad.clone()
    reducer.begin()
    reducer.abandon()
    param.grad = None
    (param * (rank + 1.0)).sum().backward()
    return {"averaged": averaged, "own": param.grad}


def run_overlap(rank):
    """Buckets that were sent when each of four gradients was there; in the first pass, which learns, and the second."""
    params = [nn.Parameter(torch.ones(300)) for _ in range(4)]
    reducer = GradientReducer(params, None, lambda _: torch.float32, bucket_bytes=1)
    seen = []
    for _ in range(2):
        x, sent = torch.ones(300, requires_grad=True), []
        for param in params:
            param.grad, x = None, x * param
            x.register_hook(lambda _, sent=sent: sent.append(reducer._launched))
        reducer.begin()
        x.sum().backward()
        reducer.finish()
        seen.append(sent)
    return {"sent": seen, "buckets": len(reducer._buckets)}


def run_vectors(rank):
    params = make(rank)
    shapes = [(5,), (), (300,)]
    for i, shape in enumerate(shapes):
        params.insert(2 * i, nn.Parameter(torch.zeros(shape)))
        params[2 * i].grad = randn(shape, i, rank)
    average_gradients(params)
    return {"vectors": [params[2 * i].grad for i in range(len(shapes))]}


def run_zeros(rank):
    params = make(rank, [(8, 300)])
    params[0].grad.zero_()
    for _ in range(50):
        average_gradients(params)
    return result(params)


def run_twice(rank):
    params = make(rank)
    average_gradients(params)
    once = result(params)
    average_gradients(params)
    return {"once": once["read"], "twice": result(params)["read"]}


def run_broadcast(rank):
    torch.manual_seed(rank)
    plain, half, low = nn.Parameter(torch.randn(4, 4)), torch.randn(8, 128), torch.randn(8, 128)
    cast = nn.Parameter(Fp16Weight.from_float(half, torch.float32))
    fp8 = nn.Parameter(Fp8Weight.from_float(low, E4M3, torch.float32))
    fp8.master_weight = BlockScaledTensor.from_float(low, FP16)
    broadcast_weights([plain, cast, fp8])
    parts = [plain.detach(), *bits(cast), *bits(fp8), *bits(fp8.master_weight)]
    return {"parts": [p.detach().clone() for p in parts], "same": torch.equal(plain.detach(), torch.randn(4, 4))}


def run_groups(rank):
    alone = [dist.new_group([r]) for r in range(2)][rank]
    params = make(rank)
    before = result(params)["read"]
    average_gradients(params, alone)
    return {"same": all(torch.equal(a, b) for a, b in zip(before, result(params)["read"], strict=True))}


CASES = {name.removeprefix("run_"): function for name, function in list(globals().items()) if name.startswith("run_")}


# What is asserted of it.


def exact_mean(change=lambda grads, rank: grads, shapes=SHAPES):
    """FP32 means of the values that the processes stored."""
    grads = [change([p.grad.dequantize() for p in make(rank, shapes)], rank) for rank in range(2)]
    return [(a + b) / 2 for a, b in zip(*grads, strict=True)]


def assert_close(got, want):
    """Within one rounding of E4M3: 2**-4 of an element, or half of the smallest step in its block."""
    for a, b in zip(got, want, strict=True):
        if b.numel():
            assert ((a - b).abs() <= b.abs() * 2**-4 + b.abs().max() * 2**-17).all()


def assert_same_bits(ranks, case):
    for a, b in zip(ranks[0][case]["bits"], ranks[1][case]["bits"], strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_the_mean_within_one_rounding_of_what_is_stored(ranks):
    """The other of the two roundings was the storing."""
    assert_close(ranks[0]["average"]["read"], exact_mean())
    full = [(randn(s, i, 0) + randn(s, i, 1)) / 2 for i, s in enumerate(SHAPES)]
    for got, want in zip(ranks[0]["average"]["read"], full, strict=True):
        if want.numel() > 1:
            assert (got - want).norm() <= 0.06 * want.norm()


def test_the_mean_is_the_rounding_of_the_sum_in_fp32(ranks):
    for got, want in zip(ranks[0]["average"]["read"], exact_mean(), strict=True):
        assert torch.equal(got, GradientTensor.from_float(want).dequantize())


@pytest.mark.parametrize("case", ["average", "factors", "many_buckets", "missing", "not_finite", "zeros"])
def test_bit_for_bit_the_same_on_both(ranks, case):
    assert_same_bits(ranks, case)


def test_factors_of_clipping_or_unscaling_count(ranks):
    want = exact_mean(lambda grads, rank: [GradientTensor.from_float(g * (0.3 + rank)).dequantize() for g in grads])
    for got, mean in zip(ranks[0]["factors"]["read"], want, strict=True):
        assert torch.equal(got, GradientTensor.from_float(mean).dequantize())


def test_buckets_change_nothing(ranks):
    assert ranks[0]["many_buckets"]["sizes"] == [2, 3, 1]
    for a, b in zip(ranks[0]["many_buckets"]["bits"], ranks[0]["average"]["bits"], strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_a_gradient_missing_on_one_process_counts_as_zero(ranks):
    def without(grads, rank):
        grads[rank] = torch.zeros_like(grads[rank])
        return [g for i, g in enumerate(grads) if i != 3]

    *stored, vector = ranks[0]["missing"]["read"]
    assert_close(stored, exact_mean(without))
    assert torch.equal(vector, torch.full((5,), 2.0))


def test_an_overflow_on_one_is_seen_on_both(ranks):
    for rank in ranks:
        case = rank["not_finite"]
        assert case["flags"] == [1, 0, 0, 0, 0, 0]
        assert case["read"][0].isnan().nonzero().tolist() == [[2, 150]]
        assert_close(case["read"][1:], exact_mean()[1:])


def test_buckets_are_sent_while_backward_goes_on(ranks):
    for rank in ranks:
        assert rank["overlap"] == {"sent": [[0, 0, 0, 0], [0, 1, 2, 3]], "buckets": 4}


def test_a_backward_pass_that_failed_averages_nothing_later(ranks):
    for i, rank in enumerate(ranks):
        assert rank["abandoned"]["averaged"].unique().tolist() == [1.5]
        assert rank["abandoned"]["own"].unique().tolist() == [i + 1.0]


def test_vectors_are_averaged_in_fp32(ranks):
    for i, (a, b) in enumerate(zip(ranks[0]["vectors"]["vectors"], ranks[1]["vectors"]["vectors"], strict=True)):
        assert a.dtype == torch.float32 and torch.equal(a, b)
        assert torch.equal(a, (randn(a.shape, i, 0) + randn(a.shape, i, 1)) / 2)


def test_zeros_stay_zeros_and_keep_their_scale(ranks):
    [[data, exponent, factor, nonfinite]] = ranks[0]["zeros"]["bits"]
    assert data.count_nonzero() == 0 and (exponent == 127).all() and (factor, nonfinite) == (1, 0)


def test_averaging_what_is_equal_already_changes_nothing(ranks):
    assert all(torch.equal(a, b) for a, b in zip(*(ranks[0]["twice"][k] for k in ("once", "twice")), strict=True))


def test_every_process_gets_the_first_ones_weights_and_masters(ranks):
    for a, b in zip(*(rank["broadcast"]["parts"] for rank in ranks), strict=True):
        assert torch.equal(a, b)


def test_a_group_of_one_averages_nothing(ranks):
    assert all(rank["groups"]["same"] for rank in ranks)
