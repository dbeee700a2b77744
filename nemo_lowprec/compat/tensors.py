"""Subclasses of tensors, modes of the dispatcher, and trees of tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes as without_dispatch_modes
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

__all__ = [
    "FakeTensorMode", "PlainSubclass", "TorchDispatchMode", "accumulated_hooks", "backward_hooks", "base_of",
    "disabled_torch_function", "dispatch_modes", "empty_strided_cuda", "has_dispatch_mode",
    "is_plain", "make_subclass", "make_wrapper", "set_backward_hooks", "sparse_values", "storage_key",
    "storage_use_count", "tree_flatten", "tree_leaves", "tree_map", "tree_unflatten", "use_count",
    "without_dispatch_modes", "without_torch_function",
]  # fmt: skip

disabled_torch_function = torch._C._disabled_torch_function_impl
without_torch_function = torch._C.DisableTorchFunctionSubclass  # a context: subclasses compute as plain tensors
make_subclass = torch.Tensor._make_subclass
make_wrapper = torch.Tensor._make_wrapper_subclass
# (shape, strides, dtype) to a tensor on the current device, as inductor's code allocates.
empty_strided_cuda = torch._C._dynamo.guards._empty_strided_cuda  # type: ignore[attr-defined]


class PlainSubclass(Tensor):
    """A tensor with a few methods of its own. Results of all operations are plain tensors.

    A plain tensor gets such a class by ``__class__``. Code that ``torch.compile`` compiles runs on it as it is written:
    compiled code would take it for a plain tensor in some of its checks only.
    """

    __torch_function__ = disabled_torch_function  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, *_: Any, **__: Any) -> Any:  # type: ignore[override]
        """Never called for a tensor that was plain. Dynamo looks whether there is one."""
        raise NotImplementedError

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_subclass(Tensor).__reduce_ex__(protocol)


dispatch_modes = torch._C._len_torch_dispatch_stack  # the number of ``TorchDispatchMode``s that are on


def has_dispatch_mode() -> bool:
    """Whether a ``TorchDispatchMode`` sees the operations, as a counter of FLOPs does."""
    return dispatch_modes() > 0


def is_plain(tensor: Any) -> bool:
    """Whether ``tensor`` is of no subclass that may compute otherwise. A fake tensor stands for a plain one."""
    cls = type(tensor)
    return cls is Tensor or cls is FakeTensor or issubclass(cls, PlainSubclass)


def is_fake(tensor: Tensor) -> bool:
    """Whether ``tensor`` has a shape and no values."""
    return isinstance(tensor, FakeTensor)


def base_of(view: Tensor) -> Tensor | None:
    """The tensor of which ``view`` is a view to autograd; None for a tensor that is no view."""
    return view._base


def storage_key(storage: Any) -> int:
    """A number that all tensors of one storage have in common, fake tensors too."""
    key: int = storage._cdata
    return key


def sparse_values(tensor: Tensor) -> Tensor:
    """The values of a sparse tensor, rows that occur twice not summed; ``values()`` takes coalesced tensors only."""
    return tensor._values()


def storage_use_count(tensor: Tensor) -> int:
    """How many tensors, in Python and in C++, have the memory of ``tensor``, and one more."""
    count: int = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)  # type: ignore[attr-defined]
    return count


def use_count(param: Tensor) -> int:
    """How often C++ holds ``param``: once by itself, and once more for each graph and view of it."""
    count: int = param._use_count()  # type: ignore[attr-defined]
    return count


def accumulated_hooks(param: Tensor) -> Any:
    """The hooks of ``register_post_accumulate_grad_hook``, by number."""
    return param._post_accumulate_grad_hooks or {}  # type: ignore[attr-defined]


def backward_hooks(param: nn.Parameter) -> tuple[Any, Any]:
    """The hooks of ``register_hook`` and of ``register_post_accumulate_grad_hook``, for ``set_backward_hooks``."""
    return param._backward_hooks, param._post_accumulate_grad_hooks  # type: ignore[attr-defined]


def set_backward_hooks(param: nn.Parameter, hooks: tuple[Any, Any]) -> None:
    """Make autograd call ``hooks`` for the storage that ``param`` has now."""
    param._backward_hooks, param._post_accumulate_grad_hooks = hooks  # type: ignore[assignment]
