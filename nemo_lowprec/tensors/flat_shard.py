"""Parts of matrices that lie flat in memory: what cuts buffers of many parameters into equal parts makes them."""

from __future__ import annotations

from torch import Tensor

__all__ = ["is_matrix", "mark_part_of_matrix"]

_MARK = "part_of_matrix"


def mark_part_of_matrix(part: Tensor) -> None:
    """Note that ``part``, a tensor of one dimension, holds elements of a matrix."""
    part.__dict__[_MARK] = True


def is_matrix(tensor: Tensor) -> bool:
    """Whether ``tensor`` has two dimensions or more, or is a flat part of one that has."""
    return tensor.dim() > 1 or getattr(tensor, _MARK, False)
