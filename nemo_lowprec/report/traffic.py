"""Messages of a process: each call that reaches a process group, from Python or C++, and copies between GPUs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nemo_lowprec.compat.tensors import TorchDispatchMode, storage_key, tree_leaves
from nemo_lowprec.observers import NOBODY, Observer, Observers


@dataclass(frozen=True)
class Sent:
    """One collective.

    Attributes:
        kind: ``all_reduce``, ``all_gather``, ``reduce_scatter``, ``all_to_all`` or ``broadcast``.
        dtype: of its elements.
        bytes: that each process sends (and receives), by the algorithm that sends the least.
        group: name of the process group; none for copies between GPUs.
        by_optimizer: whether an optimizer has sent it in its step.
    """

    kind: str
    dtype: torch.dtype
    bytes: int
    group: str = ""
    by_optimizer: bool = False


# By operator: the kind, and the index of the argument with the tensors that a process puts in.
_KINDS = {
    "allreduce_": ("all_reduce", 0),
    "allreduce_coalesced_": ("all_reduce", 0),
    "_allgather_base_": ("all_gather", 1),
    "allgather_": ("all_gather", 1),
    "allgather_into_tensor_coalesced_": ("all_gather", 1),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "reduce_scatter_": ("reduce_scatter", 1),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1),
    "alltoall_base_": ("all_to_all", 1),
    "alltoall_": ("all_to_all", 1),
    "broadcast_": ("broadcast", 0),
}


_OWN = ("amax", "flag", "monitor")  # purposes of messages that do not count


def sent_bytes(kind: str, size: int, world: int) -> int:
    """Bytes that each of ``world`` processes sends (see ``Sent``), where it puts in ``size``."""
    shares = {
        "all_reduce": 2 * (world - 1) / world,
        "all_gather": world - 1,  # of what one process puts in
        "reduce_scatter": (world - 1) / world,
        "all_to_all": (world - 1) / world,
        "broadcast": 1,
        "send": 1,  # from one process to another
    }
    return round(size * shares[kind])


class Traffic(TorchDispatchMode, Observer):
    """Context in which ``sent`` fills with the collectives of this process, those of its backward passes included.

    Args:
        ignored: tensors that do not count.
        observers: of the engine: the amaxes and flags that it announces do not count, copies between GPUs do.
    """

    def __init__(
        self, ignored: Callable[[Tensor], bool] = lambda tensor: False, observers: Observers = NOBODY
    ) -> None:  # fmt: skip
        super().__init__()
        self.sent: list[Sent] = []
        self._ignored, self._observers = ignored, observers
        self._left_out: int | None = None  # the storage of the amaxes or flags that are sent next

    def __enter__(self) -> Traffic:
        super().__enter__()
        if self._observers is not NOBODY:
            self._observers.add(self)
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self._observers.remove(self)
        super().__exit__(*exc_info)

    def message(self, kind: str, tensor: Tensor, bytes: int, purpose: str) -> None:
        self._left_out = storage_key(tensor.untyped_storage()) if purpose in _OWN else None
        if bytes:
            self.sent.append(Sent(kind, tensor.dtype, bytes))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, _, name = func._schema.name.partition("::")
        if namespace == "c10d" and name in _KINDS:
            self._note(name, args)
        return func(*args, **(kwargs or {}))

    def _note(self, name: str, args: Any) -> None:
        kind, position = _KINDS[name]
        group = next(g for a in args if isinstance(a, torch.ScriptObject) and (g := _as_group(a)) is not None)
        world, left_out, self._left_out = group.size(), self._left_out, None
        for tensor in tree_leaves(args[position]) if world > 1 else ():
            if storage_key(tensor.untyped_storage()) != left_out and not self._ignored(tensor):
                size = tensor.numel() * tensor.element_size()
                sent = sent_bytes(kind, size, world)
                self.sent.append(Sent(kind, tensor.dtype, sent, group.group_name, self._observers.is_updating))


def _as_group(box: Any) -> dist.ProcessGroup | None:
    try:
        return dist.ProcessGroup.unbox(box)
    except RuntimeError:  # another object, the operation of a reduction
        return None
