"""``convert="auto"`` and ``torch.compile``: the same choice as eagerly, and the same losses."""

import pytest
import torch

from nemo_lowprec.compute import gemm_plans
from nemo_lowprec.compute.choice import CHOICE, Choice
from nemo_lowprec.compute.gemm_times import GemmTimes, Roofline
from nemo_lowprec.engine import Engine
from tests.auto import MADE_UP, made_up_times
from tests.compute.test_compiled import Run, llama, vit

pytestmark = pytest.mark.usefixtures("single_layers")

MODELS = {"llama": llama, "vit": vit}


def in_fp8(model):
    return {plan.name for m in model.modules() for plan in gemm_plans(m).values() if plan.recipe is not None}


def times_for(model):
    """Of a family on which some of the layers gain."""
    launch = {"llama": 60.0, "vit": 20.0}[model]  # of a GEMM: norms of compiled blocks quantize nothing
    return GemmTimes("", Roofline(launch, 2e3, 4.0), MADE_UP.half, 1e12, (1.0, 1e12))


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("case", ["bf16_with_fp8_mixed", "te_fp8", "msamp_o3", "bf16_with_fp8_current_scaling_mixed"])
def test_compiled_blocks_choose_and_compute_as_eager_ones(case, model):
    torch._dynamo.reset()
    with made_up_times(times_for(model)):
        runs = [Run(case, MODELS[model](), compiled) for compiled in (False, True)]
        everything = in_fp8(runs[0].model)
        for _ in range(4):
            for run in runs:
                run.step()
    eager, compiled = (in_fp8(run.model) for run in runs)
    assert set() < eager < everything
    assert compiled == eager
    assert runs[0].losses[:2] == runs[1].losses[:2]
    assert runs[0].losses == pytest.approx(runs[1].losses, rel=2e-3)


@pytest.mark.parametrize("case", ["bf16_with_fp8_mixed", "te_fp8", "msamp_o2", "msamp_o3"])
def test_compiled_blocks_compute_left_layers_by_torch_as_eager_ones(case):
    """As on a GPU, where torch runs the GEMMs of these layers."""
    torch._dynamo.reset()
    left = {f"blocks.{i}.{name}": "too small" for i in range(2) for name in ("q", "v", "down")}
    runs = []
    for compiled in (False, True):
        run = Run(case, vit(), compiled)
        run.step()
        computation = Engine.of(run.model).columns.computation
        computation._filter._half_backend = None
        computation.load_state_dict({CHOICE: Choice(left).state_dict()})
        assert gemm_plans(run.model.blocks[0].q)["weight"].by_torch
        for _ in range(3):
            run.step()
        runs.append(run)
    assert runs[0].losses == pytest.approx(runs[1].losses, rel=2e-3)
    assert runs[0].losses[:2] == runs[1].losses[:2]
