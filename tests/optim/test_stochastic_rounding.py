"""Stochastic rounding: unbiased, a function of seed, step, tensor and element, and right at the ends of the formats."""

import pytest
import torch
from low_bit import all_bits, make_params, run, values
from numerics import grid
from support import assert_same

from nemo_lowprec.formats.stochastic import round_stochastic, salt_of
from nemo_lowprec.optim import AdamW
from nemo_lowprec.tensors import GradientTensor

DTYPES = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
INF, NAN = float("inf"), float("nan")


def many(value, dtype, count=40_000, seed=0):
    return round_stochastic(torch.full((count,), value), dtype, salt_of(seed, 1, 0)).double()


def neighbours(value, dtype):
    """The numbers of the format around a value."""
    if dtype == torch.float8_e4m3fn:
        numbers = torch.from_numpy(grid("e4m3"))
        numbers = torch.cat([-numbers.flip(0), numbers[1:]])
        at = int(torch.searchsorted(numbers, value))
        return numbers[at - 1].item(), numbers[at].item()
    near = torch.tensor(value).to(dtype)
    way = torch.tensor(INF if near.double() < value else -INF, dtype=dtype)
    return sorted((near.double().item(), torch.nextafter(near, way).double().item()))


VALUES = [1.0003, -1.0003, 0.7003, 3.1415927, -1234.56, 1e-3, 2.0**-14 * 1.0007, 2.0**-15 * 1.003, 3.3e-7, -3e-8]
E4M3_VALUES = [1.03, -1.03, 0.7003, 3.1415927, -123.4, 447.9, 2.0**-6 * 1.07, 2.0**-7 * 1.03, -1.3e-3, 4e-4]


@pytest.mark.parametrize(
    "dtype,value",
    [(dtype, value) for dtype in (torch.float16, torch.bfloat16) for value in VALUES]
    + [(torch.float8_e4m3fn, value) for value in E4M3_VALUES],
)
def test_rounds_to_a_neighbour_and_unbiased(dtype, value):
    rounded = many(value, dtype)
    value = torch.tensor(value).double().item()
    low, high = neighbours(value, dtype)
    assert set(rounded.unique().tolist()) <= {low, high}
    share = (value - low) / (high - low)
    up = float((rounded == high).double().mean())
    assert abs(up - share) < 5 * (share * (1 - share) / len(rounded)) ** 0.5 + 1e-4


@DTYPES
def test_every_number_of_the_format_stays(dtype):
    numbers = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    numbers = numbers[numbers.isfinite()]
    for seed in range(3):
        assert torch.equal(round_stochastic(numbers.float(), dtype, salt_of(seed, 1, 0)), numbers)
        e4m3 = torch.from_numpy(grid("e4m3")).float()
        assert torch.equal(round_stochastic(e4m3, torch.float8_e4m3fn, salt_of(seed, 1, 0)).float(), e4m3)
        assert torch.equal(round_stochastic(-e4m3, torch.float8_e4m3fn, salt_of(seed, 1, 0)).float(), -e4m3)


@DTYPES
def test_what_is_not_finite_is_nan_and_the_largest_may_run_over(dtype):
    x = torch.tensor([INF, -INF, NAN, -NAN, 1.0])
    for seed in range(20):
        assert round_stochastic(x, dtype, seed).isnan().tolist() == [True] * 4 + [False]
    # A NaN with all bits set, to which random bits are added.
    full = torch.tensor([0x7FFFFFFF, -1], dtype=torch.int32).view(torch.float32)
    assert all(round_stochastic(full, dtype, seed).isnan().all() for seed in range(20))
    beyond = round_stochastic(torch.full((100,), 3e38), torch.float16, 5)
    assert beyond.isinf().all()


def test_random_bits_differ_by_seed_step_tensor_and_element():
    x = torch.full((4000,), 1 + 2.0**-12)
    streams = [salt_of(0, 1, 0), salt_of(1, 1, 0), salt_of(0, 2, 0), salt_of(0, 1, 1)]
    draws = [round_stochastic(x, torch.float16, s) > 1 for s in streams]
    for i, a in enumerate(draws):
        assert 0.2 < float(a.float().mean()) < 0.3
        for b in draws[:i]:
            both = float((a & b).float().mean())
            assert abs(both - 1 / 16) < 0.02  # independent: a quarter of a quarter
        assert abs(float((a[1:] & a[:-1]).float().mean()) - 1 / 16) < 0.02


@DTYPES
@pytest.mark.parametrize("master", [None, "fp16"])
def test_updates_far_below_a_weight_are_kept_on_average(dtype, master):
    """32 updates of 1e-5 on weights of 1.0, whose spacing is 1e-3 and more."""

    def moved(stochastic, seed=0):
        param = torch.nn.Parameter(torch.ones(64, 128, dtype=dtype))
        optimizer = AdamW(
            [param], lr=1e-5, weight_decay=0.0, exp_avg_dtype="fp32", exp_avg_sq_dtype="fp32",
            master_weight_dtype=master, stochastic_rounding=stochastic, seed=seed,
        )  # fmt: skip
        for _ in range(32):
            param.grad_dtype = None
            param.grad = GradientTensor.from_float(torch.ones(64, 128))
            optimizer.step()
        kept = optimizer.state[param].get("master_weight", param)
        return float((1 - values(kept)).mean())

    assert moved(False) == 0
    assert sum(moved(True, seed) for seed in range(4)) / 4 == pytest.approx(32e-5, rel=0.1)


@pytest.mark.parametrize("master", [None, "fp16", "fp32"])
def test_a_seed_decides_and_fp32_is_not_touched(master):
    def trained(seed, dtype=torch.float16, stochastic=True):
        params = make_params(dtype)
        optimizer = AdamW(params, lr=1e-3, stochastic_rounding=stochastic, seed=seed, master_weight_dtype=master)
        run(optimizer, params, 3)
        return params, all_bits(optimizer)

    first, again, other = trained(1), trained(1), trained(2)
    assert_same(first[1], again[1])
    changed = [not torch.equal(a, b) for a, b in zip(first[0], other[0], strict=True)]
    # With FP32 masters nothing is rounded at random; vectors have FP32 masters wherever there are any.
    want = [p.numel() > 0 and (master is None or (master == "fp16" and p.dim() > 1)) for p in first[0]]
    assert [c or p.numel() == 1 for c, p in zip(changed, first[0], strict=True)] == [
        w or p.numel() == 1 for w, p in zip(want, first[0], strict=True)
    ]
    assert_same(trained(1, torch.float32)[1], trained(1, torch.float32, False)[1])
