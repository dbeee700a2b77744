"""Megatron-core's distributed optimizer on the CPU, over gloo: it asks for CUDA where any device would do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

__all__ = ["CpuForCuda"]


class CpuForCuda(TorchFunctionMode):
    """Within, ``device="cuda"`` is the CPU, and CPU tensors pass for those of CUDA where Megatron-core looks."""

    def __enter__(self) -> Any:
        self._patch = pytest.MonkeyPatch()
        self._patch.setattr(torch.cuda, "current_device", lambda: "cpu")
        self._patch.setattr(torch.cuda, "synchronize", lambda: None)
        return super().__enter__()

    def __exit__(self, *args: Any) -> None:
        self._patch.undo()
        super().__exit__(*args)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is Tensor.cuda:
            return args[0]
        if "cuda" in str(kwargs.get("device")):
            kwargs["device"] = "cpu"
        found = func(*args, **kwargs)
        if func is Tensor.type and len(args) == 1 and not kwargs:
            return found.replace("torch.", "torch.cuda.", 1)
        return found
