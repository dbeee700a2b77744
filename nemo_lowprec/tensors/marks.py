"""Values that belong to tensors, kept without holding the tensors and without trusting their ids."""

from __future__ import annotations

from itertools import count
from typing import Any
from uuid import uuid4

from torch import Tensor

_PART = "part_of_matrix"
_NUMBER = "_lowprec_number"
_STEPPED = "_lowprec_stepped"
_numbers = count()


class Marks:
    """A map from tensors to values, by identity. Each value is stored in an attribute of its tensor.

    A dictionary by ``id`` keeps an entry of a tensor that is gone, and a new tensor may get the same id. A dictionary
    of weak references is no way out: ``torch.utils.swap_tensors`` refuses tensors with weak references.

    Args:
        name: name of the attribute. A second map of the same name overwrites the marks of the first.
    """

    def __init__(self, name: str) -> None:
        self._name = f"_lowprec_{name}"
        self._owner = uuid4().hex

    def add(self, tensor: Tensor, value: Any = True) -> None:
        """Mark ``tensor`` with ``value``."""
        tensor.__dict__[self._name] = self._owner, value

    def get(self, tensor: Tensor) -> Any:
        """The value of ``tensor``; None where the tensor is not marked."""
        owner, value = tensor.__dict__.get(self._name, (None, None))
        return value if owner == self._owner else None

    def discard(self, tensor: Tensor) -> Any:
        """Take the mark off ``tensor``. Returns its value; None where the tensor is not marked."""
        owner, value = tensor.__dict__.pop(self._name, (None, None))
        return value if owner == self._owner else None

    def __contains__(self, tensor: Tensor) -> bool:
        return self.get(tensor) is not None


def mark_part_of_matrix(part: Tensor) -> None:
    """Mark ``part``, a 1-D slice of a flattened matrix, whose optimizer states are stored in the formats of a matrix.

    Megatron's distributed optimizer makes such slices when it cuts a gradient buffer into equal shards.
    """
    part.__dict__[_PART] = True


def number_of(tensor: Tensor) -> int:
    """A number that no other tensor of this process has, also none that gets the address of ``tensor`` later."""
    return tensor.__dict__.setdefault(_NUMBER, next(_numbers))  # type: ignore[no-any-return]


def has_number(tensor: Tensor, number: int | None) -> bool:
    """Whether ``number_of(tensor)`` has returned ``number``; with None whether it was never called."""
    return tensor.__dict__.get(_NUMBER) == number


def mark_stepped(tensor: Tensor) -> None:
    """Note that a kernel has written ``tensor``, whose version does not tell."""
    tensor.__dict__[_STEPPED] = True


def take_stepped(tensor: Tensor) -> bool:
    """Whether ``tensor`` was marked by ``mark_stepped`` since this was asked last."""
    return tensor.__dict__.pop(_STEPPED, False)  # type: ignore[no-any-return]


def is_matrix(tensor: Tensor) -> bool:
    """Whether ``tensor`` has two dimensions or more, or is marked as a slice of a flattened matrix."""
    return tensor.dim() > 1 or getattr(tensor, _PART, False)
