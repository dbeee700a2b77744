"""E5M3, eight bits of a number that is not negative, and E2M5."""

import torch

from nemo_lowprec.formats.block_scale_128 import dequantize_rows, quantize_rows
from nemo_lowprec.formats.floats import E2M5, E4M3, E5M3, decode, encode
from nemo_lowprec.formats.stochastic import round_stochastic

CODES = torch.arange(0xF8, dtype=torch.uint8)  # all finite numbers


def test_every_code_is_a_number_and_comes_back():
    values = decode(CODES)
    assert values[0] == 0 and values[1] == E5M3.smallest and values[-1] == E5M3.max
    assert (values.diff() > 0).all()
    assert torch.equal(encode(values, torch.uint8), CODES)
    # Between a number and the next one lie steps of an eighth of its power of two.
    normal = values[8:]
    steps = normal.diff() / torch.exp2(normal[:-1].log2().floor())
    assert torch.equal(steps, torch.full_like(steps, 0.125))
    nan = encode(torch.tensor([float("nan")]), torch.uint8)
    assert decode(nan).isnan().all() and nan.item() == 0xFC


def test_rounds_to_nearest_even():
    values = decode(CODES)
    middle = (values[:-1] + values[1:]) / 2
    even = CODES[:-1] + CODES[:-1] % 2
    assert torch.equal(encode(middle, torch.uint8), even)
    assert torch.equal(encode(middle * (1 + 2.0**-9), torch.uint8)[8:], CODES[9:])
    assert torch.equal(encode(middle * (1 - 2.0**-9), torch.uint8)[8:], CODES[8:-1])


def test_rounds_stochastically_without_a_bias():
    values = torch.tensor([1.03, 0.0001, 3e-5, 59000.0]).repeat_interleave(1 << 14)
    rounded = decode(round_stochastic(values, torch.uint8, 5)).view(4, -1)
    assert (rounded.mean(1) / values.view(4, -1)[:, 0] - 1).abs().max() < 5e-3
    assert all(len(row.unique()) == 2 for row in rounded)
    assert decode(round_stochastic(torch.tensor([float("inf"), float("nan")]), torch.uint8, 5)).isnan().all()


def test_blocks_span_34_binades_and_keep_every_positive_number():
    values = torch.exp2(-torch.arange(128.0)).expand(2, 128).clone()
    data, exponent = quantize_rows(values, E5M3, positive=True)
    back = dequantize_rows(data, exponent)
    assert torch.equal(back[0, :33], values[0, :33]) and (back > 0).all()
    assert data.dtype == torch.uint8 and data.is_contiguous()


SIGNED = torch.arange(-127, 128, dtype=torch.int8)  # all numbers of E2M5


def test_every_code_of_e2m5_is_a_number_and_comes_back():
    values = decode(SIGNED)
    assert torch.equal(values, -values.flip(0)) and values[-1] == E2M5.max and values[128] == E2M5.smallest
    assert (values.diff() > 0).all() and torch.equal(encode(values, torch.int8), SIGNED)
    positive = values[127:]
    steps = torch.cat([torch.full((64,), 1 / 32), torch.full((32,), 1 / 16), torch.full((31,), 1 / 8)])
    assert torch.equal(positive.diff(), steps)
    nan = encode(torch.tensor([float("nan")]), torch.int8)
    assert nan.item() == -128 and decode(nan).isnan().all()


def test_e2m5_rounds_to_nearest_even_and_stochastically():
    values = decode(SIGNED)
    middle = (values[:-1] + values[1:]) / 2
    even = torch.where(SIGNED[:-1] % 2 == 0, SIGNED[:-1], SIGNED[1:])
    assert torch.equal(encode(middle, torch.int8), even)
    some = torch.tensor([0.37, -0.011, -3.3, 7.8]).repeat_interleave(1 << 14)
    rounded = decode(round_stochastic(some, torch.int8, 5)).view(4, -1)
    assert (rounded.mean(1) - some.view(4, -1)[:, 0]).abs().max() < 2e-3
    assert all(len(row.unique()) == 2 for row in rounded)


def test_a_block_in_e2m5_is_four_times_as_exact_as_in_e4m3():
    values = torch.randn(64, 128, generator=torch.Generator().manual_seed(0))
    error = {fmt.name: (dequantize_rows(*quantize_rows(values, fmt)) - values).norm() for fmt in (E2M5, E4M3)}
    assert error["e2m5"] < 0.4 * error["e4m3"]
