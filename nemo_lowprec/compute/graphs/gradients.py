"""The gradients of parameters that a graph writes, in memory that nothing else writes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from nemo_lowprec.compat.tensors import base_of, storage_use_count


class WrittenGradients:
    """The gradients of twins, each in memory that neither another gradient nor another graph writes.

    A layer writes its weight's gradient into the buffer. Torch's operations and compiled code compute a gradient in the
    graph's memory. There a graph that was captured earlier, and runs later, has temporary tensors. So the first graph
    of a memory leaves its gradients there, and any other graph copies its gradients into the buffers. A buffer of
    another dtype than autograd's would round the gradient: ``move`` copies such a gradient into memory of its dtype.
    Without buffers all gradients stay in the graph's memory.

    Args:
        computed: in the capture of the graph; None where a twin has no gradient.
        buffers: from ``twins.grad_buffers``; None for all gradients of a graph whose memory no other graph has.
        others: addresses of tensors, beside the gradients, that may be the same tensor as a gradient.
        first: whether no graph was captured in this memory before.

    Attributes:
        written: where the graph writes the gradients.
    """

    def __init__(
        self, computed: Sequence[Tensor | None], buffers: Sequence[Tensor | None], others: Iterable[int], first: bool
    ) -> None:
        there = [grad for grad in computed if grad is not None]
        taken = Counter([*others, *(grad.data_ptr() for grad in there)])
        pieces = Counter(_storage(grad) for grad in there)
        sizes: Counter[int] = Counter()
        for grad in there:
            sizes[_storage(grad)] += grad.nbytes

        def written(grad: Tensor, buffer: Tensor | None) -> Tensor:
            if buffer is None:  # the gradients of weights that compute as one are pieces of one tensor
                pieces_alone = storage_use_count(grad) == pieces[_storage(grad)] + 1 + (base_of(grad) is not None)
                whole = grad.untyped_storage().nbytes() == sizes[_storage(grad)]
                return grad if taken[grad.data_ptr()] == 1 and pieces_alone and whole else grad.clone()
            if grad.data_ptr() == buffer.data_ptr():
                return buffer
            alone = taken[grad.data_ptr()] == 1 and storage_use_count(grad) == 2
            whole = grad.untyped_storage().nbytes() == grad.nbytes and grad.stride() == buffer.stride()
            if first and alone and whole:
                return grad
            return (buffer if grad.dtype == buffer.dtype else torch.empty_like(buffer, dtype=grad.dtype)).copy_(grad)

        pairs = list(zip(computed, buffers, strict=True))
        self.written = [None if grad is None else written(grad, buffer) for grad, buffer in pairs]  # type: ignore[arg-type]
        self._inside = [
            i for i, grad in enumerate(self.written) if not first and grad is not None and grad is not buffers[i]
        ]  # fmt: skip
        self._moves: list[tuple[Tensor, Tensor]] = []

    def outside(self) -> list[Tensor | None]:
        """The gradients after ``move``. Called once, after the capture: here what moves gets memory."""
        found = list(self.written)
        for i in self._inside:
            grad: Tensor = self.written[i]  # type: ignore[assignment]
            found[i] = to = torch.empty_like(grad)
            self._moves.append((to, grad))
        return found

    def move(self) -> None:
        """The graph has run."""
        for to, grad in self._moves:
            to.copy_(grad)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
