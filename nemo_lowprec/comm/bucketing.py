"""Cuts a model's gradients into buckets. ``GradientReducer`` sends these buckets, and the memory plan counts them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

BUCKET_BYTES = 64 * 2**20  # on the wire


def cut_into_buckets(
    params: Iterable[Tensor], wire: Callable[[Tensor], torch.dtype], bucket_bytes: int = BUCKET_BYTES
) -> list[tuple[torch.dtype, list[Tensor]]]:
    """Cut parameters into buckets of each wire format. The first, the second and the last bucket are smaller.

    Nothing is sent before the first bucket, the second should be ready when the first is sent, and nothing hides the
    transfer of the last bucket, after which backward is over.

    Args:
        params: in the order in which backward makes their gradients.
        wire: dtype of a parameter's gradient on the wire.
        bucket_bytes: size of a bucket on the wire.

    Returns:
        (dtype, parameters) of each bucket, in the order in which they are sent.
    """
    sizes = [(p, wire(p), p.numel() * wire(p).itemsize) for p in params]
    last = bucket_bytes // 4
    left: Counter[torch.dtype] = Counter()
    for _, dtype, size in sizes:
        left[dtype] += size
    buckets: list[tuple[torch.dtype, list[Tensor]]] = []
    filling: dict[torch.dtype, list[Tensor]] = {}
    filled: Counter[torch.dtype] = Counter()
    limit = dict.fromkeys(left, last)
    for param, dtype, size in sizes:
        filling.setdefault(dtype, []).append(param)
        filled[dtype] += size
        if filled[dtype] >= limit[dtype]:
            left[dtype] -= filled.pop(dtype)
            buckets.append((dtype, filling.pop(dtype)))
            limit[dtype] = min(bucket_bytes, 2 * limit[dtype], max(left[dtype] - last, last))
    return buckets + list(filling.items())
