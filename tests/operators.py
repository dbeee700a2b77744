"""The compiler counts on operators that write into no argument and return memory of their own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload


def tensors_of(values: Any) -> list[Tensor]:
    if isinstance(values, Tensor):
        return [values]
    return [t for value in values for t in tensors_of(value)] if isinstance(values, list | tuple) else []


def watch_operators(monkeypatch: Any) -> set[str]:
    """Check each call of our operators from now on. Returns the names of the called operators, a set that grows."""
    call, called = OpOverload.__call__, set()

    def checked(self: OpOverload, *args: Any, **kwargs: Any) -> Any:
        if not self._schema.name.startswith("nemo_lowprec::") or torch._guards.detect_fake_mode(args) is not None:
            return call(self, *args, **kwargs)
        called.add(self._schema.name)
        written = [argument.alias_info is not None for argument in self._schema.arguments]
        read = [t for arg, writes in zip(args, written, strict=False) if not writes for t in tensors_of(arg)]
        before = [t.clone() for t in read]
        result = call(self, *args, **kwargs)
        for now, then in zip(read, before, strict=True):
            assert torch.equal(_bits(now), _bits(then)), f"{self} writes into an argument"
        results = [t.untyped_storage().data_ptr() for t in tensors_of(result) if t.numel()]
        given = {t.untyped_storage().data_ptr() for t in tensors_of(args)}
        assert not given & set(results), f"{self} returns the memory of an argument"
        assert len(set(results)) == len(results), f"{self} returns the same memory twice"
        return result

    monkeypatch.setattr(OpOverload, "__call__", checked)
    return called


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)
