"""Converts between a DTensor and its local shard."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch import Tensor


def is_sharded(tensor: Any) -> bool:
    """Whether ``tensor`` is a DTensor."""
    return hasattr(tensor, "_local_tensor") and dist.is_available()


def local_shard(tensor: Any) -> Any:
    """The local shard of a DTensor, detached from autograd; any other tensor as it is."""
    return tensor._local_tensor if is_sharded(tensor) else tensor


def as_dtensor_like(local: Tensor, like: Any) -> Any:
    """A DTensor with the local shard ``local``, sharded as ``like``; ``local`` itself where ``like`` is no DTensor.

    ``DTensor.from_local`` would take a view, which for a quantized tensor is a copy of its values.
    """
    if not is_sharded(like):
        return local
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import TensorMeta

    meta = TensorMeta(like.shape, like.stride(), local.dtype)
    return DTensor(local, replace(like._spec, tensor_meta=meta), requires_grad=False)


def local_rows(whole: Any, like: Any) -> Tensor:
    """The rows of ``whole`` that belong to the local shard of ``like``; ``whole`` may be sharded as ``like`` is."""
    if is_sharded(whole) or not is_sharded(like):
        return local_shard(whole)
    mesh = like.device_mesh
    dim = mesh.ndim - 1
    count = -(-whole.shape[0] // mesh.size(dim))
    return whole[count * mesh.get_local_rank(dim) :][:count]
