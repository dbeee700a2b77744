"""Parts of a model on this process, as Megatron-core trains them: cast to the level, wrapped for data parallelism."""

from __future__ import annotations

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.fp8_utils import is_float8tensor
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn

from nemo_lowprec.megatron.gradients import hold_in_fp8
from nemo_lowprec.megatron.optimizer import INITIAL_VALUES
from nemo_lowprec.megatron.settings import MegatronSettings


@torch.no_grad()
def start_from(param: nn.Parameter, values: Tensor) -> None:
    """Give a parameter these values; a master of it will start from them, and not from what it rounds them to."""
    param.copy_(values.to(param.device))
    if is_float8tensor(param) or param.dtype.itemsize < values.dtype.itemsize:
        setattr(param, INITIAL_VALUES, values.detach().float().cpu())


@torch.no_grad()
def cast_parameters(module: nn.Module, settings: MegatronSettings) -> None:
    """Give the parameters the level's dtypes, in place; masters start from what they were before."""
    for param in module.parameters():
        if is_float8tensor(param) or not param.is_floating_point():
            continue
        dtype = settings.matrices if param.dim() > 1 else settings.vectors
        if dtype.itemsize < param.dtype.itemsize and param.requires_grad and not hasattr(param, INITIAL_VALUES):
            setattr(param, INITIAL_VALUES, param.detach().float().cpu())
        if param.dtype != dtype:
            param.data = param.data.to(dtype)


def wrap(
    module: nn.Module,
    config: TransformerConfig,
    ddp_config: DistributedDataParallelConfig,
    settings: MegatronSettings,
    is_first: bool = True,
) -> DistributedDataParallel:
    """``module`` in Megatron's data parallelism, with gradients in the level's format.

    Args:
        is_first: whether it is the first of a process's chunks; those of the others are not worth buckets.
    """
    ddp = DistributedDataParallel(config, ddp_config, module, disable_bucketing=not is_first)
    if settings.fp8_gradients:
        hold_in_fp8(ddp)
    else:
        fuse_weight_gradients(module)
    return ddp


def unwrapped(chunk: nn.Module) -> nn.Module:
    """The part of the model itself, whether ``wrap`` has wrapped it or not."""
    return chunk.module if isinstance(chunk, DistributedDataParallel) else chunk


def unhook(chunk: DistributedDataParallel) -> None:
    """Let gradients pass a chunk by, and let go of its buffers: its hooks live as long as a graph of the model does."""
    for held in (
        chunk.grad_accs, chunk.param_to_bucket_group, chunk.buffers, chunk.bucket_groups,
        chunk.expert_parallel_buffers, chunk.expert_parallel_bucket_groups,
    ):  # fmt: skip
        held.clear()


def fuse_weight_gradients(module: nn.Module) -> None:
    """Let Transformer Engine's layers add weight gradients to their buffers within the GEMM.

    Not by TransformerConfig's ``gradient_accumulation_fusion``, which asks for a CUDA extension of Apex in the head.
    """
    for layer in module.modules():
        if hasattr(layer, "fuse_wgrad_accumulation"):
            layer.fuse_wgrad_accumulation = True  # type: ignore[assignment]
