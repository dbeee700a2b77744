"""What the benchmarks on Megatron-core share: processes, a model of Llama-3-8B's shape, data, and a bare loop."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from benchmarks.llama import BATCH, SEQUENCE, VOCAB
from benchmarks.measure import release, stay_on_gpu
from nemo_lowprec.models import CausalLM
from nemo_lowprec.models.megatron_gpt import MegatronGPT
from nemo_lowprec.plugins import LEVELS
from nemo_lowprec.strategies import MegatronStrategy

__all__ = ["Timer", "bare", "on_gpus", "plugin", "transformers_path", "with_strategy"]

WARMUP, STEPS, GIB = 4, 20, 2**30
MODEL: dict[str, Any] = {
    "preset": "llama3_8b", "config": {"num_hidden_layers": 8, "max_position_embeddings": SEQUENCE},
    "vocab_size": VOCAB, "lr": 1e-5, "min_lr": 1e-6, "warmup_steps": 0,
}  # fmt: skip
CLIP = 1.0


def plugin(name: str) -> Any:
    """The level of a name such as ``msamp_o2+fp16`` or ``bf16_with_fp8_mixed+fp8_params``."""
    level, _, variant = name.partition("+")
    options = {"": {}, "fp16": {"half": "fp16"}, "fp8_params": {"fp8_params": True}}[variant]
    return LEVELS[level](**options)


class _Random(IterableDataset):
    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        generator = torch.Generator().manual_seed(int(os.environ.get("RANK", 0)))
        while True:
            tokens = torch.randint(VOCAB, (BATCH, SEQUENCE + 1), generator=generator)
            yield {"input_ids": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}


class Timer(pl.Callback):
    """Seconds a step after the first ones, and the peak of memory in them."""

    seconds = 0.0
    peak = 0

    def start(self) -> None:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        self._since = time.perf_counter()

    def stop(self) -> None:
        torch.cuda.synchronize()
        self.seconds = (time.perf_counter() - self._since) / STEPS
        self.peak = torch.cuda.max_memory_allocated()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
        if index == WARMUP - 1:
            self.start()
        elif index == WARMUP + STEPS - 1:
            self.stop()

    def on_train_end(self, trainer: Any, module: Any) -> None:
        stay_on_gpu(trainer, module)

    def figures(self) -> tuple[float, float]:
        """(seconds, GiB) of the slowest and of the largest process."""
        worst = torch.tensor([self.seconds, self.peak / GIB], device="cuda", dtype=torch.float64)
        if dist.is_initialized():
            dist.all_reduce(worst, dist.ReduceOp.MAX)
        return worst[0].item(), worst[1].item()


def _fit(module: CausalLM, name: str, **options: Any) -> tuple[float, float]:
    timer = Timer()
    trainer = pl.Trainer(
        accelerator="gpu", max_steps=WARMUP + STEPS, plugins=plugin(name), callbacks=[timer], logger=False,
        gradient_clip_val=CLIP, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        use_distributed_sampler=False, **options,
    )  # fmt: skip
    trainer.fit(module, DataLoader(_Random(), batch_size=None, pin_memory=True))
    return timer.figures()


def with_strategy(name: str, world: int) -> tuple[float, float]:
    """Seconds a step, and GiB, with MegatronStrategy under the Lightning Trainer."""
    return _fit(MegatronGPT(**MODEL), name, devices=world, strategy=MegatronStrategy())


def transformers_path(name: str, world: int) -> tuple[float, float]:
    """The same of transformers' model, alone or with the strategy that shards it as little as Megatron-core does."""
    strategy = "auto" if world == 1 else "lowprec_ddp"
    return _fit(CausalLM(**MODEL), name, devices=world, strategy=strategy)


def bare(name: str, world: int) -> tuple[float, float]:
    """The same of a loop as Megatron-LM's, on the same configs, with Megatron-core's own optimizer.

    Gradients are FP32 where the level's optimizer states are low-bit: Megatron-core clips no others there.
    """
    from megatron.core import tensor_parallel
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.transformer.enums import AttnBackend

    from nemo_lowprec.megatron import ParallelLayout
    from nemo_lowprec.megatron.chunks import fuse_weight_gradients
    from nemo_lowprec.models.megatron_llama import build_gpt, gpt_architecture

    layout = ParallelLayout()
    layout.initialize()
    tensor_parallel.model_parallel_cuda_manual_seed(1234)
    settings = plugin(name).megatron()
    fields = {**layout.fields(), **settings.model}
    if "attention_backend" in fields:
        fields["attention_backend"] = AttnBackend[fields["attention_backend"]]
    model = build_gpt(gpt_architecture(CausalLM(**MODEL).transformers_config()), fields)
    overlaps = {"overlap_grad_reduce": True, "overlap_param_gather": True}
    in_fp32 = settings.ddp["grad_reduce_in_fp32"] or settings.level.is_low_bit
    ddp_config = DistributedDataParallelConfig(**{**settings.ddp, **overlaps, "grad_reduce_in_fp32": in_fp32})
    ddp = DistributedDataParallel(model.config, ddp_config, model)
    fuse_weight_gradients(model)
    config = OptimizerConfig(
        **settings.optimizer, lr=MODEL["lr"], weight_decay=0.1, adam_beta2=0.95, clip_grad=CLIP,
        overlap_param_gather=True,
    )  # fmt: skip
    optimizer = get_megatron_optimizer(config, [ddp])
    model.config.finalize_model_grads_func = finalize_model_grads
    model.config.grad_scale_func = optimizer.scale_loss
    model.config.no_sync_func = ddp.no_sync
    batches = iter(DataLoader(_Random(), batch_size=None, pin_memory=True))
    schedule, timer = get_forward_backward_func(), Timer()

    def forward_step(iterator: Any, chunk: Any) -> Any:
        batch = {k: v.cuda(non_blocking=True) for k, v in next(iterator).items()}
        output = chunk(batch["input_ids"], None, None, labels=batch["labels"])
        return output, lambda losses: (losses.float().mean(), losses.detach().float().mean())

    for index in range(WARMUP + STEPS):
        ddp.zero_grad_buffer()
        optimizer.zero_grad()
        schedule(
            forward_step_func=forward_step, data_iterator=[batches], model=[ddp], num_microbatches=1,
            seq_length=SEQUENCE, micro_batch_size=BATCH,
        )  # fmt: skip
        optimizer.step()
        timer.on_train_batch_end(None, None, None, None, index)
    return timer.figures()


def on_gpus(gpus: int, function: Any, *args: Any, first: int = 0) -> None:
    """``function(rank, gpus, *args)`` on so many processes in one NCCL group.

    Each process has one of the GPUs that CUDA_VISIBLE_DEVICES names, from the ``first`` one on.
    """
    # As torchrun does it: a free port that the processes bound themselves could be taken by then.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    mp.start_processes(_start, (gpus, first, store.port, function, args), nprocs=gpus, start_method="spawn")


def _start(rank: int, gpus: int, first: int, port: int, function: Any, args: tuple[Any, ...]) -> None:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    visible = visible if visible[0] else [str(i) for i in range(first + gpus)]
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(visible[first : first + gpus])
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": gpus, "LOCAL_WORLD_SIZE": gpus, "GROUP_RANK": 0}
    os.environ.update({key: str(value) for key, value in numbers.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ.update(TORCHELASTIC_RUN_ID="benchmark", TORCHELASTIC_USE_AGENT_STORE="True")
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=gpus)
    function(rank, gpus, *args)
    gc.collect()
    release()
    dist.destroy_process_group()
