"""Moments in low-bit formats over many steps: they follow, fade and never let a step run away."""

import pytest
import torch
from low_bit import FORMATS, randn, values
from torch import nn

from nemo_lowprec.formats import FP16
from nemo_lowprec.formats.floats import E5M3
from nemo_lowprec.optim import AdamW
from nemo_lowprec.optim.storage import stands_still, store
from nemo_lowprec.tensors import BlockScaledTensor

MOMENTS = ("exp_avg", "exp_avg_sq")


def make(shape, first="fp32", second="fp32", **options):
    param = nn.Parameter(torch.zeros(shape))
    options = {"lr": 1e-3, "weight_decay": 0.0, **options}
    return param, AdamW([param], exp_avg_dtype=first, exp_avg_sq_dtype=second, **options)


@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.9, 0.95), (0.97, 0.9999)], ids=str)
@pytest.mark.parametrize("fmt", FORMATS)
def test_the_second_moment_follows_the_gradients(fmt, betas):
    """Rounded to nearest, E4M3 holds 2 for 1 at 0.95 and what the first gradient left at 0.999."""
    param, optimizer = make((8, 512), "fp32", fmt, betas=betas)
    steps = 500
    for step in range(steps):
        param.grad = randn(param.shape, step)
        optimizer.step()
    want = 1 - betas[1] ** steps
    assert float(values(optimizer.state[param]["exp_avg_sq"]).mean()) == pytest.approx(want, rel=0.06)


@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.9, 0.95), (0.97, 0.9999), (0.99, 0.99)], ids=str)
@pytest.mark.parametrize("fmt", FORMATS)
def test_moments_fade_beside_elements_whose_gradients_go_on(fmt, betas):
    param, optimizer = make((16, 512), fmt, fmt, betas=betas)
    exact, plain = make((16, 512), betas=betas)
    for step in range(220):
        for each in (param, exact):
            each.grad = torch.full_like(each, 1.0)
            if step >= 20:
                each.grad[:, ::2] = 0
        optimizer.step()
        plain.step()
    for name, beta in zip(MOMENTS, betas, strict=True):
        if beta**200 < 1e-3:  # too small for the block by now: what is left of it is tested below
            continue
        got, want = (values(o.state[p][name])[:, ::2] for o, p in ((optimizer, param), (plain, exact)))
        assert float(got.mean() / want.mean()) == pytest.approx(1, abs=0.15), name


@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.9, 0.95)], ids=str)
@pytest.mark.parametrize("second", FORMATS)
@pytest.mark.parametrize("first", FORMATS)
def test_no_step_runs_away_where_a_block_spans_many_binades(first, second, betas):
    """Where the second moment is stored as zero, and the first is not, a step would be exp_avg / eps."""
    param, optimizer = make((16, 512), first, second, betas=betas, lr=1.0)
    size = torch.exp2(-torch.randint(0, 36, param.shape, generator=torch.Generator().manual_seed(0)).float())
    for step in range(60):
        before = param.detach().clone()
        param.grad = randn(param.shape, step) * size
        param.grad[torch.rand(param.shape, generator=torch.Generator().manual_seed(step)) < 0.5] = 0
        optimizer.step()
        assert (param.detach() - before).abs().max() < 12
    assert param.detach().abs().min() > 0


def test_which_moments_would_stand_still():
    table = {torch.float32: 1e-7, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8, torch.float8_e4m3fn: 2.0**-4}
    table[torch.uint8] = 2.0**-4
    for dtype, least in table.items():
        assert stands_still(1 - 0.99 * least, dtype) == (dtype != torch.float32)
        assert not stands_still(1 - 1.01 * least, dtype)


@pytest.mark.parametrize("fmt", [E5M3, FP16], ids=lambda f: f.name)
def test_a_second_moment_is_zero_in_blocks_of_zeros_only(fmt):
    exact = torch.exp2(-torch.arange(128.0)).expand(4, 128).clone()
    exact[:, ::5] = 0
    exact[1] = 0
    exact[2, 3], exact[2, 8] = float("nan"), float("inf")
    stored = store(exact, "exp_avg_sq", "fp8" if fmt is E5M3 else "fp16")
    assert isinstance(stored, BlockScaledTensor)
    nearest = BlockScaledTensor.from_float(exact, fmt)
    assert torch.equal(stored.exponent, nearest.exponent)
    got, want = (t.dequantize().nan_to_num(7) for t in (stored, nearest))
    assert torch.equal(got[want > 0], want[want > 0]) and got[1].count_nonzero() == 0
    smallest = fmt.smallest * 2.0 ** (int(stored.exponent[0, 0]) - 127)
    assert (got[[0, 2, 3]][want[[0, 2, 3]] == 0] == smallest).all()
    again = store(stored.dequantize(), "exp_avg_sq", "fp8" if fmt is E5M3 else "fp16")
    assert torch.equal(again.dequantize().nan_to_num(7), got)


def test_a_seed_decides_how_moments_are_rounded():
    def moments(seed):
        param, optimizer = make((8, 256), "bf16", "fp8", betas=(0.999, 0.999), seed=seed)
        for step in range(3):
            param.grad = randn(param.shape, step)
            optimizer.step()
        return [values(optimizer.state[param][name]) for name in MOMENTS]

    first, again, other = moments(1), moments(1), moments(2)
    for a, b, c in zip(first, again, other, strict=True):
        assert torch.equal(a, b) and not torch.equal(a, c)


@pytest.mark.parametrize("fmt", ["bf16", "fp8"])
def test_the_two_moments_of_a_tensor_have_random_streams_of_their_own(fmt):
    param, optimizer = make((8, 256), fmt, fmt, betas=(0.999, 0.999))
    param.grad = torch.ones(8, 256)  # which is its own square: both moments are the same before they are rounded
    optimizer.step()
    first, second = (values(optimizer.state[param][name]) for name in MOMENTS)
    assert first.unique().numel() == 2 and torch.equal(first.unique(), second.unique())
    assert 0.2 < float((first == second).float().mean()) < 0.9
