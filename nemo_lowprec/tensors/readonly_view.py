"""The result of a view operation on a quantized tensor: a plain copy of the values that refuses to be written."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from nemo_lowprec.compat.tensors import disabled_torch_function, make_subclass, tree_map


def is_view(func: Any) -> bool:
    """Whether an operation returns views of its arguments."""
    return any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)


def arguments_of(func: Any, args: Any, kwargs: Any) -> Iterator[tuple[Any, Any, bool]]:
    """(position or name, value, whether the operation writes it) of each argument."""
    for i, argument in enumerate(func._schema.arguments):
        writes = argument.alias_info is not None and argument.alias_info.is_write
        if i < len(args):
            yield i, args[i], writes
        elif argument.name in kwargs:
            yield argument.name, kwargs[argument.name], writes


def written_by(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """The tensors that an operation writes."""
    found = (value for _, value, writes in arguments_of(func, args, kwargs) if writes)
    return [x for value in found for x in (value if isinstance(value, (list, tuple)) else [value])]


class ReadonlyView(Tensor):
    """A copy of values of a quantized tensor. Operations read the copy and return plain tensors; none writes."""

    _plain: Tensor

    @staticmethod
    def __new__(cls, plain: Tensor):
        self = make_subclass(cls, plain)
        self._plain = plain
        return self

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return repr(self._plain)

    def numpy(self, *, force: bool = False) -> Any:
        """The values as an array."""
        return self._plain.numpy(force=force)

    def __array__(self, dtype: Any = None) -> Any:
        return self._plain.__array__(dtype)

    def tolist(self) -> Any:
        """The values as nested lists."""
        return self._plain.tolist()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._plain.__reduce_ex__(protocol)

    __torch_function__ = disabled_torch_function  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if any(isinstance(tensor, ReadonlyView) for tensor in written_by(func, args, kwargs)):
            raise RuntimeError(
                "A view of a tensor that is stored in low precision is a copy of its values: writing into it would be "
                "lost. Write to the tensor itself, as in grad[0] = 0 or grad[mask] *= 2."
            )

        def read(x: Any) -> Any:
            return x._plain if isinstance(x, ReadonlyView) else x

        result = func(*tree_map(read, args), **tree_map(read, kwargs))
        return tree_map(as_readonly_view, result) if is_view(func) else result


def as_readonly_view(x: Any) -> Any:
    """A plain tensor as a ``ReadonlyView``; anything else as it is."""
    return ReadonlyView(x) if type(x) is Tensor else x
