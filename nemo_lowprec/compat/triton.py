"""Triton's compiled kernels, and the CUDA streams that Triton launches them on."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import torch

from nemo_lowprec.compat.native import launch_address, native

_KINDS = {"i32": "i", "i64": "l", "fp32": "f", "constexpr": "-"}  # as ``native.c`` has them, by Triton's types

current_device = torch._C._cuda_getDevice if torch.backends.cuda.is_built() else None


def launch_of(compiled: Any, constants: tuple[Any, ...]) -> Callable[..., None]:
    """A function ``(programs, *args)`` that launches ``compiled`` on the current stream, without Triton's own search.

    Args:
        compiled: what ``kernel[grid](...)`` returned.
        constants: its ``tl.constexpr`` arguments, in the kernel's order.
    """
    run, function, metadata = compiled.run, compiled.function, compiled.packed_metadata
    stream_of, device = torch._C._cuda_getCurrentRawStream, torch.cuda.current_device()
    kernel = _native_kernel(compiled, len(constants))
    if kernel is not None:
        launch_native = native().launch

        def natively(programs: int, *args: Any) -> None:
            launch_native(kernel, programs, stream_of(device), *args)

        return natively

    def launch(programs: int, *args: Any) -> None:
        run(programs, 1, 1, stream_of(device), function, metadata, None, None, None, *args, *constants)

    return launch


def _native_kernel(compiled: Any, constants: int) -> Any:
    """``compiled`` for ``native().launch``, without its last ``constants`` arguments; None where only Triton can."""
    run = compiled.run
    scratch = getattr(run, "global_scratch_size", None), getattr(run, "profile_scratch_size", None)
    if scratch != (0, 0) or not version("triton").startswith("3.6."):
        return None  # other versions of Triton pass other hidden arguments to a kernel
    warps, blocks, shared = compiled.packed_metadata
    types = list(compiled.src.signature.values())
    kinds = ["p" if isinstance(each, str) and each[0] == "*" else _KINDS.get(each) for each in types]
    plain = blocks == 1 and not run.launch_cooperative_grid and not run.launch_pdl
    known = None not in kinds and kinds[len(kinds) - constants :] == ["-"] * constants
    if not (plain and known) or native() is None:
        return None
    passed = "".join(kinds[: len(kinds) - constants])  # type: ignore[arg-type]
    return native().new_kernel(launch_address(), compiled.function, 32 * warps, shared, passed)
