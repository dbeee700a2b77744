"""FP8 weights from the parts of their masters that this process steps.

Megatron-core leaves this to Transformer Engine's ``quantize_master_weights``, which with per-tensor scales also
transposes each part, as the one long row that it is: many times the time of the cast, for a result that nobody reads.
Weights are transposed whole once they are gathered.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.fp8_utils import quantize_param_shard
from torch import Tensor

from nemo_lowprec.comm import reduce_amax
from nemo_lowprec.formats import E4M3, compute_scale
from nemo_lowprec.observers import NOBODY, Observers


class _MasterShard(NamedTuple):
    weight: Any
    main: Tensor | None
    start: int | None


@torch.no_grad()
def write_fp8_weights(
    weights: Sequence[Any], mains: Sequence[Tensor | None], starts: Sequence[int | None], group: dist.ProcessGroup,
    observers: Observers = NOBODY,
) -> None:  # fmt: skip
    """Cast parts of masters into FP8 weights, by way of the weights' half format as Transformer Engine does.

    With delayed scaling the scales are those of earlier amaxes, and the amax is noted for the next ones; with current
    scaling they follow from the amax over all parts. The bits are those of ``quantize_master_weights``, which is left
    to write weights of other layouts.

    Args:
        weights: Transformer Engine's quantized parameters, whole; the same on all processes of ``group``.
        mains: parts of their masters, [n]; None where other processes step all of a weight.
        starts: the parts' places in the flattened weights.
        group: the processes that have the other parts.
        observers: the amaxes that are sent are announced to them.
    """
    from transformer_engine.pytorch.tensor.float8_tensor import Float8CurrentScalingQuantizer, Float8Quantizer

    delayed, current, others = [], [], []
    for part in map(_MasterShard, weights, mains, starts):
        quantizer = part.weight._get_quantizer()
        if getattr(part.weight, "_data", None) is None:  # in blocks, or transposed only
            others.append(part)
        elif isinstance(quantizer, Float8Quantizer):
            delayed.append(part)
        elif isinstance(quantizer, Float8CurrentScalingQuantizer) and not (
            quantizer.force_pow_2_scales or quantizer.amax_epsilon
        ):
            current.append(part)
        else:
            others.append(part)
    for part in (*delayed, *current):
        if hasattr(part.weight, "clear_high_precision_init_val"):
            part.weight.clear_high_precision_init_val()  # which masters have started from
    if delayed:
        _write_delayed(delayed, group, observers)
    if current:
        _write_current(current, group, observers)
    if others:
        quantize_param_shard(*map(list, zip(*others, strict=True)), group)


def _write_delayed(parts: Sequence[_MasterShard], group: dist.ProcessGroup, observers: Observers) -> None:
    quantizers = [part.weight._get_quantizer() for part in parts]
    for part, quantizer in zip(parts, quantizers, strict=True):
        _cast(part, quantizer.scale, quantizer.amax)
    amaxes = [quantizer.amax.view(1) for quantizer in quantizers]
    amax = torch.cat(amaxes)
    reduce_amax(amax, group, observers)
    torch._foreach_copy_(amaxes, list(amax.split(1)))
    _set_scale_inv(parts, torch.cat([quantizer.scale.view(1) for quantizer in quantizers]))


def _write_current(parts: Sequence[_MasterShard], group: dist.ProcessGroup, observers: Observers) -> None:
    mine = [part.main for part in parts if part.main is not None]
    norms = iter(torch._foreach_norm(mine, float("inf")) if mine else ())
    none = torch.zeros((), device=parts[0].weight.device)
    # Rounding to half keeps order: the amax of the rounded values is the rounded amax.
    amaxes = [none if part.main is None else next(norms).to(part.weight.dtype).float() for part in parts]
    amax = torch.stack(amaxes)
    reduce_amax(amax, group, observers)
    scales = compute_scale(amax, E4M3.max)
    unread = torch.empty(0)
    for part, scale in zip(parts, scales.split(1), strict=True):
        _cast(part, scale, unread)
    _set_scale_inv(parts, scales)


def _cast(part: _MasterShard, scale: Tensor, amax: Tensor) -> None:
    """Write a part's bits in their place; its amax to ``amax`` where that has an element."""
    from transformer_engine.pytorch.tensor.float8_tensor import Float8Quantizer

    weight, main, start = part
    if main is None:
        return
    assert start is not None
    row = weight._data.view(-1)[start : start + main.numel()].view(1, -1)
    quantizer = Float8Quantizer(scale, amax, weight._fp8_dtype, rowwise=True, columnwise=False)
    values = main.to(weight.dtype).view(1, -1)
    quantizer.update_quantized(values, quantizer.create_tensor_from_data(row, weight.dtype))


def _set_scale_inv(parts: Sequence[_MasterShard], scales: Tensor) -> None:
    torch._foreach_copy_([part.weight._scale_inv.view(1) for part in parts], list(scales.reciprocal().split(1)))
