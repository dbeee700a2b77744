"""The output of a model's head, over which cross entropy is computed without an FP32 copy.

Models and loops write ``F.cross_entropy(logits.float().view(-1, classes), targets)``; transformers' losses do. The FP32
copy, its log-softmax and their gradients are the largest tensors of a language model. Here the loss reads the half
logits and writes their half gradient (``cross_entropy.py``).

The model's code runs as it is. While autograd records, the head returns ``Logits``, which stand for its half output:
any function gets that output, but ``F.cross_entropy`` computes as above, and ``float()`` gives FP32 ``Logits``, whose
values are computed when something reads them. Code that ``torch.compile`` compiles runs as it is written, on ``Logits``
from outside of it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nemo_lowprec.compat.tensors import is_plain, make_wrapper, tree_map, without_torch_function
from nemo_lowprec.compute.backends.base import Backend, is_transformed
from nemo_lowprec.compute.class_swap import derive, own_forward, swap
from nemo_lowprec.compute.cross_entropy import half_cross_entropy

MIN_CLASSES = 4096  # below, the loss takes hardly any time

_HALF = (torch.float16, torch.bfloat16)
_SHAPES = frozenset(
    {
        Tensor.view, Tensor.reshape, Tensor.flatten, Tensor.contiguous, Tensor.__getitem__, Tensor.squeeze,
        Tensor.unsqueeze, torch.flatten, torch.reshape, torch.squeeze, torch.unsqueeze,
    }
)  # fmt: skip
_PROPERTIES = ("shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_cuda", "is_leaf", "grad_fn")
_ABOUT = frozenset(
    {
        Tensor.size, Tensor.stride, Tensor.dim, Tensor.ndimension, Tensor.numel, Tensor.nelement, Tensor.__len__,
        Tensor.is_contiguous, Tensor.is_floating_point, Tensor.is_complex, Tensor.element_size, Tensor.get_device,
        *(getattr(Tensor, name).__get__ for name in _PROPERTIES),
    }
)  # fmt: skip


class LogitsHead(nn.Module):
    """A head that returns ``Logits``; conversion derives its class from the module's own.

    Attributes:
        loss_backend: computes losses.
    """

    loss_backend: Backend

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out = super().forward(*args, **kwargs)
        if torch.compiler.is_compiling() or not is_plain(out) or out.dtype not in _HALF or is_transformed():
            return out
        if not out.requires_grad or not torch.is_grad_enabled():
            return out
        return Logits.of(out, out.dtype, self.loss_backend)


def give_logits(head: nn.Module, backend: Backend) -> None:
    """Let a linear layer with many outputs return ``Logits``."""
    features = getattr(head, "out_features", 0)
    if features >= MIN_CLASSES and not own_forward(head):
        swap(head, derive(LogitsHead, type(head)), loss_backend=backend)


class Logits(Tensor):
    """Half logits [..., classes] in the graph of a head, or their FP32 form.

    Attributes:
        _backend: computes losses.
        _half: the half logits, a plain tensor.
        _noted: the version of ``_half`` of which this is the FP32 form.
        _origin: of the FP32 form of a view, the ``Logits`` viewed, and (func, args, kwargs) of the call.
        _read: the values, a plain tensor; None for an FP32 form that nothing has read.
    """

    _backend: Backend
    _half: Tensor
    _noted: int
    _origin: tuple[Logits, Any] | None
    _read: Tensor | None

    @staticmethod
    def of(half: Tensor, dtype: torch.dtype, backend: Backend, origin: tuple[Logits, Any] | None = None) -> Logits:
        """What stands for ``half`` in ``dtype``."""
        made: Logits = _Stand.apply(half, dtype)
        made.__dict__.update(_backend=backend, _half=half, _noted=half._version, _origin=origin)
        made.__dict__["_read"] = half if dtype == half.dtype else None
        return made

    @classmethod
    @torch.compiler.disable
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else None
        if isinstance(first, Logits):
            if func in _ABOUT:
                with without_torch_function():
                    return func(*args, **kwargs)
            if torch.is_grad_enabled() and not is_transformed() and first._is_pending():
                found = first._without_values(func, args[1:], kwargs)
                if found is not None:
                    return found
        args, kwargs = tree_map(_values_of, (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        args, kwargs = tree_map(_values_of, (args, kwargs or {}))
        return func(*args, **kwargs)

    def _is_pending(self) -> bool:
        """Whether the half logits tell the values: nothing may have changed the FP32 form of them."""
        if self._read is not None:
            return self._read is self._half
        return self._origin is None or self._origin[0]._is_pending()

    def _without_values(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The result of a function that need not read the values; None for any other function."""
        half, is_half = self._half, self._read is self._half
        if func is F.cross_entropy:
            return _loss(self._backend, half, args, kwargs) if not is_half or _autocasts(half) else None
        if _makes_float(func, args, kwargs):
            return Logits.of(half, torch.float32, self._backend) if is_half else self
        if func not in _SHAPES:
            return None
        try:
            view = func(half, *args, **kwargs)
        except (RuntimeError, IndexError, TypeError):  # FP32 logits may lie otherwise, or raise the same
            return None
        if not view.dim() or view.shape[-1] != half.shape[-1]:
            return view if is_half else None
        if is_half:
            return Logits.of(view, half.dtype, self._backend)
        return Logits.of(view, torch.float32, self._backend, (self, (func, args, kwargs)))

    def _compute(self) -> Tensor:
        if self._read is None:
            with torch.inference_mode(False), torch.enable_grad():
                if self._origin is None:
                    if self._half._version != self._noted:
                        raise RuntimeError(
                            "Logits were changed in place after their .float(), which is computed when something reads "
                            "it. Change the result of .float() in place, or leave the head out (skip)."
                        )
                    self.__dict__["_read"] = self._half.float()
                else:
                    origin, (func, args, kwargs) = self._origin
                    self.__dict__["_read"] = func(origin._compute(), *args, **kwargs)
        assert self._read is not None
        return self._read


def _makes_float(func: Any, args: Any, kwargs: Any) -> bool:
    if func is Tensor.float:
        return not args and not kwargs
    return func is Tensor.to and (
        (args == (torch.float32,) and not kwargs) or (not args and kwargs == {"dtype": torch.float32})
    )


def _values_of(value: Any) -> Any:
    return value._compute() if isinstance(value, Logits) else value


def _stand(values: Tensor, size: Any, stride: Any, dtype: torch.dtype) -> Logits:
    return make_wrapper(Logits, size, strides=stride, dtype=dtype, device=values.device)  # type: ignore[no-any-return]


class _Stand(torch.autograd.Function):
    """Half logits to the ``Logits`` that stand for them; only functions that know no subclasses use this node."""

    @staticmethod
    def forward(ctx: Any, half: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.dtype = half.dtype
        return _stand(half, half.shape, half.stride(), dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.to(ctx.dtype), None


def _loss(backend: Backend, half: Tensor, args: Any, kwargs: Any) -> Tensor | None:
    """``F.cross_entropy(half, *args, **kwargs)`` in FP32; None for a call that torch has to compute."""
    call = _bound(*args, **kwargs)
    targets, ignore, reduction = call if call is not None else (None, 0, "")
    if not isinstance(targets, Tensor) or targets.dtype != torch.int64 or targets.device != half.device:
        return None
    if half.dim() != 2 or targets.shape != half.shape[:1] or not half.numel():
        return None
    return half_cross_entropy(backend, half, targets, ignore, reduction)


def _autocasts(half: Tensor) -> bool:
    """Whether torch would compute the loss of half logits in FP32, too."""
    return torch.is_autocast_enabled("cuda" if half.is_cuda else half.device.type)


def _bound(
    target: Any = None, weight: Any = None, size_average: Any = None, ignore_index: int = -100, reduce: Any = None,
    reduction: str = "mean", label_smoothing: float = 0.0,
) -> tuple[Any, int, str] | None:  # fmt: skip
    plain = weight is None and size_average is None and reduce is None and not label_smoothing
    return (target, ignore_index, reduction) if plain and reduction in ("mean", "sum", "none") else None
