"""The columns of a level on Megatron-core: Computation; Megatron's buffers and optimizer implement the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from nemo_lowprec.column import Column
from nemo_lowprec.comm import Averaging, reduce_amax
from nemo_lowprec.compute import Computation, TEAmaxes, revert_layers
from nemo_lowprec.engine import DTYPES, Columns, new_amaxes
from nemo_lowprec.megatron.chunks import cast_parameters
from nemo_lowprec.megatron.settings import MegatronSettings
from nemo_lowprec.observers import Observers
from nemo_lowprec.optim import OptimizerStates
from nemo_lowprec.weights import WeightStore


def around(computation: Computation) -> Columns:
    """``computation`` with columns that do nothing for weights, gradients, states and communication."""
    return Columns(computation, WeightStore(), Column(), OptimizerStates(), Averaging(lambda param: param.dtype))


def of_built_chunks(settings: MegatronSettings, chunks: Sequence[nn.Module]) -> Columns:
    """The columns of chunks that Megatron-core has built from Transformer Engine's layers."""
    amaxes = TEAmaxes(nn.ModuleList(chunks))
    return around(Computation(settings.options, DTYPES[settings.level.autocast], amaxes))


def convert(module: nn.Module, settings: MegatronSettings, device: torch.device, observers: Observers) -> Columns:
    """Convert the layers of a module on ``device`` that Megatron-core has not built, and cast its parameters.

    Raises:
        ValueError: the backend, or the attention kernels, cannot run on ``device``.
    """
    level, options = settings.level, settings.options
    fp32_wgrad = level.has_half_weights and level.weight_grad == "fp32"
    # Amaxes of weights are computed when the layers run: after a step Megatron may still be gathering the weights.
    amaxes = new_amaxes(options.recipe, renews=False)
    options = replace(options, graphs=False, frozen="half")  # ``resolve`` has refused other choices
    computation = Computation(options, DTYPES[level.autocast], amaxes, fp32_wgrad=fp32_wgrad, observers=observers)
    computation.check(module, device, training=True)
    revert_layers(module)  # an earlier fit or evaluation of the same Trainer has converted them
    computation.install(module, training=True)
    cast_parameters(module, settings)
    for param in module.parameters() if fp32_wgrad else ():
        if param.is_leaf and param.requires_grad:
            param.grad_dtype = torch.float32
    computation.settle()
    amaxes.share(partial(reduce_amax, group=dist.group.WORLD, observers=observers))
    return around(computation)
