"""A made-up family of GPUs, on which a CPU's layers gain by FP8 from a size on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from nemo_lowprec.compute.gemm_times import FAMILIES, GemmTimes, Roofline

# GEMMs take the time of their FLOP, 1000 a µs in half precision and 2000 in FP8; a launch in FP8 takes 40 µs, a cast 1.
# At 4 rows the layer 32 × 128 of ``support.Net`` loses by FP8, and its layer 128 × 128 gains.
MADE_UP = GemmTimes("CPU of the tests", Roofline(40.0, 2e3, 4.0), Roofline(0.0, 1e3, 4.0), 1e12, (1.0, 1e12), True)


@contextmanager
def made_up_times(times: GemmTimes = MADE_UP) -> Iterator[None]:
    """A CPU is a GPU with these times."""
    before = FAMILIES.get("cpu")
    FAMILIES["cpu"] = times
    try:
        yield
    finally:
        FAMILIES["cpu"] = before
