"""Curves over the steps of a run: smoothed, and thinned for drawing."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.float64]

_PARTS = 50  # a smoothing window is so large a part of the run


def window_of(steps: int) -> int:
    """The number of steps of a smoothing window: a fiftieth of the run, and odd."""
    return max(1, steps // _PARTS) | 1


def smoothed(values: Numbers) -> Numbers:
    """The mean over a window around each step; at the ends over the part of the window that is there.

    Args:
        values: [..., steps].
    """
    half, steps = window_of(values.shape[-1]) // 2, values.shape[-1]
    sums = np.concatenate([np.zeros_like(values[..., :1]), np.cumsum(values, axis=-1)], axis=-1)
    at = np.arange(steps)
    first, last = np.maximum(at - half, 0), np.minimum(at + half + 1, steps)
    return np.asarray((sums[..., last] - sums[..., first]) / (last - first))


def bin_starts(count: int, bins: int) -> npt.NDArray[np.int64]:
    """The index at which each of at most ``bins`` bins of nearly equal size begins."""
    bins = min(count, bins)
    return np.arange(bins) * count // max(bins, 1)
