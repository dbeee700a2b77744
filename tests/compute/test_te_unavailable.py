"""What can be held to account without a GPU and without Transformer Engine."""

import subprocess
import sys

import pytest
import torch
from torch import nn

from nemo_lowprec.chart.recipe import Recipe
from nemo_lowprec.compute import te_layers
from nemo_lowprec.compute.backends.base import half_matmul
from nemo_lowprec.compute.backends.scaled_mm import ScaledMMBackend
from nemo_lowprec.compute.backends.te import TEBackend


def test_backends_import_neither_te_nor_triton():
    code = (
        "import sys, nemo_lowprec.compute.backends, nemo_lowprec.compute.te_layers; "
        "assert not {'transformer_engine', 'nemo_lowprec.kernels.triton_cast'} & set(sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what is missing without a GPU")
@pytest.mark.parametrize("backend", [TEBackend, ScaledMMBackend])
@pytest.mark.parametrize("recipe", [None, Recipe("delayed"), Recipe("nvfp4")])
def test_without_a_gpu_the_reason_names_the_way_out(backend, recipe):
    reason = backend.unavailable(recipe)
    assert reason and "GPU" in reason and "backend='reference'" in reason and not reason.endswith(".")


@pytest.mark.parametrize("error", [ImportError("no te"), OSError("libcudnn"), RuntimeError("cudnn not found")])
def test_a_broken_te_is_a_reason_and_no_crash(monkeypatch, error):
    from nemo_lowprec.compute.backends import te

    def broken():
        raise error

    monkeypatch.setattr(te, "_load", broken)
    te._import_error.cache_clear()
    try:
        reason = te._import_error()
        assert str(error) in reason and "install" in reason
    finally:
        te._import_error.cache_clear()


def test_half_matmul_keeps_the_asked_dtype():
    a, b = torch.randn(4, 8).bfloat16(), torch.randn(8, 3).bfloat16()
    assert half_matmul(a, b, torch.float32).dtype == torch.float32
    assert half_matmul(a[:0], b, torch.float32).shape == (0, 3)


def test_no_te_layers_without_te(monkeypatch):
    monkeypatch.delitem(sys.modules, "transformer_engine", raising=False)
    assert not te_layers.has_te_layers(nn.Linear(2, 2))
    with te_layers.te_context(Recipe("delayed"), torch.bfloat16):
        pass


def test_history_is_fitted_with_the_newest_last():
    history = torch.tensor([[9.0], [0.0], [1.0], [2.0]])  # at hand, then oldest to newest
    assert te_layers._fit(history, 3).flatten().tolist() == [9, 1, 2]
    assert te_layers._fit(history, 6).flatten().tolist() == [9, 0, 0, 0, 1, 2]
    assert te_layers._fit(history, 1).flatten().tolist() == [9]
