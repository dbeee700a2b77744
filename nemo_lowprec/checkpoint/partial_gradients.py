"""The gradients of a step whose micro-batches have not all run, as a checkpoint between two of them holds them.

One process saves the bits of its gradients. Several processes save the mean of their gradients, in FP32. Each process
of the resumed run starts from the mean, so that the mean at the end of the step is the same up to the rounding of sums,
on any number of processes. Of a sharded parameter each process saves its rows of the mean, and starts from its rows.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nemo_lowprec.comm import by_rank
from nemo_lowprec.engine import Engine
from nemo_lowprec.tensors import GradientTensor, QuantizedTensor
from nemo_lowprec.tensors.dtensor import as_dtensor_like, is_sharded, local_rows, local_shard

KEY = "partial_gradients"  # in the state of the Precision plugin


def partial_gradients(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Gradients by parameter name: the dict itself that the plugin's state in ``checkpoint`` holds; {} for none."""
    states = (value for value in checkpoint.values() if isinstance(value, dict))
    return next((state[KEY].get("grads", {}) for state in states if KEY in state), {})


@torch.no_grad()
def saved_gradients(engine: Engine, new: set[int] | None = None) -> dict[str, Any]:
    """The plugin's state with the gradients by parameter name, and their loss scale; {} where no process has any.

    Called on all processes.

    Args:
        engine: whose model has the gradients.
        new: ids of the parameters whose gradients no step has used; None for all parameters.
    """
    weights = engine.columns.weights
    params, unreduced = weights.named(), weights.unreduced()
    mine = {
        name: param for name, param in params.items()
        if (new is None or id(param) in new) and (param.grad is not None or id(param) in unreduced)
    }  # fmt: skip
    if _is_alone(params):
        grads = {name: _bits(param.grad) for name, param in mine.items()}
    else:
        names = dict.fromkeys(name for of_one in by_rank(list(mine)) for name in of_one)
        if names:
            engine.amaxes.equalize()
        means = {name: _mean(params[name], name in mine, unreduced) for name in names}
        grads = {name: mean for name, mean in means.items() if mean is not None}
    return {KEY: {"scale": _scale_of(engine), "grads": grads}} if grads else {}


@torch.no_grad()
def restore_gradients(saved: dict[str, Any], engine: Engine) -> list[Tensor]:
    """Set the gradients of ``saved``, the value of ``KEY``. Returns the parameters that have got a gradient."""
    factor = _scale_of(engine) / saved["scale"]
    params = engine.columns.weights.named()
    found = {name: p for name, p in params.items() if name in saved["grads"] and p.requires_grad}
    for name, param in found.items():
        param.grad = _as_stored(saved["grads"][name], param, factor, engine)
    return list(found.values())


def _is_alone(params: dict[str, Any]) -> bool:
    one = not dist.is_initialized() or dist.get_world_size() == 1
    return one and not any(map(is_sharded, params.values()))


def _bits(grad: Tensor) -> Any:
    if isinstance(grad, GradientTensor):
        parts = [part.cpu().clone() for part in grad.parts()]
        return {"parts": parts, "multiplied": grad.multiplied, "additions": grad.additions}
    return grad.detach().cpu().clone()


def _values(grad: Tensor) -> Tensor:
    values = grad.dequantize() if isinstance(grad, QuantizedTensor) else grad.detach()
    return (values.to_dense() if values.is_sparse else values).float()


def _mean(param: Any, is_mine: bool, unreduced: dict[int, Tensor]) -> Tensor | None:
    """The mean of a parameter's gradients over the processes, in FP32, sharded as ``param`` is.

    Of a parameter that is not sharded, on the CPU of the first process; None on the others.

    Args:
        is_mine: whether this process has a gradient; not all processes need one.
        unreduced: whole gradients that FSDP2 has not reduced, to be added to the gradients of the shards.
    """
    mine = unreduced.get(id(param)) if is_sharded(param) else param.grad
    total = (
        torch.zeros(param.shape, device=param.device, dtype=torch.float32)
        if mine is None or not is_mine
        else _values(mine).clone()
    )
    total /= dist.get_world_size()
    if not is_sharded(param):
        dist.reduce(total, 0)
        return total.cpu() if dist.get_rank() == 0 else None
    dist.all_reduce(total)
    rows = local_rows(total, param).clone()
    if is_mine and param.grad is not None:
        rows += _values(local_shard(param.grad))
    return as_dtensor_like(rows, param)


def _as_stored(saved: Any, param: Tensor, factor: float, engine: Engine) -> Tensor:
    """``saved`` times ``factor`` in the format in which the level stores the gradient of ``param``.

    A gradient that was saved in this format keeps its bits.
    """
    in_fp8, is_bits = engine.columns.weights.is_matrix(param), isinstance(saved, dict)
    if is_bits:
        grad = GradientTensor(*(part.to(param.device) for part in saved["parts"]))
        grad.multiplied, grad.additions = saved["multiplied"], saved["additions"]
    if not is_bits or not in_fp8 or factor != 1 or is_sharded(param):
        values = local_rows(grad.dequantize() if is_bits else saved, param).to(param.device)
        values = values * factor if factor != 1 else values
        if not in_fp8:
            return as_dtensor_like(values.to(param.grad_dtype or torch.float32), param)
        grad = GradientTensor.from_float(values)
    return as_dtensor_like(grad, param)


def _scale_of(engine: Engine) -> float:
    return engine.step.loss_scale.used if engine.step.loss_scale is not None else 1.0
