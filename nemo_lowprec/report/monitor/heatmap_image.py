"""Draws a heatmap of layers over steps as an image of pixels, for loggers.

Colours and scales are those of the report's page: fixed, so that images of several steps and runs compare, and from
light to dark, so that people who see fewer colours read them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_HEAT = ("#f1f0ec", "#fbdcae", "#fca867", "#ee6a45", "#c22d27", "#7a0a18")
_RATIO_HEAT = ("#f1f0ec", "#f5ead6", "#fcc287", "#dd4d33", "#7a0a18")
_INK, _NOTHING, _PAPER = (40, 40, 40), (200, 205, 212), (255, 255, 255)
_NAME = 30  # characters
_LINE, _GAP = 12, 6  # pixels: of a line of text, and between parts
_CHARACTER = 7  # at most
_WIDTH, _HEIGHT = 640, 1000  # of the cells, unless a cell would be less than a pixel


@dataclass(frozen=True)
class Scale:
    """How numbers become colours.

    Attributes:
        title: of the heatmap.
        ticks: of the legend, from light to dark; numbers beyond the ends have the colour of the end.
        is_root: whether colours follow the square root.
        colours: from light to dark, at equal distances.
    """

    title: str
    ticks: tuple[int, ...]
    is_root: bool
    colours: tuple[str, ...]


_PERCENT = {"ticks": (0, 1, 10, 50, 100), "is_root": True, "colours": _HEAT}
SCALES = {
    "sqnr": Scale("SQNR, dB", (40, 30, 20, 10, 0), False, _RATIO_HEAT),
    "underflow": Scale("Underflow, %", **_PERCENT),  # type: ignore[arg-type]
    "saturation": Scale("Saturation, %", **_PERCENT),  # type: ignore[arg-type]
}


def heatmap_image(names: Sequence[str], steps: Sequence[int], numbers: Tensor, scale: Scale) -> Any:
    """A ``PIL.Image`` of the heatmap, with names of layers, numbers of steps, and a legend.

    Args:
        names: of the rows.
        steps: first step of each column.
        numbers: FP64 [rows, columns]; NaN where there is none, which is grey.
        scale: of the colours.

    Raises:
        ImportError: Pillow is not installed.
    """
    from PIL import Image, ImageDraw

    rows, columns = numbers.shape
    width, height = max(1, min(24, _WIDTH // columns)), max(1, min(14, _HEIGHT // rows))
    left, top = _NAME * _CHARACTER + _GAP, _LINE + 2 * _GAP
    right, bottom = left + max(columns * width, _WIDTH // 2), top + rows * height
    image = Image.new("RGB", (right + 6 * _CHARACTER, bottom + 4 * (_LINE + _GAP)), _PAPER)
    cells = _colours(numbers.numpy(), scale).repeat(height, axis=0).repeat(width, axis=1)
    image.paste(Image.fromarray(cells), (left, top))
    draw = ImageDraw.Draw(image)
    draw.text((left, _GAP), f"{scale.title}: worst operand of each layer", fill=_INK)
    apart = -(-_LINE // height)  # rows of which one has room for its name
    for i in range(0, rows, apart):
        middle = top + i * height + height // 2
        draw.text((left - _GAP, middle), _end_of(names[i]), fill=_INK, anchor="rm")
    _draw_steps(draw, steps, width, (left, bottom + _GAP))
    _draw_legend(image, draw, scale, (left, bottom + _LINE + 3 * _GAP))
    return image


def _colours(numbers: npt.NDArray[np.float64], scale: Scale) -> npt.NDArray[np.uint8]:
    """Colours [..., 3] of numbers."""
    first, last = scale.ticks[0], scale.ticks[-1]
    part = np.clip((numbers - first) / (last - first), 0, 1)
    part = np.sqrt(part) if scale.is_root else part
    stops = np.array([[int(colour[i : i + 2], 16) for i in (1, 3, 5)] for colour in scale.colours], dtype=np.float64)
    at = np.linspace(0, 1, len(stops))
    known = np.nan_to_num(part)
    mixed = np.stack([np.interp(known, at, stops[:, channel]) for channel in range(3)], axis=-1)
    return np.where(np.isnan(part)[..., None], _NOTHING, mixed).round().astype(np.uint8)


def _draw_steps(draw: Any, steps: Sequence[int], width: int, at: tuple[int, int]) -> None:
    left, top = at
    draw.text((left - _GAP, top), "step", fill=_INK, anchor="ra")
    free = left
    for i, step in enumerate(steps):
        if left + i * width >= free:
            text = f"{step:,}"
            draw.text((left + i * width, top), text, fill=_INK)
            free = left + i * width + (len(text) + 3) * _CHARACTER


def _draw_legend(image: Any, draw: Any, scale: Scale, at: tuple[int, int]) -> None:
    from PIL import Image

    (left, top), length = at, _WIDTH // 2
    part = np.linspace(0, 1, length)
    first, last = scale.ticks[0], scale.ticks[-1]
    band = first + (last - first) * (part**2 if scale.is_root else part)
    image.paste(Image.fromarray(_colours(band, scale)[None].repeat(_LINE, axis=0)), (left, top))
    for tick in scale.ticks:
        place = (tick - first) / (last - first)
        x = left + round((place**0.5 if scale.is_root else place) * (length - 1))
        draw.text((x, top + _LINE + _GAP // 2), str(tick), fill=_INK, anchor="ma")


def _end_of(name: str) -> str:
    """The last words of a long name, which tell layers apart."""
    if len(name) <= _NAME:
        return name
    end = name[2 - _NAME :]
    return f"..{end.partition('.')[2] or end}"


def as_pixels(image: Any) -> Tensor:
    """The image as uint8 [height, width, 3]."""
    return torch.from_numpy(np.array(image, dtype=np.uint8))
