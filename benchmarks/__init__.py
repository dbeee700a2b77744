"""Benchmarks: each is run as ``python -m benchmarks.NAME`` and writes JSON lines into benchmarks/results/."""
