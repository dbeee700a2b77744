"""A linear layer's input that is not kept in FP8 for backward, because its producer keeps enough to compute it again.

A norm or an activation that keeps its own input marks its output (``mark``). The layers that read the output save the
producer's tensors, which are there anyway, in the place of the columnwise operand of their wgrad GEMM. Backward
computes the output again, once for all of its readers, and quantizes it columnwise.

The output of attention is such an input, too: ``scaled_dot_product_attention`` keeps it in half precision.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from nemo_lowprec.compat.autograd import current_backward

_AGAIN = "_lowprec_again"


class Again:
    """Computes a producer's output again, once a backward pass.

    Args:
        compute: the tensors that the producer keeps to its output [..., features].

    Attributes:
        readers: number of layers that will ask for the output in backward.
    """

    def __init__(self, compute: Callable[[Sequence[Tensor]], Tensor]) -> None:
        self.readers = 0
        self._compute = compute
        self._values: Tensor | None = None
        self._pass, self._left = -1, 0

    @torch.no_grad()
    def values(self, tensors: Sequence[Tensor]) -> Tensor:
        """The output, from ``tensors`` as a reader has saved them. The last reader of a backward pass frees it."""
        now = current_backward()
        if self._values is None or self._pass != now:
            self._values, self._pass, self._left = self._compute(tensors), now, self.readers
        values = self._values
        self._left -= 1
        if self._left <= 0:
            self._values = None
        return values


def mark(output: Tensor, again: Again, tensors: Sequence[Tensor]) -> None:
    """Let layers that read ``output`` save ``tensors``, of which ``again`` computes ``output`` in backward."""
    output.__dict__[_AGAIN] = again, tensors, output._version


def again_of(source: Tensor, attention: bool) -> tuple[Again, Sequence[Tensor]] | None:
    """How to compute ``source`` again, and the tensors to save for this; None where its producer keeps nothing.

    Args:
        attention: whether the output of attention, which is there in backward, counts.
    """
    if source.is_inference():
        return None
    again, tensors, version = source.__dict__.get(_AGAIN, (None, (), 0))
    if again is not None and version == source._version:
        return again, tensors
    if attention and _is_attention(source):
        return Again(lambda kept: kept[0]), [source.detach()]
    return None


def is_computed_again(source: Tensor, attention: bool) -> bool:
    """Whether ``again_of`` may answer; asked for each call of a layer."""
    return attention or _AGAIN in source.__dict__


_VIEWS = frozenset(f"{op}Backward0" for op in ("View", "Transpose", "Permute", "Unsqueeze", "ReshapeAlias", "Alias"))


def _is_attention(source: Tensor) -> bool:
    """Whether ``source`` is a view of the output of one of torch's attention kernels, which save it."""
    node: Any = source.grad_fn
    while node is not None and node.name() in _VIEWS:
        node = node.next_functions[0][0]
    return node is not None and node.name().startswith("ScaledDotProduct")
