"""One Adam step of one parameter in plain torch. It defines the numerics; the fused kernel is tested against it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nemo_lowprec.formats.stochastic import salt_of
from nemo_lowprec.optim.storage import stands_still, write
from nemo_lowprec.tensors import BlockScaledTensor, Fp8Weight, QuantizedTensor, stored_data

STREAMS = {"exp_avg": 1, "exp_avg_sq": 2}  # keys of the moments' random streams, beside the weight's


@dataclass(slots=True)
class Update:
    """One parameter and the tensors that its step reads and writes.

    Attributes:
        param: the parameter; a ``QuantizedTensor`` (for a shard, a ``BlockScaledTensor``) or plain.
        grad: the gradient, plain (any float dtype) or a ``GradientTensor``.
        step: FP32 scalar, steps taken so far.
        exp_avg, exp_avg_sq: plain or ``BlockScaledTensor``.
        master: plain FP32, a ``BlockScaledTensor``, or None where the update is added to the parameter itself.
        index: position in the optimizer, for stochastic rounding.
        measures: whether the kernel leaves the amax of a plain parameter with a master in its ``amax_of_step``.
    """

    param: Tensor
    grad: Tensor
    step: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    master: Tensor | None
    index: int
    measures: bool = False


def read(tensor: Tensor) -> Tensor:
    """The values of a stored or plain tensor as FP32."""
    return tensor.dequantize(torch.float32) if isinstance(tensor, QuantizedTensor) else tensor.float()


@dataclass(frozen=True)
class StepInputs:
    """Arguments that all parameters of a step share.

    Attributes:
        group: the parameter group: lr, betas, eps, weight_decay, decoupled_weight_decay, maximize, as torch's Adam
            has them.
        grad_scale: the loss scale that gradients still carry, FP32 scalar.
        found_inf: nonzero skips the step, FP32 scalar.
        seed: of stochastic rounding.
        stochastic: whether the master (or the parameter without one) is rounded stochastically, if it is 16-bit.
    """

    group: dict[str, Any]
    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None
    seed: int = 0
    stochastic: bool = False


def step_by_reference(updates: Iterable[Update], inputs: StepInputs) -> None:
    """Step parameters in place, one after the other; on a GPU this waits for the device."""
    if inputs.found_inf is not None and bool(inputs.found_inf):
        return
    for update in updates:
        adam_step(update, inputs)


def adam_step(update: Update, inputs: StepInputs) -> None:
    """Step one parameter in place; ``inputs.found_inf`` is not read."""
    group, scale = inputs.group, inputs.grad_scale
    lr, (beta1, beta2) = float(group["lr"]), group["betas"]
    update.step += 1
    step = float(update.step)
    step_size = lr / (1 - math.pow(beta1, step))
    inv_sqrt_correction = 1 / math.sqrt(1 - math.pow(beta2, step))

    grad = read(update.grad)
    if scale is not None:
        grad = grad * scale.float().reshape(()).reciprocal()
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

    salt = salt_of(inputs.seed, int(update.step), update.index)
    _write_value(update, value, salt if inputs.stochastic else None)
    for name, beta, moment in (("exp_avg", beta1, exp_avg), ("exp_avg_sq", beta2, exp_avg_sq)):
        state = getattr(update, name)
        stochastic = stands_still(float(beta), stored_data(state).dtype)
        write(state, moment, salt_of(salt ^ STREAMS[name]) if stochastic else None, positive=name == "exp_avg_sq")


def _write_value(update: Update, value: Tensor, salt: int | None) -> None:
    """Store the updated master, or parameter without one; ``salt`` is used for 16-bit floats only."""
    master, param = update.master, update.param
    data = stored_data(param)
    if master is None:
        target = param if isinstance(param, BlockScaledTensor) else data
        write(target, value, salt if data.dtype != torch.float32 else None)
        return
    write(master, value, salt if isinstance(master, BlockScaledTensor) else None)
    if isinstance(param, Fp8Weight):
        param.quantize_(read(master))
    else:
        data.copy_(read(master))
