"""Converts between a DTensor and its local shard."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from nemo_lowprec.compat.distributed import dtensor_like, is_dtensor, local_tensor

is_sharded = is_dtensor


def local_shard(tensor: Any) -> Any:
    """The local shard of a DTensor, detached from autograd; any other tensor as it is."""
    return local_tensor(tensor) if is_sharded(tensor) else tensor


def as_dtensor_like(local: Tensor, like: Any) -> Any:
    """A DTensor with the local shard ``local``, sharded as ``like``; ``local`` itself where ``like`` is no DTensor."""
    return dtensor_like(local, like) if is_sharded(like) else local


def local_rows(whole: Any, like: Any) -> Tensor:
    """The rows of ``whole`` that belong to the local shard of ``like``; ``whole`` may be sharded as ``like`` is."""
    if is_sharded(whole) or not is_sharded(like):
        return local_shard(whole)
    mesh = like.device_mesh
    dim = mesh.ndim - 1
    count = -(-whole.shape[0] // mesh.size(dim))
    return whole[count * mesh.get_local_rank(dim) :][:count]
