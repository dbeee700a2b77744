"""A training job of two processes, on the CPU or on GPUs; started again, it goes on from its last checkpoint."""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerStatus
from torch.utils.data import DataLoader

from benchmarks.fault_callbacks import Steps, values
from benchmarks.fault_model import Net, Samples, plugin, trainer
from nemo_lowprec.checkpoint.sharded_folder import in_full
from nemo_lowprec.data.loader import ResumableLoader
from nemo_lowprec.strategies import LowPrecisionDDPStrategy, LowPrecisionShardedStrategy, MegatronStrategy
from nemo_lowprec.tensors import QuantizedTensor

__all__ = ["STEPS", "STRATEGIES", "TIMEOUT", "main", "opened"]

STEPS = 8
TIMEOUT = 30  # seconds that a process waits for another one
_WAIT = timedelta(seconds=TIMEOUT)
STRATEGIES = {
    "ddp": lambda: DDPStrategy(timeout=_WAIT),
    "lowprec_ddp": lambda: LowPrecisionDDPStrategy(timeout=_WAIT),
    "sharded": lambda: LowPrecisionShardedStrategy(timeout=_WAIT),
    "async": lambda: LowPrecisionShardedStrategy(async_checkpoints=True, timeout=_WAIT),
    "megatron": lambda: MegatronStrategy(timeout=_WAIT),
}


class End(Callback):
    """Takes down what a whole run ends with, before the strategy lets go of it."""

    found: dict[str, Any]

    def on_fit_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        # Of a run that is resumed at its end, no hook comes later than this and before the teardown.
        teardown = trainer.strategy.teardown

        def watched() -> None:
            if trainer.global_step == STEPS and trainer.state.status != TrainerStatus.INTERRUPTED:
                self.found = _end(trainer, module)
            teardown()

        trainer.strategy.teardown = watched  # type: ignore[method-assign]


def _end(trainer: pl.Trainer, module: pl.LightningModule) -> dict[str, Any]:
    if not isinstance(trainer.strategy, MegatronStrategy):
        return _plain(in_full({"weights": module.state_dict(), "optimizer": trainer.optimizers[0].state_dict()}))
    stepper, params = trainer.strategy.engine.optimizer, list(module.parameters())
    assert stepper is not None
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, _plain({"masters": stepper.masters(params), "states": stepper.states(params)}))
    return {"weights": {n: values(p).clone() for n, p in module.named_parameters()}, "parts": parts}


def _plain(tree: Any) -> Any:
    """Copies of tensors in the CPU's memory, whatever they are stored in."""
    if isinstance(tree, dict):
        return {k: _plain(v) for k, v in tree.items()}
    if isinstance(tree, (list, tuple)):
        return [_plain(v) for v in tree]
    if isinstance(tree, QuantizedTensor):
        return tree.dequantize().cpu()
    return tree.detach().to("cpu", copy=True) if isinstance(tree, torch.Tensor) else tree


def main(
    rank: int,
    env: dict[str, str],
    output: Path,
    folder: Path,
    strategy: str,
    level: str = "msamp_o2",
    callbacks: tuple[Callback, ...] = (),
    *,
    requeues: bool = False,
    validates: bool = False,
    device: str = "cpu",
) -> None:
    """One process. It saves after every step, and the first one writes what the run ends with to folder/end.pt.

    Args:
        rank: of the process.
        env: of torchrun.
        output: a file for what the process prints.
        folder: of checkpoints.
        strategy: of ``STRATEGIES``.
        level: see ``plugin``.
        callbacks: of ``fault_callbacks``.
        requeues: whether Slurm has started it.
        validates: whether it validates after every second step.
        device: ``cpu``, with gloo; or ``cuda``, where the process has the GPU of its rank on its machine, with NCCL.
    """
    os.setsid()  # so that processes which this one starts are known by its number
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts what runs in the background without
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # NCCL's watchdog aborts, and nobody reads a core
    for descriptor in (1, 2):
        os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
    os.environ.update(env)
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(int(env["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo", timeout=_WAIT)
    plugins = [plugin(level, device), *([SLURMEnvironment()] if requeues else [])]
    try:
        with _megatron(device) if strategy == "megatron" else nullcontext():
            _train(rank, folder, strategy, plugins, callbacks, validates, device, int(env["LOCAL_WORLD_SIZE"]))
    finally:
        if device == "cuda":  # as Lightning does at exit; without it NCCL reports the process as failed
            dist.destroy_process_group()


def _megatron(device: str) -> AbstractContextManager[Any]:
    multiprocessing.set_start_method("fork", force=True)  # torchrun's processes have it, and not those of a fork server
    if device == "cuda":
        return nullcontext()
    from benchmarks.cpu_for_cuda import CpuForCuda  # takes seconds to import

    return CpuForCuda()


def _train(
    rank: int, folder: Path, strategy: str, plugins: list[Any], callbacks: tuple[Callback, ...], validates: bool,
    device: str, devices: int,
) -> None:  # fmt: skip
    saving = ModelCheckpoint(folder, save_top_k=0, save_last=True, every_n_train_steps=1)
    end = End()
    fit = trainer(
        plugins, [Steps(), *callbacks, end, saving], device, devices, strategy=STRATEGIES[strategy](), max_steps=STEPS,
        default_root_dir=folder.parent / "requeued", val_check_interval=2, check_val_every_n_epoch=None,
    )  # fmt: skip
    model = Net()
    torch.manual_seed(rank)
    data = ResumableLoader(Samples(), 4, 3, rank, 2, stop_at_epoch_end=False)
    last = folder / "last.ckpt"
    validation = DataLoader(Samples(), 4, generator=torch.Generator()) if validates else None
    fit.fit(model, data, validation, ckpt_path=last if last.exists() else None)
    if rank == 0 and fit.global_step == STEPS:
        torch.save(end.found, folder / "end.pt")
    dist.barrier()


def opened(path: Path) -> dict[str, Any]:
    """A checkpoint, or of a folder what lies beside the tensors."""
    return torch.load(path / "meta.pt" if path.is_dir() else path, weights_only=True)
