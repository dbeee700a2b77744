"""GPU time of a profile by the kind of its kernels, which their names tell."""

from __future__ import annotations

from collections.abc import Iterable

from nemo_lowprec.report.profile import kinds

__all__ = ["KINDS", "kind_of", "milliseconds"]

_OPTIMIZER = ("adam", "step_kernel")  # parts of kernel names, in lower case
KINDS = ("attention", "gemm", "optimizer", "other")


def kind_of(kernel: str) -> str:
    """One of ``KINDS``; convolutions are GEMMs."""
    if any(part in kernel.lower() for part in _OPTIMIZER):
        return "optimizer"
    found = kinds.kind_of(kernel)
    return found if found in KINDS else "other"


def milliseconds(kernels: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Milliseconds of each of ``KINDS``, from (name, microseconds) of each launch."""
    total = dict.fromkeys(KINDS, 0.0)
    for name, us in kernels:
        total[kind_of(name)] += us / 1e3
    return total
