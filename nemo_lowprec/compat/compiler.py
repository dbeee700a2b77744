"""``torch.compile``."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._functorch import config as _functorch


def keep_address(tensor: Tensor) -> None:
    """Tell ``torch.compile`` that ``tensor`` stays in its place, so that no CUDA graph copies it before it reads it."""
    torch._dynamo.mark_static_address(tensor, guard=False)  # type: ignore[attr-defined]


def outside_graphs(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` as a hook that runs in no compiled graph: one ends before the hook, another one begins after it."""
    disabled = torch.compiler.disable(function)  # costs the host 5 µs also where nothing is compiled

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        return disabled(*args, **kwargs) if torch.compiler.is_compiling() else function(*args, **kwargs)

    return run


def records_cuda_graphs() -> bool:
    """Whether inductor compiles for CUDA graphs now: ``mode="reduce-overhead"`` and ``"max-autotune"``."""
    config = sys.modules.get("torch._inductor.config")
    return config is not None and bool(config.triton.cudagraphs)


def overwriting_saved_tensors() -> AbstractContextManager[None]:
    """Context of a backward pass with ``retain_graph=True`` through compiled code that overwrites saved tensors.

    Inductor refuses such a pass ("donated buffers"). No second pass may follow it.
    """
    return _functorch.patch(donated_buffer=False)  # type: ignore[no-any-return]


def without_compiling() -> AbstractContextManager[None]:
    """Context in which compiled code runs, and code that would have to be compiled is an error."""
    if "torch._dynamo" not in sys.modules:  # nothing is compiled, and to import it takes seconds
        return nullcontext()
    return torch.compiler.set_stance("fail_on_recompile")  # type: ignore[return-value]
