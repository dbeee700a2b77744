"""Stands in the place of a block's ``forward``: runs the block, captures it, or replays its graphs."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator
from functools import partial
from types import MethodType
from typing import Any
from weakref import ref

import torch
from torch import nn

from nemo_lowprec.compat.autograd import current_backward, saves_through_hooks
from nemo_lowprec.compat.modules import is_compiled
from nemo_lowprec.compat.tensors import has_dispatch_mode
from nemo_lowprec.compute.backends.base import is_transformed
from nemo_lowprec.compute.gemm_plan import GemmPlan
from nemo_lowprec.compute.graphs.blocks import find_blocks, find_wholes
from nemo_lowprec.compute.graphs.captured import CapturedPass
from nemo_lowprec.compute.graphs.checkpointing import resume, suspend, suspended_checkpoint
from nemo_lowprec.compute.graphs.guard import Guard, HostState, obstacle
from nemo_lowprec.compute.graphs.inputs import Unfit, flatten, key_of
from nemo_lowprec.compute.graphs.layers import Layers
from nemo_lowprec.compute.graphs.pool import Clock, GraphPool
from nemo_lowprec.compute.graphs.recomputed import RecomputedPass
from nemo_lowprec.compute.producers import Reader
from nemo_lowprec.observers import Observer, Observers

_WARMUP = 3  # passes of a key before its capture: scales without a history, compiled kernels, autotuned libraries
_UNFIT = 8  # calls with arguments that no graph takes, after which nobody looks at them any more
_KEYS = 4  # kinds of arguments that get graphs
_INSTANCES = 16  # captured passes of one key, of which each waits for its backward pass when the next one runs
_CAPTURES = 3  # captures of one key, after the block was changed
_LARGE = 2**28  # bytes of results, of which a graph holds three copies, up to which a whole model is one graph
_BUSY = 1.3  # the GPU's time over the host's from which a block gains nothing by a graph
_BUSY_SAVING = 1.15  # the same where memory counts: just above 1, which is the ratio where the GPU waits
# Where a block recomputes, its forward pass makes no graph of autograd: the host takes longer for a whole step, beside
# the GPU, by this factor. docs/measured.rst has what graphs gain by the ratio: a layer of Llama 8B gains at 1.27, and
# loses at 1.7.
_RECOMPUTES = 1.2


class GraphedForward:
    """The ``forward`` of a block.

    Args:
        block: a module of the model.
        name: its name.
        layers: of the block.
        pool: of the model.
        observers: of the engine. A pass that is observed has a graph of its own, or none.
        always: whether blocks are captured whose GPU time is longer than their host time, too.
        is_whole: whether there are blocks inside of the block, which wait until the graph of this one fails.
    """

    def __init__(
        self,
        block: nn.Module,
        name: str,
        layers: Layers,
        pool: GraphPool,
        observers: Observers,
        always: bool,
        is_whole: bool,
    ) -> None:
        self.is_whole = is_whole
        self._block, self.name, self._layers, self.pool = ref(block), name, layers, pool
        self._observers, self._always = observers, always
        # The pass that tells whether the GPU waits comes after those in which layers begin to compute as one.
        self._warmup = _WARMUP if always else _WARMUP + 1
        self._forward = type(block).forward
        self._passes: dict[Hashable, list[CapturedPass]] = defaultdict(list)
        # Of a whole model, by the key of its arguments: the clocks of its blocks, by their names.
        self._within: dict[Hashable, dict[str, list[Clock]]] = defaultdict(lambda: defaultdict(list))
        self._seen: Counter[Hashable] = Counter()
        self._guards: dict[Hashable, Guard] = {}
        self._changed: Counter[Hashable] = Counter()
        self._observed: Counter[Hashable] = Counter()  # observed passes without a graph
        self._unfit = 0  # calls whose arguments no graph takes
        self._off: str | None = None

    @property
    def overwrites_gradients(self) -> bool:
        """Whether the forward pass of a graph writes where the graph's last backward pass has left gradients."""
        return any(not found.shares_memory for passes in self._passes.values() for found in passes)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        import copy

        return MethodType(self._forward, copy.deepcopy(self._block(), memo))

    def __reduce__(self) -> Any:
        return MethodType, (self._forward, self._block())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        block = self._block()
        assert block is not None
        if torch.compiler.is_compiling():
            return self._eager(block, args, kwargs)
        recomputes = suspend(block)
        if self._off is not None or not block.training or not torch.is_grad_enabled():
            return self._eager(block, args, kwargs)
        if self.pool.undecided:
            if self.pool.within is None or self.is_whole:
                return self._eager(block, args, kwargs)
            return self._timed(self.pool.within[self.name], block, args, kwargs)
        observers = self._observers.of_passes
        if _is_special() or not all([observer.capturable for observer in observers]):
            return self._eager(block, args, kwargs)
        try:
            leaves, structure = flatten((args, kwargs))
            key = key_of(leaves, structure)
        except Unfit as reason:
            self._unfit += 1
            if self._unfit > _UNFIT:
                self._off = str(reason)
            self.pool.say(self.name, str(reason))
            return self._eager(block, args, kwargs)
        if observers:
            found = self._observed_pass(block, key, observers, leaves, structure, recomputes)
            return self._eager(block, args, kwargs) if found is None else found(leaves)
        try:
            found = self._find(key)
            if found is None and self._is_due(key, recomputes):
                found = self._capture(block, key, leaves, structure, recomputes)
        except Unfit as reason:
            self._give_up(str(reason))
            found = None
        if found is not None:
            return found(leaves)
        if self._off is not None:
            return self._eager(block, args, kwargs)
        if not self.is_whole or self._is_over(key):
            return self._run(block, key, args, kwargs)
        self.pool.undecided += 1
        try:
            return self._run(block, key, args, kwargs)
        finally:
            self.pool.undecided -= 1

    def close(self) -> None:
        """Free the graphs and their memory."""
        self._passes.clear()
        self._guards.clear()

    def _give_up(self, reason: str) -> None:
        self._off = reason
        self._passes.clear()
        self.pool.say(self.name, reason)

    def _is_over(self, key: Hashable) -> bool:
        """Whether no graph of this key will come."""
        return self._seen[key] > self._warmup or (key not in self._seen and len(self._seen) >= _KEYS)

    def _eager(self, block: nn.Module, args: Any, kwargs: Any) -> Any:
        """A pass without a graph."""
        checkpoint = suspended_checkpoint(block)
        if checkpoint is None:
            return self._forward(block, *args, **kwargs)
        return checkpoint(partial(self._forward, block, **kwargs), *args)

    def _run(self, block: nn.Module, key: Hashable, args: Any, kwargs: Any) -> Any:
        """A pass without a graph, which is watched while graphs of this key may still come."""
        if self._is_over(key):
            if len(self._seen) >= _KEYS:
                self.pool.tell("CUDA graphs: arguments of more than %s shapes; the others run without.", _KEYS)
            return self._eager(block, args, kwargs)
        self._seen[key] += 1
        if self._seen[key] == 1:
            if reason := obstacle(block):
                self._give_up(reason)
            before = HostState(block)
            result = self._eager(block, args, kwargs)
            if reason := before.changed(block):
                self._give_up(reason)
            if self.is_whole and _bytes_of(result) > _LARGE:
                self._give_up("its results are large")
            return result
        if self._always:
            return self._eager(block, args, kwargs)
        self.pool.within = self._within[key] if self.is_whole else None
        try:
            return self._timed(self.pool.clocks[type(block), key], block, args, kwargs)
        finally:
            self.pool.within = None

    def _timed(self, clocks: list[Clock], block: nn.Module, args: Any, kwargs: Any) -> Any:
        """A pass without a graph, whose clock joins ``clocks``."""
        clock = Clock()
        result = self._eager(block, args, kwargs)
        clock.stop()
        clocks.append(clock)
        return result

    def _observed_pass(
        self, block: nn.Module, key: Hashable, observers: tuple[Observer, ...], leaves: list[Any], structure: Any,
        recomputes: bool,
    ) -> CapturedPass | None:  # fmt: skip
        """A captured pass that tells ``observers``; None where the pass runs without a graph.

        The first observed pass runs without a graph, and compiles the kernels of the observers. It counts before the
        block has graphs, too: beside the memory of graphs, a pass without a graph needs as much memory again.
        """
        own = key, *observers
        found = self._find(own)
        if found is not None:
            return found
        self._observed[own] += 1
        others, was_tried = self._passes.get(key), own in self._passes  # a capture that failed leaves an empty list
        if not others or was_tried or self._observed[own] < 2:
            return None
        if not self._layers.are_warm() or not self.pool.has_room():
            return None
        try:
            return self._capture(block, own, leaves, structure, recomputes, beside=others[0])
        except Unfit as reason:
            self.pool.say(self.name, f"in an observed pass, {reason}")
            return None

    def _is_due(self, key: Hashable, recomputes: bool) -> bool:
        """Whether a pass of this key is to be captured now."""
        if self._seen[key] < self._warmup or self._changed[key] >= _CAPTURES:
            return False
        if not self._layers.are_warm():
            return False
        if not self._always and not self._passes[key] and self._keeps_gpu_busy(key, recomputes):
            self._give_up("its GPU time is longer than its host time")
            return False
        if not self._always and not self.pool.has_room():
            self._give_up("less than a quarter of the GPU's memory is free")
            return False
        reads = self._layers.reads()
        # A block that is called several times before its backward pass, as ALBERT's, needs a pass for each call.
        fitting = [found for found in self._passes[key] if found.fits(reads)]
        return len(fitting) < _INSTANCES and all(found.waits for found in fitting)

    def _keeps_gpu_busy(self, key: Hashable, recomputes: bool) -> bool:
        """Whether the GPU takes much longer than the host, and so does not wait for the host.

        A whole model may launch more than the queue of launches holds: its blocks tell, where they can be timed.
        """
        # The fastest pass, and the fastest of the blocks that are alike: another one may have compiled a kernel, or
        # asked the driver for memory.
        groups = list(self._within[key].values()) or [self.pool.clocks[type(self._block()), key]]
        gpu, host = (sum(min(map(time, clocks), default=0.0) for clocks in groups) for time in (Clock.gpu, Clock.host))
        bound = _BUSY_SAVING if self.pool.saves_memory else _BUSY
        return gpu > bound * (_RECOMPUTES if recomputes else 1) * host

    def _find(self, key: Hashable) -> CapturedPass | None:
        """A captured pass that may run now."""
        passes = self._passes.get(key)
        if not passes:
            return None
        self._layers.follow()
        if not self._guards[key].holds() or not self._layers.are_warm():
            self._passes.pop(key)
            self._changed[key] += 1
            self._observed.pop(key, None)
            if key in self._seen:
                self._seen[key] = 0
            return None
        reads = self._layers.reads()
        for found in passes:
            if not found.may_run() or not found.fits(reads):
                continue
            if found.gives_gradients_up():
                return found
            self.pool.say(self.name, "somebody holds the gradients of its last pass")
        return None

    def _capture(
        self, block: nn.Module, key: Hashable, leaves: list[Any], structure: Any, recomputes: bool,
        beside: CapturedPass | None = None,
    ) -> CapturedPass:  # fmt: skip
        self._layers.follow()
        fitting = [found for found in self._passes[key] if found.fits(self._layers.reads())]
        if len(fitting) < len(self._passes[key]):  # layers compute otherwise now, as one for example
            self._passes[key] = fitting
            self._changed[key] += 1

        def run(*args: Any, **kwargs: Any) -> Any:
            return self._forward(block, *args, **kwargs)

        self._guards[key] = Guard(block)
        with self._layers.capturing(block):
            made = RecomputedPass if recomputes else CapturedPass
            found = made(run, leaves, structure, block, self._layers, self.pool, self.is_whole, self._observers, beside)
        self._passes[key].append(found)
        what = "%s is one graph" if self.is_whole else "blocks of %s are captured"
        self.pool.tell(f"CUDA graphs: {what}.", type(block).__name__)
        return found


def _bytes_of(result: Any) -> int:
    return sum(leaf.nbytes for leaf in flatten(result)[0] if isinstance(leaf, torch.Tensor))


def _is_special() -> bool:
    """Whether something other than a plain training pass runs, which a replayed graph would not see."""
    recomputes = saves_through_hooks() or current_backward() != -1  # activation checkpointing of both kinds
    watched = is_transformed() or has_dispatch_mode() or torch.is_anomaly_enabled()
    return recomputes or watched or torch.cuda.is_current_stream_capturing()


class BlockGraphs:
    """The graphs of a model.

    Args:
        model: converted.
        device: a GPU.
        plans_of: returns the ``GemmPlan``s of a module, without its children's.
        observers: see ``GraphedForward``.
        always: see ``GraphedForward``.
        saves_memory: see ``GraphPool``.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        plans_of: Callable[[nn.Module], Iterable[GemmPlan]],
        observers: Observers,
        always: bool,
        saves_memory: bool,
    ) -> None:
        self.pool = GraphPool(device, saves_memory)
        self._blocks: list[nn.Module] = []
        blocks = find_blocks(model)
        wholes = find_wholes(model, blocks)
        for name, block in {**wholes, **blocks}.items():
            if "forward" in block.__dict__ or is_compiled(block):
                self.pool.say(name, "it has a forward of its own")
                continue
            modules = list(block.modules())
            readers = [own for module in modules for own in module.__dict__.values() if isinstance(own, Reader)]
            layers = Layers([plan for module in modules for plan in plans_of(module)], readers)
            block.__dict__["forward"] = GraphedForward(
                block, name, layers, self.pool, observers, always, is_whole=name in wholes
            )
            self._blocks.append(block)

    def _forwards(self) -> Iterator[tuple[nn.Module, GraphedForward]]:
        for block in self._blocks:
            forward = block.__dict__.get("forward")
            if isinstance(forward, GraphedForward):
                yield block, forward

    @property
    def overwrites_gradients(self) -> bool:
        """Whether the forward pass of a graph writes where the graph's last backward pass has left gradients."""
        return any(forward.overwrites_gradients for _, forward in self._forwards())

    def remove(self) -> None:
        """Give the blocks their forwards back."""
        for block, forward in list(self._forwards()):
            forward.close()
            resume(block)
            del block.__dict__["forward"]
        self._blocks.clear()
