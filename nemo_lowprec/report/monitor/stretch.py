"""The time that a stretch of steps has taken on the host."""

from __future__ import annotations

import time
from typing import Any


class Stretch:
    """Measures the steps since the last reading.

    Args:
        steps: number of steps that were taken before.
    """

    def __init__(self, steps: int) -> None:
        self._steps, self._tokens, self._since = steps, 0, time.perf_counter()
        self._paused_at: float | None = None

    def pause(self) -> None:
        """Stop the clock."""
        if self._paused_at is None:
            self._paused_at = time.perf_counter()

    def resume(self) -> None:
        """Start the clock again."""
        if self._paused_at is not None:
            self._since += time.perf_counter() - self._paused_at
            self._paused_at = None

    def cut(self, steps: int, tokens: int | None) -> dict[str, Any]:
        """The last stretch, of which ``steps`` is the last step; the next one begins."""
        self.resume()
        now = time.perf_counter()
        found = {
            "last": steps,
            "steps": steps - self._steps,
            "seconds": round(now - self._since, 4),
            "tokens": None if tokens is None else tokens - self._tokens,
        }
        self._steps, self._tokens, self._since = steps, tokens or 0, now
        return found
