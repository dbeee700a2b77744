"""What the benchmarks measure with: bytes that tensors store, peaks of memory, seconds a step under a Trainer.

Without a GPU everything runs and peaks are 0, so that a script can be tried.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import profile

from nemo_lowprec.plugins.replaced import replace_attribute
from nemo_lowprec.report.advice.measuring import idle_in_graphs, release
from nemo_lowprec.tensors import QuantizedTensor
from nemo_lowprec.weights.masters import master_of

__all__ = [
    "DEVICE", "MIB", "Watch", "allocated", "idle_in_graphs", "kernels_of", "peaks", "release", "reset_peak", "sizes",
    "stay_on_gpu", "synchronize",
]  # fmt: skip

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
MIB = 2**20


def synchronize() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def kernels_of(profiler: profile) -> list[Any]:
    """The events of the kernels and copies that a profiler has seen on the GPU."""
    # A range of the user (the optimizer's step has one) is no kernel.
    return [e for e in profiler.events() or () if e.device_type == DeviceType.CUDA and not e.is_user_annotation]


def stay_on_gpu(trainer: Any, module: Any) -> None:
    """At the end of training. Lightning would move model and states to the CPU, which takes longer than the steps."""
    trainer.strategy.optimizers = []
    module.cpu = lambda: module


def allocated() -> int:
    """Bytes allocated now."""
    return torch.cuda.memory_allocated() if DEVICE.type == "cuda" else 0


def reset_peak() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.reset_peak_memory_stats()


def peaks() -> tuple[int, int]:
    """Most bytes allocated and reserved since ``reset_peak``."""
    if DEVICE.type != "cuda":
        return 0, 0
    return torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()


def _plain(value: Any) -> Iterator[Tensor]:
    """The plain tensors inside of a tensor, a dict or a sequence."""
    if isinstance(value, QuantizedTensor):
        yield from value.parts()
    elif isinstance(value, (dict, list, tuple)):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _plain(one)
    elif hasattr(value, "get_data_tensors"):  # Transformer Engine's FP8 tensors
        yield from _plain(value.get_data_tensors())
    elif hasattr(value, "__tensor_flatten__"):  # torchao's states
        for name in value.__tensor_flatten__()[0]:
            yield from _plain(getattr(value, name))
    elif isinstance(value, Tensor):
        yield value


def sizes(**columns: Iterable[Any]) -> dict[str, int]:
    """Bytes of each column's tensors; a tensor that is in several counts in the first."""
    seen: set[int] = set()
    result = dict.fromkeys(columns, 0)
    for name, values in columns.items():
        for tensor in _plain(list(values)):
            if tensor.data_ptr() not in seen:
                seen.add(tensor.data_ptr())
                result[name] += tensor.nbytes
    return result


def _taken(optimizer: torch.optim.Optimizer) -> int:
    """Steps that the optimizer has taken: not those that loss scaling skipped."""
    return int(max((s["step"] for s in optimizer.state.values() if "step" in s), default=0))


class Watch(pl.Callback):
    """Seconds a step over rounds, peaks of memory, and the bytes by column at the peak.

    Peaks count from step ``settled`` on, without what setting up and the steps before it left in torch's cache. All
    memory of a CUDA graph counts as allocated from the first round on, when graphs are captured (``warmup``). One
    step after the last round is traced: wherever the peak rises, the gradients that are there are noted. ``rest`` is
    the peak less weights, masters, optimizer states and those gradients: activations, casts of weights, workspaces.
    The end of training moves nothing to the CPU.

    Args:
        rounds: rounds to time.
        every: steps of a round.
        warmup: steps before the first round.
        settled: steps before peaks count.
    """

    def __init__(self, rounds: int, every: int = 5, warmup: int = 6, settled: int = 3) -> None:
        self.every, self.warmup, self.settled = every, warmup, settled
        self.traced = warmup + every * rounds
        self.rounds: list[float] = []
        self.setup_peak = self.first_steps_peak = self.peak = self.peak_reserved = self.skipped = 0
        self.columns: dict[str, int] = {}
        self._start = 0.0
        self._high = self._gradients = self._taken = self._idle = 0
        self._params: list[Any] = []
        self._hooks: list[Any] = []
        self._undo = ExitStack()

    @property
    def steps(self) -> int:
        """``max_steps`` of the Trainer."""
        return self.traced + 1

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
        if index == 0:
            self.setup_peak = peaks()[0]
            reset_peak()
        if index == self.settled:
            self.first_steps_peak = peaks()[0]
            release()
            reset_peak()
        if index == self.warmup:
            self._count_peaks()
        if index >= self.warmup and (index - self.warmup) % self.every == 0:
            synchronize()
            now = time.perf_counter()
            if index > self.warmup:
                self.rounds.append((now - self._start) / self.every)
            else:
                self._taken = _taken(trainer.optimizers[0])
            self._start = now
        if index == self.traced:
            self.skipped = index - self.warmup - (_taken(trainer.optimizers[0]) - self._taken)
            self._count_peaks()
            self._params = list(module.parameters())
            self._hooks = [p.register_post_accumulate_grad_hook(self._note) for p in self._params if p.requires_grad]
            # Not ``on_before_zero_grad``, which tells the plugin that somebody reads gradients then.
            replace_attribute(self._undo, module, "training_step", self._noted(module.training_step))

    def _count_peaks(self) -> None:
        """Count the peaks since the last call. A graph that was captured in between counts with what was allocated."""
        allocated, reserved = peaks()
        self.peak = max(self.peak, allocated + self._idle)
        self.peak_reserved = max(self.peak_reserved, reserved)
        self._idle = idle_in_graphs()
        reset_peak()

    def _note(self, *_: Any) -> None:
        high = peaks()[0]
        if self._params and high > self._high:
            self._high, self._gradients = high, sum(sizes(gradients=[p.grad for p in self._params]).values())

    def _noted(self, run: Callable[..., Any]) -> Callable[..., Any]:
        def training_step(*args: Any, **kwargs: Any) -> Any:
            result = run(*args, **kwargs)
            self._note()
            return result

        return training_step

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        self._note()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
        self._note()
        if index != self.traced:
            return
        for hook in self._hooks:
            hook.remove()
        self._undo.close()
        self._count_peaks()
        states = [(k, v) for s in trainer.optimizers[0].state.values() for k, v in s.items()]
        masters = [v for k, v in states if "master" in k]
        masters += [m for m in map(master_of, self._params) if m is not None]
        self.columns = sizes(weights=self._params, masters=masters, states=[v for _, v in states])
        self.columns["gradients"] = self._gradients
        self.columns["rest"] = max(0, self.peak - sum(self.columns.values()))
        self._params.clear()

    def on_train_end(self, trainer: Any, module: Any) -> None:
        stay_on_gpu(trainer, module)
        # Lightning gives each callback the module's ``log``: who keeps the figures would keep the model.
        del self.log, self.log_dict
