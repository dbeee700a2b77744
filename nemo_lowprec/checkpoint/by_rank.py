"""A value of every process."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

__all__ = ["by_rank"]


def by_rank(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """The values of all processes of ``group``, in the order of ranks; called on all processes."""
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values
