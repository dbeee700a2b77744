"""Column Comm: gradients averaged over the processes that train one model, and what these must agree on in a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from nemo_lowprec.column import Column
from nemo_lowprec.comm.agree import any_rank_, broadcast_weights, reduce_amax
from nemo_lowprec.comm.buckets import Fp8ShardBucket
from nemo_lowprec.comm.reducer import GradientReducer
from nemo_lowprec.observers import NOBODY, Observers

Share = Callable[[Callable[[Tensor], None] | None], None]


class Averaging(Column):
    """The gradients of a model of which each process holds the whole, or of which FSDP2 reduces the gradients.

    Args:
        wire: dtype of a parameter's gradient on the wire, ``float8_e4m3fn`` for a gradient that is stored in FP8.
        share: takes what makes amaxes the maxima over the processes, in place; None where there is one process.
        releases: whether parameters step in backward, so that gradients cannot be averaged.

    Attributes:
        reducer: averages the gradients; None before ``average_over``.
    """

    def __init__(
        self,
        wire: Callable[[Tensor], torch.dtype],
        share: Share = lambda reduce: None,
        releases: bool = False,
        observers: Observers = NOBODY,
    ) -> None:
        self.wire, self.observers = wire, observers
        self.reducer: GradientReducer | None = None
        self._share, self._releases = share, releases
        self._model: nn.Module | None = None
        self._any_rank: Callable[[Tensor], None] | None = None

    def install(self, model: nn.Module, training: bool) -> None:
        self._model = model

    def check_averaging(self) -> None:
        """Raise ValueError where gradients cannot be averaged over processes."""
        if self._releases:
            raise ValueError("gradient_release=True steps before gradients are averaged over processes. Leave it out.")

    def share_amaxes(self, group: dist.ProcessGroup | None) -> None:
        """Scale by the amaxes of all processes of ``group``, and skip a step on all where one is to be skipped on any.

        Transformer Engine's own layers share only whether their amaxes are finite.
        """
        self._any_rank = partial(any_rank_, group=group, observers=self.observers)
        self._share(partial(reduce_amax, group=group, observers=self.observers))

    def any_rank(self, flags: Tensor) -> None:
        """Make ``flags`` (FP32 [n] of 0 and 1) their maxima over the processes that share amaxes, in place."""
        if self._any_rank is not None:
            self._any_rank(flags)

    def average_over(self, group: dist.ProcessGroup | None, bucket_bytes: int | None = None) -> GradientReducer:
        """Average gradients over the processes of ``group`` (see ``averaging``), and scale by all their amaxes.

        Args:
            bucket_bytes: size of a bucket on the wire; None for the default.

        Raises:
            ValueError: with ``gradient_release``, whose steps come too early.
        """
        self.check_averaging()
        assert self._model is not None
        params = list(self._model.parameters())
        if self.reducer is None or self.reducer.group is not group or not self.reducer.averages(params):
            self._let_go()
            self.reducer = GradientReducer(params, group, self.wire, bucket_bytes, observers=self.observers)
            self.share_amaxes(group)
        return self.reducer

    def broadcast(self, buffers: bool = False) -> bool:
        """Give every process the weights, and on request the buffers, of its group's first; whether any were others."""
        assert self.reducer is not None and self._model is not None
        tensors = [*self._model.parameters(), *(self._model.buffers() if buffers else ())]
        return broadcast_weights(tensors, self.reducer.group, self.observers)

    @contextmanager
    def averaging(self, wanted: bool = True) -> Iterator[None]:
        """A backward pass whose gradients are averaged, where ``average_over`` was called and it is ``wanted``."""
        if self.reducer is None or not wanted:
            yield
            return
        self.reducer.begin()
        try:
            yield
        except BaseException:
            self.reducer.abandon()
            raise
        self.reducer.finish()

    def _let_go(self) -> None:
        if self.reducer is not None:
            self.reducer.remove()
        self.reducer = None

    def remove(self) -> None:
        self._let_go()
        self._share(None)
        self._any_rank = self._model = None


class ShardAveraging(Averaging):
    """Gradients in FP8 of whole matrices, reduced onto the shards that FSDP2 has gathered the matrices from.

    Args:
        world: all processes that train together.
        shards: the processes that hold one copy of the model among them.
        replicas: the processes that hold the same shards; None where there is one copy of the model.
        matrices: (whole, sharded) of the matrices that were gathered so far.
        gradients: of the whole matrices, by their ids.
        releases: whether parameters step in backward.
    """

    def __init__(
        self,
        wire: Callable[[Tensor], torch.dtype],
        share: Share,
        world: dist.ProcessGroup | None,
        shards: dist.ProcessGroup | None,
        replicas: dist.ProcessGroup | None,
        matrices: Callable[[], Iterable[tuple[Tensor, Tensor]]],
        gradients: dict[int, Any],
        releases: bool = False,
        observers: Observers = NOBODY,
    ) -> None:
        super().__init__(wire, share, releases, observers)
        self._world, self._shards, self._replicas = world, shards, replicas
        self._matrices, self._gradients = matrices, gradients
        self._reduced: list[Tensor] = []

    @contextmanager
    def averaging(self, wanted: bool = True) -> Iterator[None]:
        if wanted:
            self._fit()
        with super().averaging(wanted):
            yield

    def _fit(self) -> None:
        """Reduce the gradients of the matrices that were gathered by now."""
        pairs = list(self._matrices())
        wholes = [whole for whole, _ in pairs]
        if self.reducer is not None and [*map(id, self._reduced)] == [*map(id, wholes)]:
            return
        self._let_go()
        self._reduced = wholes
        shard_of = {id(whole): sharded for whole, sharded in pairs}
        self.reducer = GradientReducer(
            wholes,
            self._world,
            self.wire,
            shards=lambda params: Fp8ShardBucket(
                params,
                self._shards,
                self._gradients,
                [shard_of[id(p)] for p in params],
                self._replicas,
                self.observers,
            ),
            observers=self.observers,
        )

    def remove(self) -> None:
        self._reduced = []
        super().remove()
