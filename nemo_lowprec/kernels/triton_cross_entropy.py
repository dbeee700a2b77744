"""Cross entropy of half logits in FP32, one pass over the logits each way. Importing this file needs Triton.

Torch's own operations write the logits in FP32, their log-softmax and two gradients of that size.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nemo_lowprec.kernels.launcher import Launcher

_BLOCK, _WARPS = 4096, 8
_FLOATS = (torch.float16, torch.bfloat16)


@triton.jit
def _forward_kernel(logits_ptr, targets_ptr, losses_ptr, lse_ptr, stride, classes, ignore, BLOCK: tl.constexpr):
    """The loss and the log of the sum of exponentials of one row."""
    row = tl.program_id(0).to(tl.int64)
    logits = logits_ptr + row * stride
    target = tl.load(targets_ptr + row)
    largest = tl.full((), float("-inf"), tl.float32)
    total = tl.zeros((), tl.float32)
    for first in range(0, classes, BLOCK):
        n = first + tl.arange(0, BLOCK)
        x = tl.load(logits + n, mask=n < classes, other=float("-inf")).to(tl.float32)
        highest = tl.maximum(largest, tl.max(x, axis=0))
        # A block of -inf alone: the difference of two infinities would be NaN.
        shift = tl.where(highest == float("-inf"), 0.0, highest)
        total = total * tl.exp(largest - shift) + tl.sum(tl.exp(x - shift), axis=0)
        largest = highest
    tl.store(lse_ptr + row, largest + tl.log(total))
    is_class = (target >= 0) & (target < classes)
    own = tl.load(logits + target, mask=is_class, other=float("nan")).to(tl.float32)
    loss = tl.log(total) - (own - largest)
    tl.store(losses_ptr + row, tl.where(target == ignore, 0.0, loss))


@triton.jit
def _backward_kernel(
    logits_ptr, targets_ptr, lse_ptr, scale_ptr, grad_ptr, stride, classes, ignore, PER_ROW: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradient of one row of logits, times ``scale`` [1], or [rows] with PER_ROW."""
    row = tl.program_id(0).to(tl.int64)
    logits, grad = logits_ptr + row * stride, grad_ptr + row * classes
    target, lse = tl.load(targets_ptr + row), tl.load(lse_ptr + row)
    if PER_ROW:
        scale = tl.load(scale_ptr + row)
    else:
        scale = tl.load(scale_ptr)
    scale = tl.where(target == ignore, 0.0, scale)
    for first in range(0, classes, BLOCK):
        n = first + tl.arange(0, BLOCK)
        x = tl.load(logits + n, mask=n < classes, other=0.0).to(tl.float32)
        dx = tl.exp(x - lse) * scale
        dx = tl.where(n == target, dx - scale, dx)
        tl.store(grad + n, dx.to(grad_ptr.dtype.element_ty), mask=n < classes)


_forward = Launcher(_forward_kernel, num_warps=_WARPS)
_backward = Launcher(_backward_kernel, num_warps=_WARPS)


def fits(logits: Tensor, targets: Tensor) -> bool:
    """Whether the kernels compute the loss of these logits [rows, classes]."""
    return logits.dtype in _FLOATS and logits.stride(1) == 1 and targets.is_contiguous() and logits.numel() > 0


def forward(logits: Tensor, targets: Tensor, ignore: int) -> tuple[Tensor, Tensor]:
    """The losses of rows of logits.

    Args:
        logits: half [rows, classes] on a GPU, rows contiguous.
        targets: int64 [rows]. The loss of a row whose target is no class is NaN.
        ignore: a target without a loss.

    Returns:
        FP32 [rows] twice: the losses, 0 for the target ``ignore``; and the logs of the sums of exponentials.
    """
    rows, classes = logits.shape
    losses, lse = (torch.empty(rows, dtype=torch.float32, device=logits.device) for _ in range(2))
    _forward(
        logits.get_device(), _key(logits, targets, ignore), rows,
        (logits, targets, losses, lse, logits.stride(0), classes, ignore), lambda: {"BLOCK": _BLOCK},
    )  # fmt: skip
    return losses, lse


def backward(logits: Tensor, targets: Tensor, lse: Tensor, scale: Tensor, ignore: int) -> Tensor:
    """The gradient of the logits, [rows, classes] in their dtype, contiguous.

    Args:
        logits, targets, ignore: as ``forward`` has had them.
        lse: as ``forward`` has returned them.
        scale: the gradient of each loss, FP32 [rows], or [1] for all.
    """
    rows, classes = logits.shape
    grad = torch.empty((rows, classes), dtype=logits.dtype, device=logits.device)
    per_row = scale.numel() > 1
    key = _key(logits, targets, ignore)
    _backward(
        logits.get_device(), None if key is None else (*key, per_row, scale.data_ptr() % 16 == 0), rows,
        (logits, targets, lse, scale, grad, logits.stride(0), classes, ignore),
        lambda: {"PER_ROW": per_row, "BLOCK": _BLOCK},
    )  # fmt: skip
    return grad


def _key(logits: Tensor, targets: Tensor, ignore: int) -> tuple[object, ...] | None:
    if logits.shape[1] == 1 or logits.stride(0) == 1:
        return None
    even = logits.data_ptr() % 16 == 0, targets.data_ptr() % 16 == 0, logits.stride(0) % 16 == 0
    return logits.dtype, logits.shape[1] % 16 == 0, *even, ignore
