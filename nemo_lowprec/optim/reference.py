"""One step of one parameter in plain torch. It defines the numerics; the fused kernel is tested against it.

A step follows one of five rules, named after what it computes of a gradient:

* ``adam``: torch's Adam and AdamW;
* ``sgd``: torch's SGD, with momentum or without;
* ``lion``: the sign of an interpolation between momentum and gradient (arXiv:2302.06675);
* ``momentum``: Muon's first half. Updates the momentum, and writes what is to be orthogonalized into the parameter's
  place. Does not count as a step;
* ``direct``: Muon's second half. Subtracts the gradient's place, which holds the orthogonalized matrix.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from nemo_lowprec.formats.stochastic import salt_of
from nemo_lowprec.optim.storage import stands_still, write
from nemo_lowprec.tensors import BlockScaledTensor, Fp8Weight, QuantizedTensor, stored_data

Rule = Literal["adam", "sgd", "lion", "momentum", "direct"]
STREAMS = {"first": 1, "second": 2}  # keys of the moments' random streams, beside the weight's


@dataclass(slots=True)
class Update:
    """One parameter and the tensors that its step reads and writes.

    Attributes:
        param: the parameter; a ``QuantizedTensor`` (for a shard, a ``BlockScaledTensor``) or plain.
        grad: the gradient, plain (any float dtype) or a ``GradientTensor``.
        step: FP32 scalar, steps taken so far.
        first, second: the moments, plain or ``BlockScaledTensor``: Adam's exp_avg and exp_avg_sq, Lion's exp_avg, the
            momentum of SGD and Muon. None for a moment that the rule does not have.
        master: plain FP32, a ``BlockScaledTensor``, or None where the update is added to the parameter itself.
        index: position in the optimizer, for stochastic rounding.
        measures: whether the kernel leaves the amax of a plain parameter with a master in its ``amax_of_step``.
        whole: the DTensor of which ``param`` is the local shard; None for a whole parameter.
    """

    param: Tensor
    grad: Tensor
    step: Tensor
    first: Tensor | None
    second: Tensor | None
    master: Tensor | None
    index: int
    measures: bool = False
    whole: Any = None


def read(tensor: Tensor) -> Tensor:
    """The values of a stored or plain tensor as FP32."""
    return tensor.dequantize(torch.float32) if isinstance(tensor, QuantizedTensor) else tensor.float()


@dataclass(frozen=True)
class StepInputs:
    """Arguments that all parameters of a step share.

    Attributes:
        group: the parameter group: lr, weight_decay and the rule's own arguments, as torch's optimizer has them.
        grad_scale: the loss scale that gradients still carry, FP32 scalar.
        found_inf: nonzero skips the step, FP32 scalar.
        seed: of stochastic rounding.
        stochastic: whether the master (or the parameter without one) is rounded stochastically, if it is 16-bit.
        rule: see the module.
    """

    group: dict[str, Any]
    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None
    seed: int = 0
    stochastic: bool = False
    rule: Rule = "adam"

    @property
    def betas(self) -> tuple[float, float]:
        """Decay of the first and the second moment; 0 for a moment that the rule does not have."""
        if self.rule == "direct":
            return 0.0, 0.0
        if self.rule in ("sgd", "momentum"):
            return float(self.group["momentum"]), 0.0
        first, second = map(float, self.group["betas"])
        return (first, second) if self.rule == "adam" else (second, first)

    @property
    def is_decoupled(self) -> bool:
        """Whether the weight decay is no part of the gradient."""
        return self.rule != "sgd" and bool(self.group.get("decoupled_weight_decay", True))

    @property
    def maximizes(self) -> bool:
        """Whether the objective is maximized."""
        return bool(self.group.get("maximize", False))


def step_by_reference(updates: Iterable[Update], inputs: StepInputs) -> None:
    """Step parameters in place, one after the other; on a GPU this waits for the device."""
    if inputs.found_inf is not None and bool(inputs.found_inf):
        return
    for update in updates:
        _step(update, inputs)


def _step(update: Update, inputs: StepInputs) -> None:
    """Step one parameter in place; ``inputs.found_inf`` is not read."""
    group, scale, rule = inputs.group, inputs.grad_scale, inputs.rule
    update.step += 1
    step = float(update.step)
    grad = read(update.grad)
    if scale is not None:
        grad = grad * scale.float().reshape(()).reciprocal()
    if inputs.maximizes:
        grad = -grad
    value = grad
    if rule != "momentum":
        lr = float(group["lr"])
        value = read(update.param if update.master is None else update.master)
        if inputs.is_decoupled:
            value = value * (1 - lr * group["weight_decay"])
        elif group["weight_decay"]:
            grad = grad + value * float(group["weight_decay"])
    first = None if update.first is None else read(update.first)
    second = None if update.second is None else read(update.second)

    if rule == "adam":
        assert first is not None and second is not None
        beta1, beta2 = group["betas"]
        step_size = lr / (1 - math.pow(beta1, step))
        inv_sqrt_correction = 1 / math.sqrt(1 - math.pow(beta2, step))
        first = first + (grad - first) * (1 - beta1)
        second = second * beta2 + (grad * grad) * (1 - beta2)
        denominator = second.sqrt() * inv_sqrt_correction + group["eps"]
        value = value - (first / denominator) * step_size
    elif rule == "lion":
        assert first is not None
        beta1, beta2 = group["betas"]
        between = first + (grad - first) * (1 - beta1)
        value = value - torch.where(between.isnan(), between, between.sign()) * lr  # torch's sign of NaN is 0
        first = first + (grad - first) * (1 - beta2)
    elif rule == "momentum":
        assert first is not None
        momentum = group["momentum"]
        first = first + (grad - first) * (1 - momentum)
        value = first + (grad - first) * (1 - momentum) if group["nesterov"] else first
    else:
        if rule == "sgd" and first is not None:
            momentum = group["momentum"]
            first = first * momentum + grad * (1.0 if step == 1 else 1 - group["dampening"])
            grad = grad + first * momentum if group["nesterov"] else first
        value = value - grad * (lr * group.get("rate_factor", 1.0))

    salt = salt_of(inputs.seed, int(step), update.index)
    _write_value(update, value, salt if inputs.stochastic and rule != "momentum" else None)
    for state, moment, name, beta in zip(
        (update.first, update.second), (first, second), STREAMS, inputs.betas, strict=True
    ):
        if state is not None and moment is not None:
            stochastic = stands_still(float(beta), stored_data(state).dtype)
            write(state, moment, salt_of(salt ^ STREAMS[name]) if stochastic else None, positive=name == "second")
    if rule == "momentum":
        update.step -= 1


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
