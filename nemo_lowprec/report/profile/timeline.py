"""Kernels on the time line of a step: each instant counts once, so that all parts add up to the time of the step."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from nemo_lowprec.report.profile.kinds import COMMUNICATION
from nemo_lowprec.report.profile.layers import Kernel

__all__ = ["WAITS", "Shares", "matched", "shares_of", "sums_of"]

WAITS = "waits"  # the GPU runs nothing, and waits for the host


class Shares(NamedTuple):
    """The time of a step in parts.

    Attributes:
        ns: by layer (empty: none) and kind or ``WAITS``. A wait belongs to the layer of the kernel that ends it.
        launches: number of kernels, by layer.
    """

    ns: dict[tuple[str, str], int]
    launches: dict[str, int]


def shares_of(kernels: Sequence[Kernel]) -> Shares:
    """The parts of the time from the first kernel to the end of the last one.

    Where kernels run beside each other the one that has begun first counts, and communication only where nothing else
    runs.
    """
    ns: dict[tuple[str, str], int] = defaultdict(int)
    launches: dict[str, int] = defaultdict(int)
    ordered = sorted(kernels, key=lambda kernel: kernel.start)
    sent = [kernel for kernel in ordered if kernel.kind == COMMUNICATION]
    end = ordered[0].start if ordered else 0
    for kernel in ordered:
        launches[kernel.layer] += 1
        if kernel.kind == COMMUNICATION:
            continue
        if kernel.start > end:
            end = _fill(ns, sent, end, kernel.start, kernel.layer)
        ns[kernel.layer, kernel.kind] += max(0, kernel.end - end)
        end = max(end, kernel.end)
    last = max((kernel.end for kernel in ordered), default=0)
    _fill(ns, sent, end, last, "")
    return Shares(dict(ns), dict(launches))


def sums_of(operations: Sequence[Kernel]) -> Shares:
    """The parts of the time of operations that run one after the other; nobody waits."""
    ns: dict[tuple[str, str], int] = defaultdict(int)
    launches: dict[str, int] = defaultdict(int)
    for one in operations:
        ns[one.layer, one.kind] += one.end - one.start
        launches[one.layer] += 1
    return Shares(dict(ns), dict(launches))


def _fill(ns: dict[tuple[str, str], int], sent: list[Kernel], start: int, end: int, layer: str) -> int:
    """Share out a gap between other kernels: messages that run in it, and waiting. Returns the end."""
    while sent and sent[0].end <= start:
        sent.pop(0)
    for message in sent:
        if message.start >= end:
            break
        if message.start > start:
            ns[layer, WAITS] += message.start - start
            start = message.start
        until = min(message.end, end)
        if until > start:
            ns[message.layer, COMMUNICATION] += until - start
            start = until
    if end > start:
        ns[layer, WAITS] += end - start
    return max(start, end)


def matched(kernels: Sequence[Kernel], known: Sequence[Kernel], steps: int) -> tuple[list[Kernel], float]:
    """Kernels of steps whose layers nobody knows, with the layers of a step that launches the same ones.

    A replayed CUDA graph has no ranges. Of each name the order of the kernels is the same with the graph and without.

    Args:
        kernels: of ``steps`` steps; their layers are not read.
        known: of one step.
        steps: see above.

    Returns:
        The kernels with layers and kinds, and the share of their time whose layers are known. A kernel whose name
        another number of kernels has in ``known``, as copies into a graph have, belongs to the layer whose kernels run
        before and after it; between two layers it belongs to none.
    """
    of_name: dict[str, list[Kernel]] = defaultdict(list)
    for kernel in sorted(known, key=lambda kernel: kernel.start):
        of_name[kernel.name].append(kernel)
    total = Counter(kernel.name for kernel in kernels)
    seen: Counter[str] = Counter()
    found, twins = [], list[Kernel | None]()
    for kernel in sorted(kernels, key=lambda kernel: kernel.start):
        alike, index = of_name[kernel.name], seen[kernel.name]
        seen[kernel.name] += 1
        twins.append(alike[index % len(alike)] if alike and total[kernel.name] == steps * len(alike) else None)
        kinds = {twin.kind for twin in alike}
        found.append(kernel._replace(kind=kinds.pop() if len(kinds) == 1 else kernel.kind))
    before = _last_known(twins)
    after = _last_known(twins[::-1])[::-1]
    unknown = 0
    for place, twin in enumerate(twins):
        between = before[place] if before[place] == after[place] else None
        layer, kind = (twin.layer, twin.kind) if twin else (between, found[place].kind)
        found[place] = found[place]._replace(layer=layer or "", kind=kind)
        if layer is None:
            unknown += found[place].end - found[place].start
    time = sum(kernel.end - kernel.start for kernel in kernels)
    return found, 1 - unknown / time if time else 1.0


def _last_known(twins: Sequence[Kernel | None]) -> list[str | None]:
    """At each place the layer of the last kernel so far whose layer is known."""
    found: list[str | None] = []
    for twin in twins:
        found.append(twin.layer if twin else found[-1] if found else None)
    return found
