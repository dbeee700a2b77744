"""What a CUDA graph writes, handed out without a copy.

A graph writes its results to the same memory whenever it runs. Mostly they are read once, by the next block, and gone
before the graph runs again. A tensor that somebody still holds then keeps its values, and the next results are copies.

The results of a graph may also lie where graphs that were captured before it have temporary tensors. Backward passes
run in the reverse order, so the gradient of a tensor that several blocks read waits while such graphs run. Results
that somebody holds are copied away before an earlier graph runs, and back afterwards (``Loans``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from torch import Tensor

from nemo_lowprec.compat.tensors import storage_use_count

_BY_ITSELF = 2  # ``storage_use_count`` of a tensor with memory of its own


class Lent:
    """The results of a graph.

    Args:
        tensors: which the graph writes, right after its capture; None for no tensor. A tensor whose memory the graph
            keeps for its backward pass, or that is there twice, is always copied.
        others: which the graph's caller writes before the graph runs.
    """

    def __init__(self, tensors: Sequence[Tensor | None], others: Sequence[Tensor] = ()) -> None:
        self._tensors = list(tensors)
        places = Counter(id(t) for t in (*tensors, *others))
        self._lends = [
            t is not None and places[id(t)] == 1 and storage_use_count(t) == _BY_ITSELF for t in tensors
        ]  # fmt: skip

    def held(self) -> list[Tensor]:
        """The tensors of the graph whose memory somebody else has, too."""
        return [
            t for t, lends in zip(self._tensors, self._lends, strict=True)
            if t is not None and lends and storage_use_count(t) > _BY_ITSELF
        ]  # fmt: skip

    def written_by(self, replay: Callable[[], None]) -> list[Tensor | None]:
        """The results of ``replay``."""
        held = [
            t.clone() if t is not None and lends and storage_use_count(t) > _BY_ITSELF else None
            for t, lends in zip(self._tensors, self._lends, strict=True)
        ]
        replay()
        found: list[Tensor | None] = []
        for t, lends, before in zip(self._tensors, self._lends, held, strict=True):
            if t is None:
                found.append(None)
            elif before is not None:
                found.append(t.detach().clone())
                t.detach().copy_(before)
            else:
                found.append(_same_memory(t) if lends else t.detach().clone())
        return found


class Loans:
    """The results that the graphs of one memory have lent, as long as somebody holds them."""

    def __init__(self) -> None:
        self._open: list[tuple[int, Lent]] = []

    def written_by(self, number: int, lent: Lent, replay: Callable[[], None]) -> list[Tensor | None]:
        """The results of ``replay``; those of graphs that were captured later keep their values.

        Args:
            number: counts the graphs in the order of their capture.
            lent: the results of the graph that ``replay`` runs.
        """
        held = [(n, other, other.held()) for n, other in self._open]
        waiting = [(t, t.clone()) for n, _, tensors in held if n > number for t in tensors]
        found = lent.written_by(replay)
        for tensor, values in waiting:
            tensor.detach().copy_(values)
        self._open = [(n, other) for n, other, tensors in held if tensors and other is not lent]
        self._open.append((number, lent))
        return found


def _same_memory(tensor: Tensor) -> Tensor:
    """``tensor`` in its memory: no view, which could not be written to, and with versions of its own."""
    alias = tensor.detach().new_empty(0)
    return alias.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())
