"""Tensors that are stored in one format and read as another: the base of FP8 weights, FP16 weights and FP8 gradients.

Any torch operation reads the values; an in-place one, and assigning to elements (``g[0] = 0``), writes them back,
rounded anew. A view (``w[0]``, ``w.t()``) is a copy of the values, and writing into it an error.
"""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from nemo_lowprec.formats.floats import FloatFormat
from nemo_lowprec.formats.part import as_part, is_view

__all__ = ["StoredTensor"]

aten = torch.ops.aten


class StoredTensor(Tensor):
    """Base class. A subclass names its inner tensors and knows how to decode and how to encode them.

    Attributes:
        PARTS: names of the inner tensors; the first holds an element for each of the tensor's.
        SETTINGS: names of the plain attributes that go with them.
        copied_in_fp32: whether a copy of this parameter (``copy.deepcopy``, pickle) is a plain FP32 one of its exact
            values, which are its ``master_weight``'s where it has one: nobody keeps a copy in step with a master, and
            an average of weights needs more bits than they have.
    """

    PARTS: ClassVar[tuple[str, ...]]
    SETTINGS: ClassVar[tuple[str, ...]] = ()
    copied_in_fp32 = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        torch.serialization.add_safe_globals([cls])  # torch.load(weights_only=True) opens them
        ForkingPickler.register(cls, _send)

    @classmethod
    def _wrap(cls, parts: tuple[Tensor, ...], settings: dict[str, Any], dtype: torch.dtype) -> Any:
        """A tensor around ``parts``, of the shape of the first, that reads as ``dtype``."""
        first = parts[0]
        self = torch.Tensor._make_wrapper_subclass(
            cls, first.shape, strides=first.stride(), dtype=dtype, device=first.device, requires_grad=False
        )
        self.__dict__.update(zip(cls.PARTS, parts, strict=True))
        self.__dict__.update(settings)
        return self

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The values as a plain tensor, of the nominal dtype unless told otherwise."""
        raise NotImplementedError

    def quantize_(self, values: Tensor) -> Any:
        """Store ``values`` (same shape) anew, in place; returns the tensor itself."""
        raise NotImplementedError

    def parts(self) -> tuple[Tensor, ...]:
        """The inner tensors."""
        return tuple(self.__dict__[name] for name in self.PARTS)

    def stored_bytes(self) -> int:
        """Bytes of all inner tensors."""
        return sum(part.nbytes for part in self.parts())

    def _settings(self) -> dict[str, Any]:
        return {name: self.__dict__[name] for name in self.SETTINGS}

    def _with(self, *parts: Tensor) -> Any:
        return self._wrap(parts, self._settings(), self.dtype)

    def _each(self, change: Callable[[Tensor], Tensor]) -> Any:
        return self._with(*(change(part) for part in self.parts()))

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"{type(self).__name__}(shape={tuple(self.shape)}, reads as {self.dtype})"

    # module.to() assigns .data (without __tensor_flatten__ it does not swap the parameter for another object, whose
    # attributes and hooks would be lost), so .data carries the storage over.
    def _get_data(self) -> Tensor:
        return self.detach()

    def _set_data(self, other: Tensor) -> None:
        if not (isinstance(other, StoredTensor) and other.PARTS == self.PARTS):
            # Into storage of its own: what ``.data`` gave out before keeps the old values.
            values = other.dequantize(torch.float32) if isinstance(other, StoredTensor) else other
            fresh: StoredTensor = self._each(torch.clone).quantize_(values)
        else:
            fresh = other
        if fresh.device != self.device or fresh.shape != self.shape or fresh.dtype != self.dtype:
            outer = torch.Tensor._make_wrapper_subclass(
                type(fresh), fresh.shape, strides=fresh.stride(), dtype=fresh.dtype, device=fresh.device
            )
            super(StoredTensor, type(self)).data.__set__(self, outer)  # type: ignore[attr-defined]
        self.__dict__.update(zip(self.PARTS, fresh.parts(), strict=True))
        self.__dict__.update(fresh._settings())

    data = property(_get_data, _set_data)  # type: ignore[assignment]

    def __setitem__(self, index: Any, value: Any) -> None:
        if self.requires_grad and torch.is_grad_enabled():
            raise RuntimeError("A leaf that requires grad is changed in place: do it under torch.no_grad().")
        values = self.dequantize(torch.float32)
        values[index] = value
        self.quantize_(values)

    def numpy(self, *, force: bool = False) -> Any:
        """The values as an array."""
        if self.requires_grad and not force:
            raise RuntimeError("numpy() of a tensor that requires grad: use tensor.detach().numpy().")
        return self.dequantize().detach().numpy(force=force)

    def __array__(self, dtype: Any = None) -> Any:
        return self.numpy() if dtype is None else self.numpy().astype(dtype, copy=False)

    def tolist(self) -> Any:
        """The values as nested lists."""
        return self.dequantize().tolist()

    def _exact(self) -> torch.nn.Parameter:
        master = self.__dict__.get("master_weight", self)
        values = master.dequantize(torch.float32) if isinstance(master, StoredTensor) else master.detach().clone()
        return torch.nn.Parameter(values, self.requires_grad)

    def share_memory_(self) -> Any:
        """Move the inner tensors to shared memory."""
        for part in self.parts():
            part.share_memory_()
        return self

    def is_shared(self) -> bool:
        """Whether the inner tensors are in shared memory, as all of a GPU's are."""
        return all(part.is_shared() for part in self.parts())

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self.copied_in_fp32:
            return self._exact().__reduce_ex__(protocol)
        return self._as_parts()

    def _as_parts(self) -> Any:
        # As bytes where torch.save knows no other way for a dtype, and with settings as plain values.
        parts = [(part.view(torch.uint8) if part.element_size() == 1 else part, part.dtype) for part in self.parts()]
        kind = next(c for c in type(self).__mro__ if "PARTS" in c.__dict__)
        is_parameter = isinstance(self, torch.nn.Parameter)
        return _rebuild, (kind, parts, self._settings(), self.dtype, self.requires_grad, is_parameter)

    def __deepcopy__(self, memo: Any) -> Any:
        if self.copied_in_fp32:
            return self._exact()
        return _as(self._each(torch.clone), self.requires_grad, isinstance(self, torch.nn.Parameter))

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def _special(cls, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An operation that a subclass does on its storage; NotImplemented for any other."""
        return NotImplemented

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        special = cls._special(func, args, kwargs)
        if special is not NotImplemented:
            return special
        this = args[0] if args and isinstance(args[0], StoredTensor) else None
        if this is not None:
            if func in (aten.detach.default, aten.alias.default):
                return this._each(lambda part: part)
            if func is aten.clone.default:
                return this._each(torch.clone)
            if func is aten.empty_like.default and not kwargs.keys() - {"pin_memory", "memory_format"}:
                return this._each(torch.clone)  # what is kept in it comes back to the last bit
            if func is aten._to_copy.default and kwargs.get("dtype", this.dtype) in (None, this.dtype):
                device = kwargs.get("device", this.device)
                return this._each(lambda part: part.to(device, copy=True))
            if func is aten.as_strided.default and _is_whole(this, *args[1:], **kwargs):
                return this._each(lambda part: part)
            if func is aten.copy_.default:
                source = args[1]
                exact = source.dequantize(torch.float32) if isinstance(source, StoredTensor) else source
                return this.quantize_(exact.expand(this.shape))

        if func._schema.name.startswith("aten::_foreach_"):
            return _one_by_one(func, args, kwargs)
        return _on_values(func, args, kwargs)


def _is_whole(this: Tensor, size: Any, stride: Any, storage_offset: Any = None) -> bool:
    """Whether this view of a tensor is the tensor."""
    return tuple(size) == tuple(this.shape) and tuple(stride) == tuple(this.stride()) and not storage_offset


def _on_values(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operation on plain tensors of the values, and store what it wrote."""

    def read(x: Any) -> Any:
        return x.dequantize() if isinstance(x, StoredTensor) else x

    plain_args, plain_kwargs = tree_map(read, args), tree_map(read, kwargs)
    result = func(*plain_args, **plain_kwargs)
    if not func._schema.is_mutable:
        # In a forward pass nobody writes into a view; and autograd would not let them.
        protect = is_view(func) and not (torch.is_grad_enabled() and args[0].requires_grad)
        return tree_map(as_part, result) if protect else result
    stored = _write_back(func, args, kwargs, plain_args, plain_kwargs)
    return tree_map(lambda x: stored.get(id(x), x), result)


def _one_by_one(func: Any, args: Any, kwargs: Any) -> Any:
    """The same for an operation on lists, so that the values of one tensor at a time are there in full."""
    count = next(len(a) for a in args if isinstance(a, (list, tuple)))
    results = []
    for i in range(count):

        def one(x: Any, i: int = i) -> Any:
            return [x[i]] if isinstance(x, (list, tuple)) and len(x) == count else x

        results.append(_on_values(func, [one(a) for a in args], {k: one(v) for k, v in kwargs.items()}))
    return None if results and results[0] is None else [r for result in results for r in result]


def _write_back(func: Any, args: Any, kwargs: Any, plain_args: Any, plain_kwargs: Any) -> dict[int, StoredTensor]:
    """Store what an operation wrote into plain stand-ins; return the tensors they stood for, by the stand-in's id."""
    stored = {}
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        given, plain = (args, plain_args) if i < len(args) else (kwargs, plain_kwargs)
        key = i if i < len(args) else argument.name
        if i >= len(args) and key not in kwargs:
            continue
        pairs = zip(given[key], plain[key], strict=True) if isinstance(given[key], (list, tuple)) else [
            (given[key], plain[key])
        ]  # fmt: skip
        for tensor, values in pairs:
            if isinstance(tensor, StoredTensor):
                stored[id(values)] = tensor.quantize_(values)
    return stored


def _as(tensor: StoredTensor, requires_grad: bool, parameter: bool) -> Any:
    return torch.nn.Parameter(tensor, requires_grad) if parameter else tensor.requires_grad_(requires_grad)


def _send(tensor: StoredTensor) -> Any:
    """Hand a tensor to another process as torch.multiprocessing does: with its storage, which becomes shared memory."""
    return tensor._as_parts()


def _rebuild(
    kind: type[StoredTensor],
    parts: list[tuple[Tensor, torch.dtype]],
    settings: dict[str, Any],
    dtype: torch.dtype,
    requires_grad: bool,
    parameter: bool,
) -> Any:
    return _as(kind._wrap(tuple(data.view(d) for data, d in parts), settings, dtype), requires_grad, parameter)


torch.serialization.add_safe_globals([_rebuild, FloatFormat])
