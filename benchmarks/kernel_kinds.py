"""GPU time of a profile by the kind of its kernels, which their names tell."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["KINDS", "kind_of", "milliseconds"]

# Parts of kernel names, in lower case. Attention is first: some of its kernels have "cutlass" in their names, too.
_PARTS = {
    "attention": ("flash", "fmha", "sdpa", "cudnn::fusion"),
    "gemm": ("nvjet", "gemm", "cutlass", "cublas"),
    "optimizer": ("adam", "step_kernel"),
}
KINDS = (*_PARTS, "other")


def kind_of(kernel: str) -> str:
    """One of ``KINDS``; convolutions are GEMMs."""
    name = kernel.lower()
    return next((kind for kind, parts in _PARTS.items() if any(part in name for part in parts)), "other")


def milliseconds(kernels: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Milliseconds of each of ``KINDS``, from (name, microseconds) of each launch."""
    total = dict.fromkeys(KINDS, 0.0)
    for name, us in kernels:
        total[kind_of(name)] += us / 1e3
    return total
