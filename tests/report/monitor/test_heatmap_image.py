"""Heatmaps as images."""

import math
from collections import Counter

import pytest
import torch

from nemo_lowprec.report.monitor.heatmap_image import SCALES, as_pixels, heatmap_image

LIGHT, DARK, GREY = (0xF1, 0xF0, 0xEC), (0x7A, 0x0A, 0x18), (200, 205, 212)


def colours(image):
    """How many pixels have each colour."""
    return Counter(map(tuple, as_pixels(image).reshape(-1, 3).tolist()))


def drawn(metric, *numbers):
    table = torch.tensor([numbers], dtype=torch.float64)
    return heatmap_image(["model.layers.0.mlp"], list(range(2, 2 + len(numbers))), table, SCALES[metric])


@pytest.mark.parametrize(
    ("metric", "number", "colour"),
    [
        ("sqnr", 40.0, LIGHT),
        ("sqnr", 55.0, LIGHT),
        ("sqnr", 0.0, DARK),
        ("sqnr", -3.0, DARK),
        ("sqnr", 20.0, (0xFC, 0xC2, 0x87)),
        ("underflow", 0.0, LIGHT),
        ("underflow", 100.0, DARK),
        ("saturation", 4.0, (0xFB, 0xDC, 0xAE)),  # a fifth of the way: the square root of 0.04
        ("underflow", math.nan, GREY),
    ],
)
def test_colours_are_those_of_the_fixed_scale(metric, number, colour):
    cells = 24 * 14
    assert colours(drawn(metric, number))[colour] >= cells
    assert colours(drawn(metric, number, number))[colour] >= 2 * cells


@pytest.mark.parametrize(
    ("metric", "numbers"), [("sqnr", (38.0, 25.0, 15.0, 5.0)), ("underflow", (0.5, 5.0, 20.0, 80.0))]
)
def test_the_worse_the_darker(metric, numbers):
    pixels = as_pixels(drawn(metric, *numbers)).float()
    row = pixels[pixels.shape[0] // 4]  # through the cells
    luminance = [row[220 + 24 * i].mean().item() for i in range(4)]
    assert luminance == sorted(luminance, reverse=True) and len(set(luminance)) == 4


def test_a_thousand_layers_and_200_steps_fit():
    numbers = torch.rand(1000, 200, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 40
    image = heatmap_image([f"layers.{i}" for i in range(1000)], list(range(200)), numbers, SCALES["sqnr"])
    assert image.width < 1000 and 1000 < image.height < 1200


def test_names_and_steps_are_written():
    bare, named = (
        heatmap_image([name], [step], torch.zeros(1, 1, dtype=torch.float64), SCALES["underflow"])
        for name, step in (("", 1), ("a.very.long.name.of.a.model.model.layers.17.mlp.down_proj", 1_234_567))
    )
    pixels, others = as_pixels(bare), as_pixels(named)
    left = others[20:45, :210].float().mean() - pixels[20:45, :210].float().mean()
    assert left < -5  # ink
    assert (others[20:45, :10] == 255).all()  # of the end of the name only
    assert not torch.equal(pixels[45:60], others[45:60])
