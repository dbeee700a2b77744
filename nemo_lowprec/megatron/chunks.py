"""Casts the parts of a model to the level, and wraps each part in Megatron's DistributedDataParallel."""

from __future__ import annotations

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.fp8_utils import is_float8tensor
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn

from nemo_lowprec.megatron.gradients import hold_in_fp8
from nemo_lowprec.megatron.optimizer import INITIAL_VALUES
from nemo_lowprec.megatron.settings import MegatronSettings
from nemo_lowprec.observers import NOBODY, Observers


@torch.no_grad()
def start_from(param: nn.Parameter, values: Tensor) -> None:
    """Copy ``values`` into a parameter; a parameter of fewer bits keeps an FP32 copy on the CPU for its master."""
    param.copy_(values.to(param.device))
    if is_float8tensor(param) or param.dtype.itemsize < values.dtype.itemsize:
        setattr(param, INITIAL_VALUES, values.detach().float().cpu())


@torch.no_grad()
def cast_parameters(module: nn.Module, settings: MegatronSettings) -> None:
    """Cast the parameters to the level's dtypes, in place; masters start from the values before the cast."""
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
    observers: Observers = NOBODY,
) -> DistributedDataParallel:
    """A part of the model in Megatron's DistributedDataParallel, with gradients in the level's format.

    Parts other than the first of a process (``is_first``) have one bucket each. ``observers`` are told of the means of
    gradients in FP8.
    """
    ddp = DistributedDataParallel(config, ddp_config, module, disable_bucketing=not is_first)
    if settings.fp8_gradients:
        hold_in_fp8(ddp, observers)
    else:
        fuse_weight_gradients(module)
    return ddp


def unwrapped(chunk: nn.Module) -> nn.Module:
    """The part of the model inside Megatron's DistributedDataParallel, or ``chunk`` itself."""
    return chunk.module if isinstance(chunk, DistributedDataParallel) else chunk


def unhook(chunk: DistributedDataParallel) -> None:
    """Free the buffers of a chunk, and make its hooks do nothing: the hooks live as long as an autograd graph does."""
    for held in (
        chunk.grad_accs, chunk.param_to_bucket_group, chunk.buffers, chunk.bucket_groups,
        chunk.expert_parallel_buffers, chunk.expert_parallel_bucket_groups,
    ):  # fmt: skip
        held.clear()


def fuse_weight_gradients(module: nn.Module) -> None:
    """Have Transformer Engine's GEMMs add weight gradients to Megatron's buffers.

    TransformerConfig's ``gradient_accumulation_fusion`` would need a CUDA extension of Apex for the head.
    """
    for layer in module.modules():
        if hasattr(layer, "fuse_wgrad_accumulation"):
            layer.fuse_wgrad_accumulation = True  # type: ignore[assignment]
