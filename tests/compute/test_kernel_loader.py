"""Modules of Triton kernels are looked for once."""

import importlib
from functools import partial

from nemo_lowprec.kernels import loader


def test_a_module_is_looked_for_once(monkeypatch):
    loads = [load for load in vars(loader).values() if isinstance(load, partial)]
    looked_for = []

    def look(name):
        looked_for.append(name)
        raise ImportError(name)

    loader._load.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(importlib, "import_module", look)
        assert len(loads) > 10 and all(load() is None for load in loads)
        first = len(looked_for)
        assert first >= len(loads) and all(load() is None for load in loads)
        assert len(looked_for) == first
    loader._load.cache_clear()
