"""One Adam step of one parameter in plain torch: the definition that the fused kernel is held to."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nemo_lowprec.formats import BlockTensor, CastTensor, ScaledTensor, StoredTensor
from nemo_lowprec.formats.row_blocks import scale_to_blocks
from nemo_lowprec.formats.stochastic import round_stochastic, salt_of
from nemo_lowprec.optim.storage import write

__all__ = ["StepInputs", "Update", "adam_step", "read", "step_by_reference", "weight_storage"]


@dataclass
class Update:
    """One parameter and what its step reads and writes.

    Attributes:
        param: the parameter; a ``StoredTensor`` or plain.
        grad: plain (any float dtype) or a ``GradientTensor``; reads as the gradient.
        step: FP32 scalar, steps taken so far.
        exp_avg, exp_avg_sq: plain or ``BlockTensor``.
        master: plain FP32, a ``BlockTensor``, or None where the parameter takes the updates itself.
        index: position in the optimizer, for stochastic rounding.
    """

    param: Tensor
    grad: Tensor
    step: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    master: Tensor | None
    index: int


def read(tensor: Tensor) -> Tensor:
    """The values of a stored or plain tensor as FP32."""
    return tensor.dequantize(torch.float32) if isinstance(tensor, StoredTensor) else tensor.float()


def weight_storage(param: Tensor) -> Tensor:
    """The plain tensor that holds a parameter's elements."""
    if isinstance(param, ScaledTensor):
        return param.data_fp8
    return param.data_fp16 if isinstance(param, CastTensor) else param.detach()


@dataclass(frozen=True)
class StepInputs:
    """What a step is told beside its parameters.

    Attributes:
        group: the parameter group: lr, betas, eps, weight_decay, decoupled_weight_decay, maximize, as torch's Adam
            has them.
        grad_scale: the loss scale that gradients still carry, FP32 scalar.
        found_inf: nonzero skips the step, FP32 scalar.
        seed: of stochastic rounding; None rounds to nearest.
    """

    group: dict[str, Any]
    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None
    seed: int | None = None


def step_by_reference(updates: Iterable[Update], inputs: StepInputs) -> None:
    """Step parameters in place, one after the other; on a GPU this waits for the device."""
    if inputs.found_inf is not None and bool(inputs.found_inf):
        return
    scale = inputs.grad_scale
    inv_scale = None if scale is None else scale.float().reshape(()).reciprocal()
    for update in updates:
        adam_step(update, inputs.group, inv_scale, inputs.seed)


def adam_step(update: Update, group: dict[str, Any], inv_scale: Tensor | None, seed: int | None) -> None:
    """Step in place.

    Args:
        update: the parameter.
        group: see ``StepInputs``.
        inv_scale: multiplies the gradient, FP32 scalar.
        seed: of stochastic rounding; None rounds to nearest.
    """
    lr, (beta1, beta2) = float(group["lr"]), group["betas"]
    update.step += 1
    step = float(update.step)
    step_size = lr / (1 - math.pow(beta1, step))
    inv_sqrt_correction = 1 / math.sqrt(1 - math.pow(beta2, step))

    grad = read(update.grad)
    if inv_scale is not None:
        grad = grad * inv_scale
    if group["maximize"]:
        grad = -grad
    value = read(update.param if update.master is None else update.master)
    if group["decoupled_weight_decay"]:
        value = value * (1 - lr * group["weight_decay"])
    elif group["weight_decay"]:
        grad = grad + value * group["weight_decay"]

    exp_avg, exp_avg_sq = read(update.exp_avg), read(update.exp_avg_sq)
    exp_avg = exp_avg + (grad - exp_avg) * (1 - beta1)
    exp_avg_sq = exp_avg_sq * beta2 + (grad * grad) * (1 - beta2)
    denominator = exp_avg_sq.sqrt() * inv_sqrt_correction + group["eps"]
    value = value - (exp_avg / denominator) * step_size

    salt = None if seed is None else salt_of(seed, int(update.step), update.index)
    if update.master is None:
        _write_weight(update.param, value, salt)
    else:
        _write_master(update.master, value, salt)
        copy_weight(update.param, update.master)
    write(update.exp_avg, exp_avg)
    write(update.exp_avg_sq, exp_avg_sq)


def _write_weight(param: Tensor, value: Tensor, salt: int | None) -> None:
    storage = weight_storage(param)
    if salt is not None and storage.dtype != torch.float32:
        value = round_stochastic(value, storage.dtype, salt)
    storage.copy_(value)


def _write_master(master: Tensor, value: Tensor, salt: int | None) -> None:
    if salt is None or not isinstance(master, BlockTensor):
        write(master, value)
        return
    scaled, exponent = scale_to_blocks(value, master.fmt)
    master.data_blocks.copy_(round_stochastic(scaled, master.fmt.dtype, salt))
    master.exponent.copy_(exponent)


def copy_weight(param: Tensor, master: Tensor) -> None:
    """Write a master's values into its parameter."""
    if isinstance(param, ScaledTensor):
        param.quantize_(read(master))
    else:
        weight_storage(param).copy_(read(master))
