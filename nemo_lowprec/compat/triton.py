"""Triton's compiled kernels, and the CUDA streams that Triton launches them on."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version
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
    if _launches_directly(run):
        extension, how = run.launch, (run.launch_cooperative_grid, run.launch_pdl, None, None, metadata)

        def directly(programs: int, *args: Any) -> None:
            extension(programs, 1, 1, stream_of(device), function, *how, None, None, None, *args, *constants)

        return directly

    def launch(programs: int, *args: Any) -> None:
        run(programs, 1, 1, stream_of(device), function, metadata, None, None, None, *args, *constants)

    return launch


def _launches_directly(run: Any) -> bool:
    """Whether ``run`` adds to its arguments only what is known here, before it calls its C extension."""
    sizes = getattr(run, "global_scratch_size", None), getattr(run, "profile_scratch_size", None)
    return version("triton").startswith("3.6.") and sizes == (0, 0)
