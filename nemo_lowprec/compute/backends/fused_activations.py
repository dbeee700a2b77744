"""The activations of a backend whose operands a fused Triton kernel can make."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from nemo_lowprec.compute.activations import Activation
from nemo_lowprec.compute.operands import Operand
from nemo_lowprec.kernels.loader import activation_kernels

# Whether the kernel, forward and backward together, is faster than torch's operations and the cast: by what an H200 has
# measured. Where it is not, activations hand nothing over on GPUs.
FASTER_ALONE = {"gelu": True, "gelu_tanh": True, "silu": True, "relu": True, "quick_gelu": True}
FASTER_GATED = {"gelu": True, "gelu_tanh": True, "silu": True, "relu": True, "quick_gelu": True}


def is_faster(activation: Activation) -> bool:
    """Whether a GPU shall compute ``activation`` by the fused kernel."""
    return (FASTER_ALONE if activation.form == "plain" else FASTER_GATED)[activation.kind]


def _kernels(activation: Activation, x: Tensor) -> Any:
    return activation_kernels() if x.is_cuda and is_faster(activation) else None


def _contiguous(t: Tensor) -> Tensor:
    return t if t.stride(-1) == 1 else t.contiguous()


def _target(kernels: Any, operand: Operand, rowwise: bool, columnwise: bool, record: bool, sums: bool = False) -> Any:
    slot = operand.slot
    return kernels.Target(slot.scale, operand.fmt, rowwise, columnwise, slot.amax if record else None, sums)


def activate(
    activation: Activation, tensors: tuple[Tensor, ...], operand: Operand, columnwise: bool, record: bool, half: bool
) -> Any:
    """The kernel's ``Made`` for ``Backend.activate``; None where there is no kernel for ``tensors``."""
    kernels = _kernels(activation, tensors[0])
    if kernels is None:
        return None
    parts = tuple(map(_contiguous, activation.parts(tensors)))
    return kernels.activate(activation.kind, parts, _target(kernels, operand, True, columnwise, record), half=half)


def activate_backward(
    activation: Activation, grad: Tensor, tensors: tuple[Tensor, ...], readers: list[Any], half: bool
) -> Any:
    """The kernel's list of ``Made`` for ``Backend.activate_backward``; None where there is no kernel."""
    kernels = _kernels(activation, tensors[0])
    if kernels is None:
        return None
    parts = tuple(map(_contiguous, activation.parts(tensors)))
    targets = [
        None if r is None else _target(kernels, r.operand, r.rowwise, r.columnwise, r.record, r.sums) for r in readers
    ]
    return kernels.activate_backward(
        activation.kind, _contiguous(grad), parts, targets, activation.joint, activation.form != "up_gate", half=half
    )
