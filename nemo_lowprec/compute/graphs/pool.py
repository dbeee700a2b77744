"""What the captured blocks of one model share."""

from __future__ import annotations

import logging
import time
from collections import Counter, defaultdict
from collections.abc import Hashable
from typing import Any
from weakref import WeakSet, WeakValueDictionary

import torch

from nemo_lowprec.compute.graphs.inputs import Unfit
from nemo_lowprec.compute.graphs.lent import Loans

log = logging.getLogger("nemo_lowprec")


class Clock:
    """Host and GPU time of one forward pass, which begins now.

    The host waits for the GPU before the pass: behind a full queue of launches each launch takes as long as a kernel,
    and the host would seem to be as slow as the GPU.
    """

    def __init__(self) -> None:
        torch.cuda.current_stream().synchronize()
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        self._events[0].record()
        self._start = time.perf_counter()
        self._host = 0.0

    def stop(self) -> None:
        """The pass ends."""
        self._host = time.perf_counter() - self._start
        self._events[1].record()

    def host(self) -> float:
        """Seconds on the host."""
        return self._host

    def gpu(self) -> float:
        """Seconds on the GPU, gaps included: where it waits for the host, the host's time."""
        self._events[1].synchronize()
        return self._events[0].elapsed_time(self._events[1]) / 1e3


class GraphPool:
    """Memory of the graphs, the stream of the capture, the order of the passes, and what was said.

    Graphs that are captured later may take memory in which earlier ones have their temporary tensors, which are dead
    once a graph has run. What a graph keeps from forward to backward is never given away. So a forward pass may run
    as long as no graph that was captured after it waits for its backward pass. Forward and backward graphs have memory
    of their own, since backward passes run in the reverse order. ``Loans`` keeps the results that graphs have lent.
    The pass of a whole model has memory that no other pass has (``memory``). Passes that recompute activations keep
    nothing: all of them have one memory (``memory_for_one``), and share the tensors for copies of arguments and results
    (``static``).

    Args:
        device: a GPU.
        saves_memory: whether memory counts. Then a pass is captured only where the GPU waits for the host, and where
            the graph takes about the memory that the pass takes.

    Attributes:
        stream: the stream of the capture.
        results, gradients: the results that forward graphs and backward graphs have lent.
        clocks: of each module's passes before its capture, by the module's class and the key of its arguments.
        within: while a whole model's pass is timed, gets the clocks of the model's blocks, by name; None otherwise.
        undecided: number of modules in whose forward the host is, and which may still become one graph.
    """

    _unused: bool  # whether no pass was captured in the memory
    _recomputed: WeakSet[Any]  # the passes of the one memory
    _one: Any  # the handle of that memory

    def __init__(self, device: torch.device, saves_memory: bool = False) -> None:
        self.device, self.saves_memory = device, saves_memory
        self.results, self.gradients = Loans(), Loans()
        self.clocks: dict[Hashable, list[Clock]] = defaultdict(list)
        self.within: dict[str, list[Clock]] | None = None
        self.renew()
        self.stream = torch.cuda.Stream(device)
        self.undecided = 0
        self._captured = 0  # passes so far
        self._passes: WeakSet[Any] = WeakSet()
        self._statics: WeakValueDictionary[Hashable, torch.Tensor] = WeakValueDictionary()
        self._waiting: list[int] = []  # numbers of the passes that wait for their backward pass
        self._reasons: Counter[str] = Counter()

    def add(self, captured: Any) -> int:
        """The number of a pass that is about to be captured."""
        if not self._passes:
            self.renew()  # memory whose last graph is gone cannot be used again
            self.results, self.gradients = Loans(), Loans()
        self._passes.add(captured)
        self._captured += 1
        return self._captured

    def memory(self, is_shared: bool) -> tuple[Any, Any, bool]:
        """(handles of the memory of a forward and of a backward graph, whether no graph was captured there before).

        Where no other pass shares the memory, both handles are equal: backward may use memory that activations left.

        Raises:
            Unfit: the pass would share memory, where its activations stay for as long as there are graphs.
        """
        if not is_shared:
            handle = torch.cuda.graph_pool_handle()
            return handle, handle, True
        if self.saves_memory:
            raise Unfit("its graph would keep memory that activations is there to save; graphs=True allows it")
        first, self._unused = self._unused, False
        return self._forward, self._backward, first

    def memory_for_one(self, captured: Any) -> tuple[Any, Any, bool]:
        """(handles of the memory of both graphs of ``captured``, whether no graph was captured there before).

        All passes whose activations are gone when the next pass runs have this one memory, of two equal handles.
        """
        first = not self._recomputed
        if first:
            self._one = torch.cuda.graph_pool_handle()
        self._recomputed.add(captured)
        return self._one, self._one, first

    def static(self, place: Hashable, like: torch.Tensor) -> torch.Tensor:
        """The tensor for ``place`` with the shape, strides and dtype of ``like``, which all passes share.

        The tensor lives as long as a pass holds the tensor.
        """
        key = place, like.shape, like.stride(), like.dtype, like.requires_grad
        found = self._statics.get(key)
        if found is None:
            found = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=self.device)
            self._statics[key] = found
        return found

    def renew(self) -> None:
        """Take other memory for the graphs to come: that of a capture which has failed cannot be used again."""
        self._forward, self._backward = torch.cuda.graph_pool_handle(), torch.cuda.graph_pool_handle()
        self._unused = True
        self._recomputed = WeakSet()

    def has_room(self) -> bool:
        """Whether a quarter of the GPU's memory is free, of which a graph keeps the memory of its block's pass."""
        free, total = torch.cuda.mem_get_info(self.device)
        cached = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        return free + cached >= total // 4

    def may_run(self, number: int) -> bool:
        """Whether the forward pass ``number`` may run now."""
        return not self._waiting or number > max(self._waiting)

    def begin(self, number: int) -> None:
        """The forward pass ``number`` runs, and waits for its backward pass."""
        self._waiting.append(number)

    def end(self, number: int) -> None:
        """The pass ``number`` waits no longer."""
        if number in self._waiting:
            self._waiting.remove(number)

    def say(self, name: str, reason: str) -> None:
        """Log once for each reason that a block runs without a graph."""
        self._reasons[reason] += 1
        if self._reasons[reason] == 1:
            log.info("CUDA graphs: %s runs without, since %s.", name, reason)

    def tell(self, message: str, *args: Any) -> None:
        """Log ``message`` once."""
        if not self._reasons[message]:
            log.info(message, *args)
        self._reasons[message] += 1
