"""Watch the operands of the GEMMs of a model's linear layers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from nemo_lowprec.compute import Backend, gemm_plans
from nemo_lowprec.report.tensor_storage import format_of

__all__ = ["watch_gemms"]


class _Watched:
    """A backend that notes the formats of the operands it is given, and passes them on."""

    def __init__(self, backend: Backend, seen: set[str]) -> None:
        self._backend, self._seen = backend, seen

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def _note(self, *operands: Any) -> None:
        self._seen.update(self._backend.describe(o) for o in operands)

    def fprop(self, x: Any, weight: Any, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
        self._note(x, weight)
        return self._backend.fprop(x, weight, bias, out_dtype)

    def dgrad(self, grad_output: Any, weight: Any, out_dtype: torch.dtype, total: Tensor | None = None) -> Tensor:
        self._note(grad_output, weight)
        return self._backend.dgrad(grad_output, weight, out_dtype, total)

    def wgrad(self, grad_output: Any, x: Any, out_dtype: torch.dtype) -> Tensor:
        self._note(grad_output, x)
        return self._backend.wgrad(grad_output, x, out_dtype)

    def matmul(self, a: Tensor, b: Tensor, out_dtype: torch.dtype) -> Tensor:
        self._seen.update((format_of(a.dtype), format_of(b.dtype)))
        return self._backend.matmul(a, b, out_dtype)


@contextmanager
def watch_gemms(model: nn.Module, seen: dict[str, set[str]]) -> Iterator[None]:
    """Note in ``seen`` the formats of GEMM operands, under ``converted`` for layers below 16 bits (for all linear
    layers of a model that has none) and ``rest`` for the others.

    A plain ``nn.Linear`` is observed by the dtype that comes out of it: autocast computes in that dtype.
    """
    plans = [plan for module in model.modules() for plan in gemm_plans(module).values()]
    any_low = any(plan.recipe is not None for plan in plans)
    backends = [plan.backend for plan in plans]
    handles = []
    for plan in plans:
        found = seen["converted" if plan.recipe is not None or not any_low else "rest"]
        plan.backend = _Watched(plan.backend, found)  # type: ignore[assignment]
    for module in model.modules():
        if isinstance(module, nn.Linear) and not gemm_plans(module):
            found = seen["rest" if any_low else "converted"]
            handles.append(
                module.register_forward_hook(lambda m, args, out, found=found: found.add(format_of(out.dtype)))  # type: ignore[misc]
            )
    try:
        yield
    finally:
        for plan, backend in zip(plans, backends, strict=True):
            plan.backend = backend
        for handle in handles:
            handle.remove()
