"""A 1-D slice of a flattened matrix, marked as such.

Megatron's distributed optimizer makes such slices when it cuts a gradient buffer into equal shards. Optimizer states of
a slice are stored in the formats of a matrix, not of a vector.
"""

from __future__ import annotations

from torch import Tensor

_MARK = "part_of_matrix"


def mark_part_of_matrix(part: Tensor) -> None:
    """Mark ``part``, a tensor of one dimension, as a slice of a flattened matrix."""
    part.__dict__[_MARK] = True


def is_matrix(tensor: Tensor) -> bool:
    """Whether ``tensor`` has two dimensions or more, or is marked as a slice of a flattened matrix."""
    return tensor.dim() > 1 or getattr(tensor, _MARK, False)
