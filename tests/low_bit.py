"""Parameters, gradients and steps for the tests of the low-bit optimizers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from nemo_lowprec.formats import E4M3
from nemo_lowprec.formats.block_scale_128 import dequantize_rows, quantize_rows, scale_to_blocks
from nemo_lowprec.formats.stochastic import round_stochastic, salts_of_values
from nemo_lowprec.optim import Adam, AdamW
from nemo_lowprec.tensors import GradientTensor, QuantizedTensor

FORMATS = ("fp32", "bf16", "fp16", "fp8")
OURS = {"Adam": (Adam, torch.optim.Adam), "AdamW": (AdamW, torch.optim.AdamW)}
FP32 = {"exp_avg_dtype": "fp32", "exp_avg_sq_dtype": "fp32"}
# A ragged matrix, whole blocks, a convolution, and what has fewer than two dimensions or no elements.
SHAPES = [(8, 300), (4, 128), (3, 2, 5, 5), (130,), (), (0, 4), (0,)]


class OwnStep(torch.optim.AdamW):
    """Steps in a way of its own."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def _replaced(params: Any) -> Any:
    optimizer = torch.optim.AdamW(params)
    optimizer.step = lambda closure=None: None  # type: ignore[method-assign]
    return optimizer


# By what is said of them: makers of optimizers that have no low-bit form, for any list of parameters.
REFUSED: dict[str, Any] = {
    "Adamax has no low-bit form: .*torch.optim.Adam, AdamW, SGD or Muon": torch.optim.Adamax,
    "RAdam has no low-bit form": torch.optim.RAdam,
    "NAdam has no low-bit form": torch.optim.NAdam,
    "OwnStep has a step of its own": OwnStep,
    "The step of this AdamW was replaced": _replaced,
    "AdamW with amsgrad=True has no low-bit form": lambda p: torch.optim.AdamW(
        [{"params": p[:1]}, {"params": p[1:], "amsgrad": True}]
    ),
    "Adam with differentiable=True has no low-bit form": lambda p: torch.optim.Adam(p, differentiable=True),
}


def randn(shape: Any, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def make_params(dtype: torch.dtype = torch.float32, shapes: Any = SHAPES) -> list[nn.Parameter]:
    """Parameters of the same values, in ``dtype``, that take a gradient of any dtype."""
    params = [nn.Parameter((randn(shape, 50 + i) * 0.1).to(dtype)) for i, shape in enumerate(shapes)]
    for param in params:
        param.grad_dtype = None
    return params


def set_grads(params: Any, step: int, kind: Any = torch.float32, size: float = 1e-2) -> None:
    """Gradients that are a function of the step; ``kind`` is a dtype, or ``fp8`` for stored ones."""
    for i, param in enumerate(params):
        if not param.requires_grad:
            continue
        grad = randn(param.shape, 1000 * step + i) * size
        param.grad = GradientTensor.from_float(grad) if kind == "fp8" else grad.to(kind)


def run(optimizer: Any, params: Any, steps: int = 4, first: int = 0, **grads: Any) -> None:
    for step in range(first, first + steps):
        set_grads(params, step, **grads)
        optimizer.step()


def values(tensor: Tensor) -> Tensor:
    """FP32 values of a stored or plain tensor, a copy."""
    tensor = tensor.detach()
    return tensor.dequantize(torch.float32) if isinstance(tensor, QuantizedTensor) else tensor.float().clone()


def rounded(gradient: Tensor) -> Tensor:
    """What a stored gradient reads as."""
    return dequantize_rows(*quantize_rows(gradient, E4M3))


def rounded_sum(gradient: Tensor, count: int = 1) -> Tensor:
    """The same once something was added to it ``count`` times, the last time with this sum."""
    scaled, exponent = scale_to_blocks(gradient, E4M3)
    return dequantize_rows(round_stochastic(scaled, E4M3.dtype, salts_of_values(scaled, count)), exponent)


def bits(tensor: Tensor) -> list[Tensor]:
    """The stored tensors, a copy."""
    parts = tensor.parts() if isinstance(tensor, QuantizedTensor) else (tensor.detach(),)
    return [p.view(torch.uint8).clone() if p.element_size() == 1 else p.clone() for p in parts]


def all_bits(optimizer: Any) -> Any:
    """Everything that an optimizer holds, bit by bit: weights, then states."""
    params = [p for g in optimizer.param_groups for p in g["params"]]
    states = [{k: bits(v) for k, v in optimizer.state[p].items()} if p in optimizer.state else {} for p in params]
    return [bits(p) for p in params], states


def all_values(optimizer: Any) -> Any:
    """The same by value: a block whose largest element was rounded down may be stored anew with half the scale."""
    params = [p for g in optimizer.param_groups for p in g["params"]]
    states = [{k: values(v) for k, v in optimizer.state[p].items()} if p in optimizer.state else {} for p in params]
    return [bits(p) for p in params], states
