"""Benchmarks: each is run as ``python -m benchmarks.NAME`` and writes JSON lines into benchmarks/results/."""

import contextlib

with contextlib.suppress(ImportError, OSError, RuntimeError):
    # ``benchmarks.two_versions`` runs versions of the package, too, that do not have this function.
    from nemo_lowprec.compat.transformer_engine import import_te

    import_te()  # before anything else loads cuDNN
