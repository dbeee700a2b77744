"""What goes wrong inside a training process, as callbacks: a signal in one phase of a step, a NaN, a full disk."""

from __future__ import annotations

import hashlib
import os
import resource
import signal
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from nemo_lowprec.checkpoint import writing
from nemo_lowprec.comm.buckets import Fp8Bucket, Fp8ShardBucket
from nemo_lowprec.strategies import MegatronStrategy
from nemo_lowprec.tensors import QuantizedTensor
from nemo_lowprec.tensors.dtensor import local_shard

__all__ = ["FullDisk", "Killer", "Spoiler", "Steps", "values"]


class Killer(Callback):
    """Sends this process a signal in one phase of one step, once.

    Args:
        phase: ``forward``, ``backward``, ``reduction`` (of FP8 gradients), ``averaged`` (they are),
            ``step`` (the optimizer has stepped), ``writing`` (a checkpoint's tensors), ``checkpoint`` (is complete, and
            not in its place) or ``validation``.
        step: of ``trainer.global_step``.
        number: of the signal.
    """

    def __init__(self, phase: str, step: int, number: int = signal.SIGKILL) -> None:
        self.phase, self.step, self.number = phase, step, number
        self.process = 0

    def at(self, trainer: Any, phase: str) -> None:
        # A checkpoint in the background may be written a step later.
        late = phase in ("writing", "checkpoint") and trainer.global_step > self.step
        is_now = late or trainer.global_step == self.step
        if phase == self.phase and is_now and os.getpid() == self.process:  # not in one that writes for Megatron-core
            self.phase = "none"  # once, where one survives it
            os.kill(os.getpid(), self.number)

    def on_validation_batch_start(self, trainer: Any, *_: Any) -> None:
        self.at(trainer, "validation")

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        self.at(trainer, "averaged")

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        self.process = os.getpid()
        module.mid.register_forward_hook(lambda *_: self.at(trainer, "forward"))
        module.mid.register_full_backward_hook(lambda *_: self.at(trainer, "backward"))
        for owner, name, phase in (
            (Fp8Bucket, "advance", "reduction"),
            (Fp8ShardBucket, "advance", "reduction"),
            (os, "fsync", "writing"),  # tensors are written, and what says where they are is not
            (os, "replace", "checkpoint"),
            (writing, "_exchange", "checkpoint"),
        ):
            self._before(trainer, owner, name, phase)

    def _before(self, trainer: Any, owner: Any, name: str, phase: str) -> None:
        whole = getattr(owner, name)

        def watched(*args: Any) -> Any:
            self.at(trainer, phase)
            return whole(*args)

        setattr(owner, name, watched)

    def on_before_zero_grad(self, trainer: Any, module: Any, optimizer: Any) -> None:
        for one in trainer.optimizers:
            one.register_step_post_hook(lambda *_: self.at(trainer, "step"))


class Spoiler(Callback):
    """Makes a gradient NaN on this process, in one backward pass.

    Args:
        step: of ``trainer.global_step``.
        averaged: whether gradients are averaged by then.
    """

    def __init__(self, step: int, averaged: bool) -> None:
        self.step, self.averaged = step, averaged

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        def spoil(module: Any, grads: Any) -> Any:
            is_now = not self.averaged and trainer.global_step == self.step
            return tuple(g if g is None else g * torch.nan for g in grads) if is_now else None

        module.mid.register_full_backward_pre_hook(spoil)

    @torch.no_grad()
    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        # Megatron-core reduces gradients behind on_after_backward, into buffers of its own.
        if isinstance(trainer.strategy, MegatronStrategy):
            self._after(trainer, module, "main_grad")

    def on_after_backward(self, trainer: Any, module: Any) -> None:
        if not isinstance(trainer.strategy, MegatronStrategy):
            self._after(trainer, module, "grad")

    @torch.no_grad()
    def _after(self, trainer: Any, module: Any, name: str) -> None:
        if self.averaged and trainer.global_step == self.step:
            for param in module.parameters():
                grad = local_shard(getattr(param, name))
                if isinstance(grad, QuantizedTensor):
                    grad.mul_(torch.nan)
                else:
                    grad.fill_(torch.nan)


class FullDisk(Callback):
    """Leaves no room on the disk from one step on.

    Args:
        step: of ``trainer.global_step``.
        free: bytes that are left.
        ballast: a file on the checkpoints' disk that takes the rest; None: the system lets no file of this process
            grow beyond ``free`` bytes, where there is no disk that may be filled.
    """

    def __init__(self, step: int, free: int, ballast: Path | None) -> None:
        self.step, self.free, self.ballast = step, free, ballast

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step != self.step:
            return
        if self.ballast is None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (self.free, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
            return
        disk = os.statvfs(self.ballast.parent)
        with self.ballast.open("wb") as file:
            file.write(bytes(max(0, disk.f_bavail * disk.f_frsize - self.free)))


class Steps(Callback):
    """Prints each step when it is made, with what tells whether the weights of this process changed."""

    def on_train_start(self, trainer: Any, module: Any) -> None:
        print(f"starts at {trainer.global_step}", flush=True)

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        found = hashlib.sha256()
        finite = True
        for param in module.parameters():
            held = values(param)
            finite = finite and bool(held.isfinite().all())
            found.update(held.contiguous().view(torch.uint8).numpy().tobytes())
        print(f"step {trainer.global_step} {found.hexdigest()[:16]} {finite}", flush=True)


def values(param: Tensor) -> Tensor:
    """Of a parameter, or of this process's rows of it."""
    local = local_shard(param).detach()
    return (local.dequantize() if isinstance(local, QuantizedTensor) else local).cpu()
