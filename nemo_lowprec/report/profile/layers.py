"""Which layer has launched a kernel.

Each call of a module is a range of the trace. A kernel of forward belongs to the innermost module that is being called,
a kernel of backward to the module whose call has made the node of autograd. Kernels within ``optimizer_range`` belong
to no layer, and neither do kernels that no module launches, as messages of gradients are.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from torch import nn
from torch.profiler import record_function

from nemo_lowprec.compat.modules import around_calls
from nemo_lowprec.compat.profiler import Event
from nemo_lowprec.report.profile.kinds import OPTIMIZER, kind_of

__all__ = ["Kernel", "kernels_of", "layer_ranges", "operations_of", "optimizer_range"]

_LAYER, _OPTIMIZER = "nemo_lowprec.layer ", "nemo_lowprec.optimizer"
_NODE = "autograd::engine::evaluate_function: "


class Kernel(NamedTuple):
    """A kernel of a step; on a CPU an operation of torch.

    Attributes:
        name: of the kernel.
        kind: one of ``KINDS``.
        layer: name of the module; empty where the kernel belongs to none.
        start, end: ns.
    """

    name: str
    kind: str
    layer: str
    start: int
    end: int


def optimizer_range() -> record_function:
    """Context in which kernels that no layer launches are the optimizer's."""
    return record_function(_OPTIMIZER)


@contextmanager
def layer_ranges(model: nn.Module) -> Iterator[None]:
    """Context in which each call of a module in ``model`` is a range of the trace."""
    names = {module: name for name, module in model.named_modules() if name}

    @contextmanager
    def named(module: nn.Module) -> Iterator[None]:
        name = names.get(module)
        if name is None:
            yield
            return
        with record_function(_LAYER + name):
            yield

    with around_calls(named):
        yield


def kernels_of(events: Sequence[Event]) -> list[Kernel]:
    """The kernels of a trace of a GPU, in the order in which they have begun."""
    launched = {event.launch: event.start for event in events if event.kind == "launch"}
    kernels = [event for event in events if event.kind == "kernel"]
    times = sorted(launched.get(kernel.launch, kernel.start) for kernel in kernels)
    places = dict(zip(times, _places(events, times), strict=True))
    found = []
    for kernel in kernels:
        layer, updates = places[launched.get(kernel.launch, kernel.start)]
        kind = OPTIMIZER if updates else kind_of(kernel.name)
        found.append(Kernel(kernel.name, kind, layer, kernel.start, kernel.end))
    return found


def operations_of(events: Sequence[Event]) -> list[Kernel]:
    """The operations of a trace of a CPU, each with the time that its own inner operations leave."""
    ops = [event for event in events if event.kind == "op" and not event.name.startswith(_NODE)]
    places = _places(events, [op.start for op in ops])
    found, open_ops, inner = [], list[tuple[Event, int]](), dict[int, int]()
    for index, op in enumerate(ops):
        while open_ops and open_ops[-1][0].end <= op.start:
            open_ops.pop()
        parent = next((i for event, i in reversed(open_ops) if event.thread == op.thread and event.end >= op.end), None)
        if parent is not None:
            inner[parent] = inner.get(parent, 0) + op.end - op.start
        open_ops.append((op, index))
    for index, (op, (layer, updates)) in enumerate(zip(ops, places, strict=True)):
        own = op.end - op.start - inner.get(index, 0)
        if own > 0:
            found.append(Kernel(op.name, OPTIMIZER if updates else kind_of(op.name), layer, op.start, op.start + own))
    return found


def _places(events: Sequence[Event], times: Sequence[int]) -> list[tuple[str, bool]]:
    """The layer at each of the ascending ``times``, and whether it is the optimizer's time."""
    of_nodes = _layers_of_nodes(events)
    ranges = [e for e in events if e.kind == "range" and e.name.startswith((_LAYER, _OPTIMIZER))]
    ranges += [e for e in events if e.name.startswith(_NODE)]
    ranges.sort(key=lambda e: (e.start, -e.end))
    starts = [e.start for e in ranges]
    found, open_ranges, taken = [], list[Event](), 0
    for time in times:
        until = bisect_right(starts, time)
        open_ranges = [e for e in (*open_ranges, *ranges[taken:until]) if e.end >= time]
        taken = until
        # The host's threads wait for one another in a pass: the range that has begun last is the innermost.
        found.append(_place(open_ranges[-1] if open_ranges else None, of_nodes))
    return found


def _place(innermost: Event | None, of_nodes: Mapping[tuple[int, int], str]) -> tuple[str, bool]:
    if innermost is None:
        return "", False
    if innermost.name == _OPTIMIZER:
        return "", True
    if innermost.name.startswith(_LAYER):
        return innermost.name.removeprefix(_LAYER), False
    return of_nodes.get((innermost.forward_thread, innermost.sequence), ""), False


def _layers_of_nodes(events: Sequence[Event]) -> dict[tuple[int, int], str]:
    """The layer that has made a node of autograd, by thread and sequence number.

    Operations that make no node have the number of the next one that does: the last operation of a number has made it.
    """
    found: dict[tuple[int, int], str] = {}
    open_layers: dict[int, list[Event]] = {}
    for event in events:
        layers = open_layers.setdefault(event.thread, [])
        while layers and layers[-1].end <= event.start:
            layers.pop()
        if event.kind == "range" and event.name.startswith(_LAYER):
            layers.append(event)
        elif event.kind == "op" and event.sequence >= 0 and not event.forward_thread:
            found[event.thread, event.sequence] = layers[-1].name.removeprefix(_LAYER) if layers else ""
    return found
