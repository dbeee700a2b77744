"""Which backend runs, and what a choice that cannot work says. For machines without a GPU."""

import logging
import re

import pytest
import torch

from nemo_lowprec.chart.options import BACKEND_NAMES
from nemo_lowprec.chart.recipe import Recipe
from nemo_lowprec.compute import BACKENDS, choose_backend
from nemo_lowprec.compute.backends import find_backend
from nemo_lowprec.compute.backends.te import TEBackend

CPU = torch.device("cpu")
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="says what a machine without a GPU is told")


def recipe(scaling):
    return Recipe(scaling, fp8="e4m3")


def test_the_names_that_the_argument_takes_are_those_of_the_backends():
    assert tuple(BACKENDS) == BACKEND_NAMES


@pytest.mark.parametrize("scaling", ["delayed", "current", "rowwise", "blockwise"])
def test_auto_is_the_reference_on_a_cpu_and_says_so_in_one_line(scaling, caplog):
    with caplog.at_level(logging.INFO, "nemo_lowprec"):
        assert choose_backend("auto", recipe(scaling), CPU).name == "reference"
    assert [r.message for r in caplog.records] == ["GEMM backend: reference"]


@pytest.mark.parametrize("scaling", ["mxfp8", "nvfp4"])
def test_auto_does_not_emulate_blackwell(scaling):
    with pytest.raises(ValueError, match=f"{scaling} GEMMs need a Blackwell GPU.*backend='reference'"):
        choose_backend("auto", recipe(scaling), CPU)


def test_auto_does_not_emulate_what_transformer_engine_lacks_on_blackwell(monkeypatch):
    reason = "Transformer Engine: MXFP8 is not supported on 12.0+ architectures yet; use another level"
    monkeypatch.setattr(TEBackend, "unavailable", lambda recipe: reason if recipe.scaling == "mxfp8" else None)
    with pytest.raises(
        ValueError, match=f"mxfp8 GEMMs need a Blackwell GPU.*: {re.escape(reason)}. Use a bf16_with_fp8"
    ):
        find_backend("auto", recipe("mxfp8"), torch.device("cuda"))


@pytest.mark.parametrize("scaling", ["delayed", "current", "rowwise", "blockwise", "mxfp8", "nvfp4"])
def test_the_reference_runs_everything_when_it_is_asked_for(scaling):
    assert choose_backend("reference", recipe(scaling), CPU).name == "reference"


@no_gpu
@pytest.mark.parametrize("scaling", ["delayed", "nvfp4"])
@pytest.mark.parametrize("name", ["te", "torch"])
def test_a_forced_gpu_backend_says_what_is_missing_and_the_way_out(name, scaling):
    message = f"backend='{name}' cannot run here: .*NVIDIA GPU; use backend='reference'"
    with pytest.raises(ValueError, match=message):
        choose_backend(name, recipe(scaling), CPU)
    with pytest.raises(ValueError, match=message):
        choose_backend(name, None, CPU)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_forced_gpu_backend_for_a_model_on_the_cpu_is_an_error():
    with pytest.raises(ValueError, match="the model trains on cpu; use backend='reference' or accelerator='gpu'"):
        choose_backend("torch", recipe("delayed"), CPU)


@pytest.mark.parametrize("fast", [False, True])
def test_the_backend_has_the_recipes_accumulation(fast):
    assert choose_backend("auto", Recipe("delayed", fast_accum=fast), CPU).fast_accum is fast
    assert not choose_backend("auto", None, CPU).fast_accum


@pytest.mark.parametrize("name", ["cutlass", "", "TE", None])
def test_an_unknown_backend_is_a_value_error_that_lists_the_known_ones(name):
    with pytest.raises(ValueError, match=re.escape(f"Unknown backend {name!r}") + ".*auto, torch, te, reference"):
        choose_backend(name, recipe("delayed"), CPU)
