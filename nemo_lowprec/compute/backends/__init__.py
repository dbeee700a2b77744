"""Backends of the low-precision GEMMs, and the choice among them."""

from __future__ import annotations

import logging

import torch
import torch.distributed as dist

from nemo_lowprec.chart.recipe import Recipe
from nemo_lowprec.compute.backends.base import Backend
from nemo_lowprec.compute.backends.reference import ReferenceBackend
from nemo_lowprec.compute.backends.scaled_mm import ScaledMMBackend
from nemo_lowprec.compute.backends.scaled_mm_blocks import ScaledBlocksBackend
from nemo_lowprec.compute.backends.scaled_mm_rows import ScaledRowsBackend
from nemo_lowprec.compute.backends.te import TEBackend
from nemo_lowprec.kernels.loader import fused_kernels

__all__ = ["BACKENDS", "Backend", "choose_backend", "class_of", "find_backend"]

log = logging.getLogger("nemo_lowprec")

BACKENDS: dict[str, type[Backend]] = {b.name: b for b in (ScaledMMBackend, TEBackend, ReferenceBackend)}
_SCALED_MM: dict[str, type[Backend]] = {"rowwise": ScaledRowsBackend, "blockwise": ScaledBlocksBackend}  # by scaling


def class_of(name: str, recipe: Recipe | None) -> type[Backend]:
    """The class of the backend ``name`` for ``recipe``."""
    if name == ScaledMMBackend.name and recipe is not None:
        return _SCALED_MM.get(recipe.scaling, ScaledMMBackend)
    return BACKENDS[name]


def choose_backend(name: str, recipe: Recipe | None, device: torch.device) -> Backend:
    """``find_backend``, and a log line that says what ``auto`` has found."""
    backend, reasons = find_backend(name, recipe, device)
    # All processes have the same GPUs and packages.
    if name == "auto" and not (dist.is_initialized() and dist.get_rank()):
        log.info("GEMM backend: %s", backend.name + (f" ({'; '.join(reasons)})" if reasons else ""))
    return backend


def find_backend(name: str, recipe: Recipe | None, device: torch.device) -> tuple[Backend, list[str]]:
    """Find the backend ``name``, or with ``auto`` the fastest that can run ``recipe`` on ``device``.

    ``recipe=None`` asks for half-precision GEMMs in plain torch.

    Returns:
        The backend; and with ``auto`` the reason why each faster backend cannot run here.

    Raises:
        ValueError: an unknown name; or the choice cannot work here, with what is missing and the way out.
    """
    if name != "auto" and name not in BACKENDS:
        raise ValueError(f"Unknown backend {name!r}. Choose one of: auto, {', '.join(BACKENDS)}.")
    on_gpu = device.type == "cuda"
    if name != "auto":
        reason = class_of(name, recipe).unavailable(recipe)
        if reason is None and name != "reference" and not on_gpu:
            reason = f"the model trains on {device.type}; use backend='reference' or accelerator='gpu'"
        if reason:
            raise ValueError(f"backend={name!r} cannot run here: {reason}.")
        return _made(class_of(name, recipe), recipe), []
    if recipe is not None and recipe.scaling in ("mxfp8", "nvfp4"):
        reason = TEBackend.unavailable(recipe) if on_gpu else f"the model trains on {device.type}"
        if reason:
            raise ValueError(
                f"{recipe.scaling} GEMMs need a Blackwell GPU (compute capability 10.0) and Transformer Engine: "
                f"{reason}. Use a bf16_with_fp8 level here, or backend='reference' to emulate them slowly."
            )
    chosen: type[Backend] = ReferenceBackend
    reasons: list[str] = []
    kinds = [class_of(name, recipe) for name in BACKENDS] if recipe is not None and on_gpu else []
    if kinds and fused_kernels() is None:  # without them TE quantizes faster than torch
        kinds.sort(key=lambda kind: issubclass(kind, ScaledMMBackend))
    for kind in kinds:
        reason = kind.unavailable(recipe)
        if reason is None:
            chosen = kind
            break
        reasons.append(f"not {kind.name}: {reason}")
    return _made(chosen, recipe), reasons


def _made(kind: type[Backend], recipe: Recipe | None) -> Backend:
    backend = kind()
    backend.fast_accum = recipe is not None and recipe.fast_accum
    return backend
