"""An activation between converted layers: its passes, and what it hands to the layers around it in FP8.

forward   the result in half; quantized for the layer behind, where a ``Reader`` knows that layer
backward  the gradients of the inputs in half; quantized, with the sums of their columns, for the layers in front, whose
          ``GradReader`` travels with the inputs

Autograd keeps the inputs alone; in FP8 where ``Keeps`` says so, and the layer behind may compute its input again.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nemo_lowprec.compat.autograd import apply_function, is_batched, is_legacy_batched, unwrap_if_dead
from nemo_lowprec.compat.tensors import is_plain
from nemo_lowprec.compute.activations import Activation
from nemo_lowprec.compute.again import Again, mark
from nemo_lowprec.compute.autocast import AutocastOff
from nemo_lowprec.compute.backends.base import Backend, is_transformed
from nemo_lowprec.compute.double_backward import link_to, linked
from nemo_lowprec.compute.kept import Keeps
from nemo_lowprec.compute.linear_function import not_a_view
from nemo_lowprec.compute.producers import GradReader, Reader, absent, name_reader

_HALF = (torch.float16, torch.bfloat16)
_ALL = (*_HALF, torch.float32)


def takes(*tensors: Tensor, keeps: Keeps | None) -> bool:
    """Whether ``between_layers`` can compute with ``tensors``: plain tensors of one shape, and no transform.

    FP32 tensors, which no layer reads in FP8, only where their memory counts.
    """
    x, dtypes = tensors[0], _HALF if keeps is None else _ALL
    if torch.compiler.is_compiling() or torch.is_inference_mode_enabled() or is_transformed():
        return False
    for t in tensors:
        if not is_plain(t) or t.dtype not in dtypes or t.dtype != x.dtype or t.shape != x.shape:
            return False
        if t.is_inference() or not t.dim():
            return False
    return x.numel() > 0


def between_layers(
    activation: Activation, tensors: tuple[Tensor, ...], backend: Backend, reader: Reader, record: bool,
    keeps: Keeps | None, alone: bool = False,
) -> Tensor:  # fmt: skip
    """The result of ``activation`` [..., features], in the dtype of ``tensors``.

    Args:
        tensors: as ``Activation`` has them; ``takes`` them.
        backend: quantizes.
        reader: of the calling module.
        record: whether the module trains.
        keeps: how the inputs are kept; None as they are.
        alone: whether only the layers around read the result and the gradients of ``tensors``. What they take in FP8 is
            then absent in half precision.
    """
    x = tensors[0]
    grad = torch.is_grad_enabled()
    target = None
    if reader.wants(x.numel() // x.shape[-1], x.dtype, record, grad):
        target = reader.operand, reader.columnwise, reader.record
    made: list[Any] = []
    if grad and any(t.requires_grad for t in tensors):
        tensors = tuple(map(unwrap_if_dead, tensors))
        links = [] if keeps is None else [link_to(t) for t in tensors]
        kept: list[Tensor] = []
        call = activation, backend, [GradReader.of(t) for t in tensors], target, made, keeps, links, kept, alone
        out: Tensor = _apply(call, *tensors)
        if keeps is not None and keeps.again:
            mark(out, _again(activation, keeps, x.dtype), kept)
    else:
        out = _forward(activation, backend, target, made, tensors, alone)
    if made:
        reader.offer(out, made[0])
    name_reader(out, reader)
    return out


def _forward(
    activation: Activation, backend: Backend, target: Any, made: list[Any], tensors: Any, alone: bool
) -> Tensor:
    shape = tensors[0].shape
    with AutocastOff("cuda" if tensors[0].is_cuda else tensors[0].device.type):
        if target is None:
            return activation.forward(tensors)
        operand, columnwise, record = target
        rows = tuple(t.reshape(-1, shape[-1]) for t in tensors)
        out, data = backend.activate(activation, rows, operand, columnwise=columnwise, record=record, half=not alone)
        made.append(data)
        if out is None:
            features = rows[0].shape[1] // (2 if activation.joint else 1)
            return absent(rows[0], [*shape[:-1], features], partial(_in_half, activation, rows))
        return out if len(shape) == 2 else not_a_view(out, [*shape[:-1], out.shape[-1]])


@torch.no_grad()
def _in_half(activation: Activation, rows: tuple[Tensor, ...]) -> Tensor:
    with AutocastOff("cuda" if rows[0].is_cuda else rows[0].device.type):
        return activation.forward(rows)


def _restored(keeps: Keeps, kept: Sequence[Tensor], dtype: torch.dtype) -> tuple[Tensor, ...]:
    step = keeps.tensors
    return tuple(keeps.restore(kept[i : i + step], dtype) for i in range(0, len(kept), step))


def _again(activation: Activation, keeps: Keeps, dtype: torch.dtype) -> Again:
    """Computes the result in backward."""

    def compute(kept: Sequence[Tensor]) -> Tensor:
        with AutocastOff("cuda" if kept[0].is_cuda else kept[0].device.type):
            return activation.forward(_restored(keeps, kept, dtype))

    return Again(compute)


class ActivationFunction(torch.autograd.Function):
    """(call, tensors [..., features]) to the result.

    ``call``: activation, backend, the ``GradReader`` of each tensor or None, (operand, columnwise, record) of the layer
    behind or None, and a list that gets the result as it was quantized; how the tensors are kept or None, a link to
    each tensor for second derivatives (``link_to``), a list that gets what is kept; and ``alone``.
    """

    @staticmethod
    def forward(ctx: Any, call: Any, *tensors: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        activation, backend, readers, target, made, keeps, links, kept, alone = call
        ctx.call, ctx.dtype = (activation, backend, readers, keeps, alone), tensors[0].dtype
        if keeps is None:
            ctx.save_for_backward(*tensors)
        else:
            kept += [part for t in tensors for part in keeps.keep(t)]
            ctx.save_for_backward(*kept, *(link for link, _ in links))
            ctx.sums = [total for _, total in links]
            kept[:] = [part.detach() for part in kept]  # plain values, without their graph
        return _forward(activation, backend, target, made, tensors, alone)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        activation, backend, readers, keeps, alone = ctx.call
        if grad is None:
            return None, *(None for _ in readers)
        tensors = ctx.saved_tensors
        links: tuple[Tensor, ...] = ()
        if keeps is not None:
            links = tensors[-len(readers) :]
            tensors = _restored(keeps, tensors[: -len(readers)], ctx.dtype)
        with AutocastOff("cuda" if grad.is_cuda else grad.device.type):  # a loop may call backward() under autocast
            # No kernel computes what is differentiated again, or a batch of gradients.
            if torch.is_grad_enabled() or is_batched(grad) or is_legacy_batched(grad):
                # The second derivative is one more gradient of ``tensors``, to be added to that of a later pass.
                ctx.call = activation, backend, readers, keeps, False
                if links and torch.is_grad_enabled():
                    tensors = tuple(map(linked, links, tensors, ctx.sums))
                return None, *activation.backward(grad, tensors)
            dy = grad.reshape(-1, grad.shape[-1])
            wanted = [
                reader if reader is not None and _reads(reader, len(dy), grad.dtype) else None for reader in readers
            ]
            rows = tuple(t.reshape(-1, t.shape[-1]) for t in tensors)
            made = backend.activate_backward(activation, dy, rows, wanted, not alone)
        found = []
        for reader, taken, t, (half, data, sums) in zip(readers, wanted, tensors, made, strict=True):
            half = absent(t, t.shape) if half is None else half
            found.append(half if half.shape == t.shape else half.view(t.shape))
            if taken is not None:
                taken.offer(found[-1], data, sums)
            elif reader is not None:
                reader.announce(found[-1])
        return None, *found


def _reads(reader: GradReader, rows: int, dtype: torch.dtype) -> bool:
    return (reader.rowwise or reader.columnwise) and reader.wants(rows, dtype)


_apply = apply_function(ActivationFunction)
