"""Column Comm: averages gradients, and reduces amaxes and flags, over the processes that train one model."""

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
    """Averages the gradients of a whole model; the gradients of a model on shards are averaged by FSDP2.

    Args:
        wire: dtype of a parameter's gradient on the wire, ``float8_e4m3fn`` for a gradient that is stored in FP8.
        share: ``AmaxState.share``: called with a function that reduces amaxes in place, or None for one process.
        releases: whether parameters step in backward, so that gradients cannot be averaged.
        observers: are told of each message.
    """

    def __init__(
        self,
        wire: Callable[[Tensor], torch.dtype],
        share: Share = lambda reduce: None,
        releases: bool = False,
        observers: Observers = NOBODY,
    ) -> None:
        self.wire, self.observers = wire, observers
        self.reducer: GradientReducer | None = None  # averages the gradients; None before ``average_over``
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
        """Reduce amaxes over ``group``, and skip a step on all processes where any process must skip the step.

        Of Transformer Engine's own layers the processes only share whether amaxes are finite.
        """
        self._any_rank = partial(any_rank_, group=group, observers=self.observers)
        self._share(partial(reduce_amax, group=group, observers=self.observers))

    def any_rank(self, flags: Tensor) -> None:
        """Make ``flags`` (FP32 [n] of 0 and 1) their maxima over the processes that share amaxes, in place."""
        if self._any_rank is not None:
            self._any_rank(flags)

    def average_over(self, group: dist.ProcessGroup | None, bucket_bytes: int | None = None) -> GradientReducer:
        """Average gradients over the processes of ``group`` (see ``averaging``), and reduce amaxes over ``group``.

        Args:
            bucket_bytes: size of a bucket on the wire; None for the default.

        Raises:
            ValueError: with ``gradient_release``, which steps in backward.
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
        """Give every process the weights (and ``buffers``) of the group's first; whether this process had others."""
        assert self.reducer is not None and self._model is not None
        tensors = [*self._model.parameters(), *(self._model.buffers() if buffers else ())]
        return broadcast_weights(tensors, self.reducer.group, self.observers)

    @contextmanager
    def averaging(self, wanted: bool = True) -> Iterator[None]:
        """Context of a backward pass, whose gradients are averaged if ``wanted`` and ``average_over`` was called."""
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
    """Reduces the FP8 gradients of gathered matrices onto the matrices' shards, in place of FSDP2.

    Args:
        world: all processes that train together.
        shards: the processes that hold one copy of the model among them.
        replicas: the processes that hold the same shards; None where there is one copy of the model.
        matrices: returns (whole, sharded) of the matrices that were gathered so far.
    """

    def __init__(
        self,
        wire: Callable[[Tensor], torch.dtype],
        share: Share,
        world: dist.ProcessGroup | None,
        shards: dist.ProcessGroup | None,
        replicas: dist.ProcessGroup | None,
        matrices: Callable[[], Iterable[tuple[Tensor, Tensor]]],
        releases: bool = False,
        observers: Observers = NOBODY,
    ) -> None:
        super().__init__(wire, share, releases, observers)
        self._world, self._shards, self._replicas, self._matrices = world, shards, replicas, matrices

    def averaging(self, wanted: bool = True) -> Any:
        if wanted:
            self._fit()
        return super().averaging(wanted)

    def _fit(self) -> None:
        """Make a reducer for the matrices that were gathered so far."""
        pairs = list(self._matrices())
        wholes = [whole for whole, _ in pairs]
        if self.reducer is not None and self.reducer.averages(wholes):
            return
        self._let_go()
        shard_of = {id(whole): sharded for whole, sharded in pairs}

        def bucket(params: list[Tensor]) -> Fp8ShardBucket:
            shards = [shard_of[id(p)] for p in params]
            return Fp8ShardBucket(params, self._shards, shards, self._replicas, self.observers)

        self.reducer = GradientReducer(wholes, self._world, self.wire, shards=bucket, observers=self.observers)
