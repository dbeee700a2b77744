"""Tensors that are stored in one format and read as another: the base of FP8 weights, FP16 weights and FP8 gradients.

Any torch operation reads the values. An in-place operation, and assigning to elements (``g[0] = 0``), rounds the new
values and stores them. A view (``w[0]``, ``w.t()``) is a copy of the values; writing into a view is an error.

A weight with a master (the attribute ``master_weight``) is written through the master: an in-place operation starts
from the master's values, changes the master, and rounds the weight from the master. The results of ``detach()``,
``data`` and ``clone()`` have the master (or a copy of it), so that ``weight.data += delta`` is as exact.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from multiprocessing.reduction import ForkingPickler
from typing import Any, ClassVar

import torch
from torch import Tensor

from nemo_lowprec.compat.tensors import disabled_torch_function, make_wrapper, tree_map
from nemo_lowprec.formats.floats import FloatFormat
from nemo_lowprec.tensors.readonly_view import arguments_of, as_readonly_view, is_view, written_by

MASTER = "master_weight"

aten = torch.ops.aten


class QuantizedTensor(Tensor):
    """Base class. A subclass names its inner tensors, and decodes and encodes them."""

    PARTS: ClassVar[tuple[str, ...]]  # names of the inner tensors; the first has the tensor's shape
    SETTINGS: ClassVar[tuple[str, ...]] = ()  # names of the plain attributes
    # Whether ``copy.deepcopy`` and pickle make a plain FP32 tensor of the exact values, the master's where there is
    # one: no optimizer would update a quantized copy with its master, and averages of weights need FP32.
    copied_in_fp32 = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        torch.serialization.add_safe_globals([cls])  # torch.load(weights_only=True) opens them
        # For another process the storage moves to shared memory, as torch.multiprocessing moves plain tensors.
        ForkingPickler.register(cls, cls._as_parts)

    @classmethod
    def _wrap(cls, parts: tuple[Tensor, ...], settings: dict[str, Any], dtype: torch.dtype) -> Any:
        """A tensor around ``parts``, of the shape of the first, that reads as ``dtype``."""
        first = parts[0]
        self = make_wrapper(
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

    def _take_along(self, other: Any, change: Callable[[Tensor], Tensor] = lambda master: master) -> Any:
        """Give ``other``, an alias or a copy of this tensor, this tensor's master, or with ``change`` a copy of it."""
        if MASTER in self.__dict__:
            other.__dict__[MASTER] = change(self.__dict__[MASTER])
        return other

    @property
    def writes_exactly(self) -> bool:
        """Whether a write starts from values of more bits than the storage has, and keeps its result in a master."""
        return MASTER in self.__dict__

    def exact(self) -> Tensor:
        """The values that a write starts from, FP32: those of the master where there is one."""
        master = self.__dict__.get(MASTER, self)
        if isinstance(master, QuantizedTensor):
            return master.dequantize(torch.float32)
        return master.detach().to(self.device, torch.float32, copy=True)

    def exact_storage(self) -> Tensor:
        """The values of ``exact`` for reading alone: a plain tensor that stores these values is returned itself."""
        master = self.__dict__.get(MASTER, self)
        if isinstance(master, QuantizedTensor):
            return self.exact() if master is self else master.exact_storage()
        return master.detach().to(self.device)

    @torch.no_grad()
    def write_(self, values: Tensor) -> Any:
        """Store ``values`` (same shape) here and in the master, if there is one; returns the tensor itself."""
        master = self.__dict__.get(MASTER)
        if master is None:
            return self.quantize_(values)
        master.copy_(values)
        return self.quantize_(self.exact())

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"{type(self).__name__}(shape={tuple(self.shape)}, reads as {self.dtype})"

    # module.to() assigns .data, so the setter takes over the storage. (With __tensor_flatten__ it would put another
    # object in the parameter's place, without the parameter's attributes and hooks.)
    def _get_data(self) -> Tensor:
        return self.detach()

    def _set_data(self, other: Tensor) -> None:
        if not (isinstance(other, QuantizedTensor) and other.PARTS == self.PARTS):
            if other.shape != self.shape:
                raise ValueError(
                    f"A parameter {tuple(self.shape)} that is stored in blocks or in FP16 takes no data of shape "
                    f"{tuple(other.shape)}. FSDP gives it such: shard with strategy='lowprec_sharded' instead."
                )
            # Into new storage: tensors that ``.data`` returned before keep the old values.
            values = other.dequantize(torch.float32) if isinstance(other, QuantizedTensor) else other
            fresh: QuantizedTensor = self._each(torch.clone)
            # ``module.float()`` sets the values that it has read from this tensor: a master has more bits, and stays.
            if self.writes_exactly and not torch.equal(values, self.dequantize().to(values)):
                self._take_along(fresh, _copied).write_(values)
            elif not self.writes_exactly:
                fresh.quantize_(values)
        else:
            fresh = other
            master, theirs = self.__dict__.get(MASTER), other.__dict__.get(MASTER)
            if master is not None and theirs is not None and theirs is not master:
                with torch.no_grad():
                    master.copy_(theirs)
            elif theirs is not None:  # of a frozen weight, whose first write was one of ``.data``
                self.__dict__[MASTER] = theirs
        if fresh.device != self.device or fresh.shape != self.shape or fresh.dtype != self.dtype:
            outer = make_wrapper(
                type(fresh), fresh.shape, strides=fresh.stride(), dtype=fresh.dtype, device=fresh.device
            )
            super(QuantizedTensor, type(self)).data.__set__(self, outer)  # type: ignore[attr-defined]
        self.__dict__.update(zip(self.PARTS, fresh.parts(), strict=True))
        self.__dict__.update(fresh._settings())
        if other is not fresh and MASTER in fresh.__dict__:
            self.__dict__[MASTER] = fresh.__dict__[MASTER]

    data = property(_get_data, _set_data)  # type: ignore[assignment]

    def __setitem__(self, index: Any, value: Any) -> None:
        if self.requires_grad and torch.is_grad_enabled():
            raise RuntimeError("A leaf that requires grad is changed in place: do it under torch.no_grad().")
        values = self.exact()
        values[index] = value
        self.write_(values)

    def numpy(self, *, force: bool = False) -> Any:
        """A read-only copy of the values as a NumPy array."""
        if self.requires_grad and not force:
            raise RuntimeError("numpy() of a tensor that requires grad: use tensor.detach().numpy().")
        values = self.dequantize().detach().clone().numpy(force=force)
        values.flags.writeable = False
        return values

    def __array__(self, dtype: Any = None) -> Any:
        return self.numpy() if dtype is None else self.numpy().astype(dtype, copy=False)

    def __dlpack__(self, **options: Any) -> Any:
        """A copy of the values, for other libraries."""
        return self.dequantize().detach().__dlpack__(**options)

    def tolist(self) -> Any:
        """The values as nested lists."""
        return self.dequantize().tolist()

    def _exact(self) -> torch.nn.Parameter:
        return torch.nn.Parameter(self.exact(), self.requires_grad)

    def share_memory_(self) -> Any:
        """Move the inner tensors to shared memory."""
        for part in self.parts():
            part.share_memory_()
        return self

    def is_shared(self) -> bool:
        """Whether the inner tensors are in shared memory; tensors on a GPU always are."""
        return all(part.is_shared() for part in self.parts())

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self.copied_in_fp32:
            return self._exact().__reduce_ex__(protocol)
        return self._as_parts()

    def _as_parts(self) -> Any:
        # 8-bit parts as bytes: pickle cannot open tensors of float8 dtypes. Settings as plain values.
        parts = [(part.view(torch.uint8) if part.element_size() == 1 else part, part.dtype) for part in self.parts()]
        kind = next(c for c in type(self).__mro__ if "PARTS" in c.__dict__)
        is_parameter = isinstance(self, torch.nn.Parameter)
        return _rebuild, (kind, parts, self._settings(), self.dtype, self.requires_grad, is_parameter)

    def __deepcopy__(self, memo: Any) -> Any:
        if self.copied_in_fp32:
            return self._exact()
        return _as(self._each(torch.clone), self.requires_grad, isinstance(self, torch.nn.Parameter))

    __torch_function__ = disabled_torch_function  # type: ignore[assignment]

    @classmethod
    def _special(cls, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of an operation that the subclass computes on its storage; NotImplemented for other operations."""
        return NotImplemented

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        special = cls._special(func, args, kwargs)
        if special is not NotImplemented:
            return special
        this = args[0] if args and isinstance(args[0], QuantizedTensor) else None
        if this is not None:
            if func in (aten.detach.default, aten.alias.default):
                return this._take_along(this._each(lambda part: part))
            if func is aten.clone.default:
                return this._take_along(this._each(torch.clone), torch.clone)
            if func is aten.empty_like.default and not kwargs.keys() - {"pin_memory", "memory_format"}:
                return this._each(torch.clone)  # callers that back values up in it get every bit back
            if func is aten._to_copy.default and kwargs.get("dtype", this.dtype) in (None, this.dtype):
                device = kwargs.get("device", this.device)
                return this._each(lambda part: part.to(device, copy=True))
            if func is aten.as_strided.default and _is_whole(this, *args[1:], **kwargs):
                return this._each(lambda part: part)
            if func is aten.copy_.default:
                source = args[1]
                exact = source.dequantize(torch.float32) if isinstance(source, QuantizedTensor) else source
                return this.write_(exact.expand(this.shape))

        if func._schema.name.startswith("aten::_foreach_"):
            return _one_by_one(func, args, kwargs)
        return _on_values(func, args, kwargs)


def stored_data(tensor: Tensor) -> Tensor:
    """The plain tensor that holds the elements of ``tensor``: its first part, or the tensor itself if it is plain."""
    if isinstance(tensor, QuantizedTensor):
        part: Tensor = tensor.__dict__[tensor.PARTS[0]]
        return part
    return tensor


def _copied(master: Tensor) -> Tensor:
    copy = master.detach().clone()
    return torch.nn.Parameter(copy, master.requires_grad) if isinstance(master, torch.nn.Parameter) else copy


def _is_whole(this: Tensor, size: Any, stride: Any, storage_offset: Any = None) -> bool:
    """Whether this view of a tensor is the tensor."""
    return tuple(size) == tuple(this.shape) and tuple(stride) == tuple(this.stride()) and not storage_offset


def _on_values(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operation on plain tensors of the values, and store what it wrote."""

    def read(x: Any) -> Any:
        return x.dequantize() if isinstance(x, QuantizedTensor) else x

    if func._schema.is_mutable and any(
        isinstance(x, QuantizedTensor) and x.writes_exactly for x in written_by(func, args, kwargs)
    ):
        plain_args, plain_kwargs = _exact_arguments(func, args, kwargs)
    else:
        plain_args, plain_kwargs = tree_map(read, args), tree_map(read, kwargs)
    result = func(*plain_args, **plain_kwargs)
    if not func._schema.is_mutable:
        # In a forward pass autograd refuses writes into a view already.
        protect = is_view(func) and not (torch.is_grad_enabled() and args[0].requires_grad)
        return tree_map(as_readonly_view, result) if protect else result
    stored = _write_back(func, args, kwargs, plain_args, plain_kwargs)
    return tree_map(lambda x: stored.get(id(x), x), result)


def _one_by_one(func: Any, args: Any, kwargs: Any) -> Any:
    """``_on_values`` for an operation on lists: one tensor at a time is dequantized, which takes less memory."""
    count = next(len(a) for a in args if isinstance(a, (list, tuple)))
    results = []
    for i in range(count):

        def one(x: Any, i: int = i) -> Any:
            return [x[i]] if isinstance(x, (list, tuple)) and len(x) == count else x

        results.append(_on_values(func, [one(a) for a in args], {k: one(v) for k, v in kwargs.items()}))
    return None if results and results[0] is None else [r for result in results for r in result]


def _exact_arguments(func: Any, args: Any, kwargs: Any) -> tuple[list[Any], dict[str, Any]]:
    """Arguments of an operation that writes masters: tensors of the weight's dtype that are only read become FP32."""
    dtype = next(x for x in written_by(func, args, kwargs) if isinstance(x, QuantizedTensor)).dtype

    def exact(x: Any, writes: bool) -> Any:
        if isinstance(x, QuantizedTensor):
            return x.exact()
        return x.float() if not writes and isinstance(x, Tensor) and x.dtype == dtype else x

    plain_args, plain_kwargs = list(args), dict(kwargs)
    for place, value, writes in arguments_of(func, args, kwargs):
        chosen: Any = plain_args if isinstance(place, int) else plain_kwargs
        chosen[place] = tree_map(partial(exact, writes=writes), value)
    return plain_args, plain_kwargs


def _write_back(func: Any, args: Any, kwargs: Any, plain_args: Any, plain_kwargs: Any) -> dict[int, QuantizedTensor]:
    """Store the values that an operation wrote into plain stand-ins; return the stored tensors by the stand-in's id."""
    stored = {}
    stand_ins = written_by(func, plain_args, plain_kwargs)
    for tensor, values in zip(written_by(func, args, kwargs), stand_ins, strict=True):
        if isinstance(tensor, QuantizedTensor):
            stored[id(values)] = tensor.write_(values)
    return stored


def _as(tensor: QuantizedTensor, requires_grad: bool, parameter: bool) -> Any:
    return torch.nn.Parameter(tensor, requires_grad) if parameter else tensor.requires_grad_(requires_grad)


def _rebuild(
    kind: type[QuantizedTensor],
    parts: list[tuple[Tensor, torch.dtype]],
    settings: dict[str, Any],
    dtype: torch.dtype,
    requires_grad: bool,
    parameter: bool,
) -> Any:
    return _as(kind._wrap(tuple(data.view(d) for data, d in parts), settings, dtype), requires_grad, parameter)


torch.serialization.add_safe_globals([_rebuild, FloatFormat])
