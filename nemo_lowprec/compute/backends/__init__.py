"""Backends of the low-precision GEMMs, and the choice among them."""

from __future__ import annotations

import logging

import torch
import torch.distributed as dist

from nemo_lowprec.compute.backends.base import Backend
from nemo_lowprec.compute.backends.reference import ReferenceBackend
from nemo_lowprec.compute.backends.scaled_mm import ScaledMMBackend
from nemo_lowprec.compute.backends.te import TEBackend
from nemo_lowprec.options import Recipe

__all__ = ["BACKENDS", "Backend", "choose_backend"]

log = logging.getLogger("nemo_lowprec")

BACKENDS: dict[str, type[Backend]] = {b.name: b for b in (TEBackend, ScaledMMBackend, ReferenceBackend)}

_BLACKWELL = ("mxfp8", "nvfp4")


def choose_backend(name: str, recipe: Recipe | None, device: torch.device) -> Backend:
    """Return the backend ``name``, or with ``auto`` the fastest that can run ``recipe`` on ``device``.

    ``recipe=None`` asks for half-precision GEMMs in plain torch.

    Raises:
        ValueError: an unknown name; or the choice cannot work here, with what is missing and the way out.
    """
    if name != "auto" and name not in BACKENDS:
        raise ValueError(f"Unknown backend {name!r}. Choose one of: auto, {', '.join(BACKENDS)}.")
    on_gpu = device.type == "cuda"
    if name != "auto":
        reason = BACKENDS[name].unavailable(recipe)
        if reason is None and name != "reference" and not on_gpu:
            reason = f"the model trains on {device.type}; use backend='reference' or accelerator='gpu'"
        if reason:
            raise ValueError(f"backend={name!r} cannot run here: {reason}.")
        return BACKENDS[name]()
    if recipe is not None and recipe.scaling in _BLACKWELL and not (on_gpu and _has_blackwell()):
        raise ValueError(
            f"{recipe.scaling} GEMMs need a Blackwell GPU (compute capability 10.0) and Transformer Engine. "
            "Use a bf16_with_fp8 level here, or backend='reference' to emulate them slowly."
        )
    if recipe is None or not on_gpu:
        _say("reference")
        return ReferenceBackend()
    reasons: list[str] = []
    for kind in BACKENDS.values():
        reason = kind.unavailable(recipe)
        if reason is None:
            _say(kind.name + (f" ({'; '.join(reasons)})" if reasons else ""))
            return kind()
        reasons.append(f"not {kind.name}: {reason}")
    raise AssertionError("the reference backend runs anywhere")


def _say(choice: str) -> None:
    """Log the choice, on the first process: all processes have the same GPUs and packages."""
    if not (dist.is_initialized() and dist.get_rank()):
        log.info("GEMM backend: %s", choice)


def _has_blackwell() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (10, 0)
