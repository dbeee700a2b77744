"""Tokens per second of training alone, measured between two log steps."""

from __future__ import annotations

import time
from typing import Any

import torch


class TokenRate:
    """Measures the training tokens per second of this process.

    The clock starts at the first ``read``, so that the first step (allocation, autotuning, compilation) does not count,
    and stops while validation runs. ``read``, ``pause`` and ``resume`` wait for the GPU; ``add`` does not.

    Attributes:
        tokens: of this process since the start of the training.
    """

    tokens = 0

    def __init__(self) -> None:
        self._tokens = self._total_tokens = 0
        self._seconds = self._total_seconds = 0.0
        self._started = False
        self._since: float | None = None  # the time at which the clock was started; None while the clock is stopped

    def add(self, tokens: int) -> None:
        """Counts the tokens of one micro-batch."""
        self._tokens += tokens
        self.tokens += tokens

    def pause(self) -> None:
        """Stops the clock."""
        if self._since is not None:
            self._seconds += _now() - self._since
            self._since = None

    def resume(self) -> None:
        """Starts the clock again after ``pause``; before the first ``read`` the clock stays off."""
        if self._started:
            self._since = _now()

    def read(self) -> float | None:
        """Returns the tokens per second since the last reading, and resets the count; None at the first reading."""
        self.pause()
        rate = None
        if self._started and self._seconds > 0:
            rate = self._tokens / self._seconds
            self._total_tokens += self._tokens
            self._total_seconds += self._seconds
        self._started = True
        self._tokens, self._seconds = 0, 0.0
        self.resume()
        return rate

    @property
    def mean(self) -> float | None:
        """Tokens per second over all readings; None before the second reading."""
        return self._total_tokens / self._total_seconds if self._total_seconds else None


def _now() -> float:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()


def data_parallel_size(trainer: Any) -> int:
    """The number of data-parallel ranks of a Trainer, which have batches of their own."""
    sampler: dict[str, int] | None = getattr(trainer.strategy, "distributed_sampler_kwargs", None)
    return sampler["num_replicas"] if sampler else int(trainer.world_size)
