"""Benchmarks: each is run as ``python -m benchmarks.NAME`` and writes JSON lines into benchmarks/results/."""

import contextlib

import torch  # noqa: F401

with contextlib.suppress(ImportError, OSError, RuntimeError):
    import transformer_engine.pytorch  # noqa: F401  before anything else loads cuDNN
