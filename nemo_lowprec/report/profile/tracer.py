"""The clock and the trace of a training's steps."""

from __future__ import annotations

import time
from collections.abc import Collection

import torch
from torch.profiler import ProfilerActivity, profile

from nemo_lowprec.compat.profiler import Event, trace_of

__all__ = ["Tracer"]


class Tracer:
    """A clock and a trace, which both leave out pauses: a validation belongs to no step.

    Args:
        device: of the model. Whenever the clock is read or the trace changes, the host waits for a GPU.
        traces: whether this process traces; otherwise a trace is empty.
    """

    def __init__(self, device: torch.device, traces: bool) -> None:
        self._device, self._traces = device, traces
        self._profiler: profile | None = None
        self._activities: Collection[ProfilerActivity] = ()  # of the trace that is under way
        self._events: list[Event] = []  # of the trace before its last pause
        self._paused_s = 0.0
        self._pause: float | None = None

    @property
    def is_tracing(self) -> bool:
        """Whether events are being recorded."""
        return self._profiler is not None

    def now(self) -> float:
        """Seconds, without the seconds of pauses."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter() - self._paused_s

    def start(self, activities: Collection[ProfilerActivity]) -> None:
        """Begin a trace."""
        self._activities = activities
        self._record()

    def stop(self) -> list[Event]:
        """End the trace; its events."""
        self._collect()
        events, self._events, self._activities = self._events, [], ()
        return events

    def pause(self) -> None:
        """Stop the clock and the trace until ``resume``."""
        self._collect()
        self._pause = self.now()

    def resume(self) -> None:
        """Let the clock and the trace go on."""
        if self._pause is not None:
            self._paused_s += self.now() - self._pause
            self._pause = None
            self._record()

    def _record(self) -> None:
        if self._traces and self._activities:
            self.now()
            self._profiler = profile(activities=self._activities, acc_events=True)
            self._profiler.__enter__()

    def _collect(self) -> None:
        if self._profiler is not None:
            self.now()
            found, self._profiler = self._profiler, None
            found.__exit__(None, None, None)
            last = max((event.launch for event in self._events), default=0)  # each trace may count launches anew
            self._events += [event._replace(launch=last + event.launch) for event in trace_of(found)]
