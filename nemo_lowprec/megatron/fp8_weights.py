"""Casts this process's shards of master weights into FP8 weights.

Megatron-core calls Transformer Engine's ``quantize_master_weights``. With per-tensor scales this function also
transposes each shard, a row of 1 x n, which takes many times as long as the cast, and nothing reads the transpose: the
whole weight is transposed after it is gathered.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.fp8_utils import quantize_param_shard
from torch import Tensor

from nemo_lowprec.comm import reduce_amax
from nemo_lowprec.compat import transformer_engine as te
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
    """Round shards of masters to the weights' half format, as Transformer Engine does, and cast them to FP8.

    With delayed scaling, the scales follow from earlier amaxes, and the new amax is noted. With current scaling, the
    scales follow from the amax over all shards. The FP8 bits equal those of ``quantize_master_weights``, which still
    writes weights of other layouts.

    Args:
        weights: Transformer Engine's quantized parameters, whole; the same list on all processes of ``group``.
        mains: FP32 shards [n] of the masters; None where other processes step all of a weight.
        starts: offset of each shard in the flattened weight.
        group: the processes that hold the other shards.
        observers: get an event for each all-reduce of amaxes.
    """
    from transformer_engine.pytorch.tensor.float8_tensor import Float8CurrentScalingQuantizer, Float8Quantizer

    delayed, current, others = [], [], []
    for part in map(_MasterShard, weights, mains, starts):
        quantizer = te.quantizer_of(part.weight)
        if te.fp8_data(part.weight) is None:  # blockwise scales, or only the transpose is stored
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
            part.weight.clear_high_precision_init_val()  # the masters have started from these values
    if delayed:
        _write_delayed(delayed, group, observers)
    if current:
        _write_current(current, group, observers)
    if others:
        quantize_param_shard(*map(list, zip(*others, strict=True)), group)


def _write_delayed(parts: Sequence[_MasterShard], group: dist.ProcessGroup, observers: Observers) -> None:
    quantizers = [te.quantizer_of(part.weight) for part in parts]
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
    none = torch.zeros((), device=parts[0].weight.device, dtype=torch.float32)
    # Rounding is monotonic: the amax of the rounded values is the rounded amax.
    amaxes = [none if part.main is None else next(norms).to(part.weight.dtype).float() for part in parts]
    amax = torch.stack(amaxes)
    reduce_amax(amax, group, observers)
    scales = compute_scale(amax, E4M3.max)
    unread = torch.empty(0, dtype=torch.float32)
    for part, scale in zip(parts, scales.split(1), strict=True):
        _cast(part, scale, unread)
    _set_scale_inv(parts, scales)


def _cast(part: _MasterShard, scale: Tensor, amax: Tensor) -> None:
    """Write a shard's FP8 bits into the weight, and the shard's amax into ``amax`` unless ``amax`` is empty."""
    from transformer_engine.pytorch.tensor.float8_tensor import Float8Quantizer

    weight, main, start = part
    if main is None:
        return
    assert start is not None
    data = te.fp8_data(weight)
    assert data is not None
    row = data.view(-1)[start : start + main.numel()].view(1, -1)
    quantizer = Float8Quantizer(scale, amax, te.fp8_dtype(weight), rowwise=True, columnwise=False)
    values = main.to(weight.dtype).view(1, -1)
    quantizer.update_quantized(values, quantizer.create_tensor_from_data(row, weight.dtype))


def _set_scale_inv(parts: Sequence[_MasterShard], scales: Tensor) -> None:
    torch._foreach_copy_([te.scale_inv(part.weight).view(1) for part in parts], list(scales.reciprocal().split(1)))
