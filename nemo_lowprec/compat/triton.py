"""Triton's compiled kernels, and the CUDA streams that Triton launches them on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

current_device = torch._C._cuda_getDevice if torch.backends.cuda.is_built() else None


def launch_of(compiled: Any, constants: tuple[Any, ...]) -> Callable[..., None]:
    """A function ``(programs, *args)`` that launches ``compiled`` on the current stream, without Triton's own search.

    Args:
        compiled: what ``kernel[grid](...)`` returned.
        constants: its ``tl.constexpr`` arguments, in the kernel's order.
    """
    run, function, metadata = compiled.run, compiled.function, compiled.packed_metadata
    stream_of, device = torch._C._cuda_getCurrentRawStream, torch.cuda.current_device()

    def launch(programs: int, *args: Any) -> None:
        run(programs, 1, 1, stream_of(device), function, metadata, None, None, None, *args, *constants)

    return launch
