"""torch's profiler: the events of a trace and their links, which ``profile.events()`` leaves out."""

from __future__ import annotations

import re
from typing import NamedTuple

from torch.autograd import DeviceType
from torch.profiler import profile

_LAUNCH = re.compile(r"cu(da)?[A-Z]")  # functions of CUDA's runtime and driver


class Event(NamedTuple):
    """An event of a trace.

    Attributes:
        name: of the range, the operation, the function of CUDA, or the kernel.
        kind: ``range`` (of ``record_function``), ``op`` (of torch), ``launch`` (a function of CUDA on the host), or
            ``kernel`` (a kernel, copy or fill on the GPU).
        start, end: ns.
        thread: of the host, as torch numbers threads.
        launch: number that a kernel and its launch share.
        sequence: of an operation with a node of autograd, forward and in backward the same; -1 without.
        forward_thread: of an operation in backward, the thread of its forward.
    """

    name: str
    kind: str
    start: int
    end: int
    thread: int
    launch: int
    sequence: int
    forward_thread: int


def trace_of(profiler: profile) -> list[Event]:
    """The events that ``profiler`` has seen, by their start; a longer one before a shorter one that starts with it."""
    assert profiler.profiler is not None and profiler.profiler.kineto_results is not None
    found = []
    for event in profiler.profiler.kineto_results.events():
        if event.device_type() == DeviceType.CUDA:
            if event.is_user_annotation():  # a range of the host, seen from the GPU
                continue
            kind = "kernel"
        elif event.is_user_annotation():
            kind = "range"
        else:
            kind = "launch" if _LAUNCH.match(event.name()) else "op"
        start = event.start_ns()
        found.append(
            Event(
                event.name(),
                kind,
                start,
                start + event.duration_ns(),
                event.start_thread_id(),
                event.correlation_id(),
                event.sequence_nr(),
                event.fwd_thread_id(),
            )
        )
    return sorted(found, key=lambda event: (event.start, -event.end))
