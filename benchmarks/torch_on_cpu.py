"""Calls of CUDA on the CPU, for code of Megatron-core and NeMo that asks for CUDA where any device would do."""

from __future__ import annotations

from contextlib import ExitStack, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

__all__ = ["TorchOnCpu"]


class _Autocast(torch.autocast):
    """``torch.autocast`` of the CPU."""

    def __init__(self, device_type: str, *args: Any, **kwargs: Any) -> None:
        super().__init__("cpu", *args, **kwargs)


class TorchOnCpu(TorchFunctionMode):
    """Within, ``device="cuda"`` is the CPU, and CPU tensors pass for those of CUDA where Megatron-core looks."""

    def replaced(self) -> list[tuple[Any, str, Any]]:
        """(owner, name, what stands there within)."""
        return [
            (torch.cuda, "current_device", lambda: "cpu"),
            (torch.cuda, "synchronize", lambda: None),
            (torch.cuda, "Stream", lambda **kwargs: None),
            (torch.cuda, "stream", nullcontext),
            (torch, "autocast", _Autocast),
        ]

    def __enter__(self) -> Any:
        self._patches = ExitStack()
        for owner, name, own in self.replaced():
            self._patches.enter_context(patch.object(owner, name, own))
        return super().__enter__()

    def __exit__(self, *args: Any) -> None:
        self._patches.close()
        super().__exit__(*args)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is Tensor.cuda:
            return args[0]
        if "cuda" in str(kwargs.get("device")):
            kwargs["device"] = "cpu"
        if func is Tensor.to:
            args = (args[0], *("cpu" if isinstance(arg, str) and arg == "cuda" else arg for arg in args[1:]))
        kwargs.pop("pin_memory", None)
        found = func(*args, **kwargs)
        if func is Tensor.type and len(args) == 1 and not kwargs:
            return found.replace("torch.", "torch.cuda.", 1)
        return found
