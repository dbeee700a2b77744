"""Megatron-core's distributed optimizer on the CPU, over gloo: it asks for CUDA where any device would do."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

import nemo_lowprec.megatron.engine as engine
import nemo_lowprec.strategies.megatron as strategy

__all__ = ["CpuForCuda"]


class _Autocast(torch.autocast):
    """``torch.autocast`` of the CPU."""

    def __init__(self, device_type: str, *args: Any, **kwargs: Any) -> None:
        super().__init__("cpu", *args, **kwargs)


def _config(**fields: Any) -> Any:
    """Megatron's OptimizerConfig without precision-aware states, for which it would ask for Transformer Engine.

    The optimizer of this package switches Megatron's own off in any case.
    """
    from megatron.core.optimizer import OptimizerConfig

    return OptimizerConfig(**{k: v for k, v in fields.items() if "aware" not in k and not k.endswith("_dtype")},
                           params_dtype=fields["params_dtype"])  # fmt: skip


class CpuForCuda(TorchFunctionMode):
    """Within, ``device="cuda"`` is the CPU, and CPU tensors pass for those of CUDA where Megatron-core looks."""

    def __enter__(self) -> Any:
        self._patches = ExitStack()
        for owner, name, own in (
            (torch.cuda, "current_device", lambda: "cpu"),
            (torch.cuda, "synchronize", lambda: None),
            (torch, "autocast", _Autocast),
            (engine, "OptimizerConfig", _config),
            (strategy, "check_megatron", lambda: None),
            (strategy, "check_device", lambda level: None),
        ):
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
        found = func(*args, **kwargs)
        if func is Tensor.type and len(args) == 1 and not kwargs:
            return found.replace("torch.", "torch.cuda.", 1)
        return found
