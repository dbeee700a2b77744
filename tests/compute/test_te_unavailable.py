"""What can be held to account without a GPU and without Transformer Engine."""

import subprocess
import sys
from types import ModuleType

import pytest
import torch
from torch import nn

from nemo_lowprec.compute import te_layers
from nemo_lowprec.compute.backends.scaled_mm import ScaledMMBackend, half_matmul
from nemo_lowprec.compute.backends.te import TEBackend
from nemo_lowprec.compute.recipe import Recipe


def test_backends_import_neither_te_nor_triton():
    code = (
        "import sys, nemo_lowprec.compute.backends, nemo_lowprec.compute.te_layers; "
        "assert not {'transformer_engine', 'nemo_lowprec.formats.triton_cast'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


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


class FakeTELinear(nn.Linear):
    """Stands in for a TE module: an extra state that must never be read or written."""

    __module__ = "transformer_engine.fake"

    def get_extra_state(self):
        raise AssertionError("extra state was read")

    def set_extra_state(self, state):
        raise AssertionError("extra state was loaded")


@pytest.fixture
def te_model(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformer_engine", ModuleType("transformer_engine"))
    return nn.Sequential(FakeTELinear(4, 4), nn.Sequential(FakeTELinear(4, 2)))


def test_no_te_layers_without_te(monkeypatch):
    monkeypatch.delitem(sys.modules, "transformer_engine", raising=False)
    assert not te_layers.has_te_layers(nn.Linear(2, 2))
    with te_layers.te_context(Recipe("delayed"), torch.bfloat16):
        pass


def test_te_layers_are_found(te_model):
    assert te_layers.has_te_layers(te_model)
    assert not te_layers.has_te_layers(nn.Sequential(nn.Linear(2, 2)))


def test_hidden_extra_state_neither_appears_nor_is_missed(te_model):
    te_layers.hide_extra_state(te_model)
    te_layers.hide_extra_state(te_model)
    state = te_model.state_dict()
    assert set(state) == {"0.weight", "0.bias", "1.0.weight", "1.0.bias"}
    te_model.load_state_dict(state, strict=True)


def test_extra_state_of_a_foreign_checkpoint_is_ignored(te_model):
    te_layers.hide_extra_state(te_model)
    state = {k: torch.ones_like(v) for k, v in te_model.state_dict().items()}
    foreign = {**state, "0._extra_state": torch.zeros(3), "1.0._extra_state": torch.zeros(0)}
    te_model.load_state_dict(foreign, strict=True)
    assert te_model[1][0].weight.eq(1).all() and "0._extra_state" in foreign
    # Also where the module itself is the root.
    te_model[0].load_state_dict({**te_model[0].state_dict(), "_extra_state": torch.zeros(1)}, strict=True)


def test_hidden_layers_remain_what_they_were(te_model):
    te_layers.hide_extra_state(te_model)
    layer = te_model[0]
    assert isinstance(layer, FakeTELinear) and type(layer) is type(te_model[1][0])
    assert (type(layer).__name__, type(layer).__module__) == ("FakeTELinear", "transformer_engine.fake")


def test_history_is_fitted_with_the_newest_last():
    history = torch.tensor([[9.0], [0.0], [1.0], [2.0]])  # at hand, then oldest to newest
    assert te_layers._fit(history, 3).flatten().tolist() == [9, 1, 2]
    assert te_layers._fit(history, 6).flatten().tolist() == [9, 0, 0, 0, 1, 2]
    assert te_layers._fit(history, 1).flatten().tolist() == [9]
