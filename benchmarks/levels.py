"""The levels that the GPUs of the benchmarks (Hopper) can run: all but those that need Blackwell."""

from __future__ import annotations

from nemo_lowprec import CHART

__all__ = ["HOPPER"]

HOPPER = [name for name, level in CHART.items() if level.scaling not in ("mxfp8", "nvfp4")]
