"""A profile on a GPU: training stays the same, all kernels have their layers, and the parts add up to the step."""

import pytest
import torch

from nemo_lowprec import CHART
from nemo_lowprec.report import StepProfiler
from nemo_lowprec.report.profile.beside import beside
from nemo_lowprec.report.profile.step_profile import read_profile
from nemo_lowprec.report.profile.timeline import WAITS
from tests.megatron_cases import results
from tests.processes import on_processes
from tests.profiled import BLOCKS, LINEARS, profiled
from tests.report.profile.test_processes import CASES, fit

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
LEVELS = ["bf16_mixed", "bf16_with_fp8_mixed", "bf16_with_fp8_current_scaling_mixed", "te_fp8", "msamp_o2", "msamp_o3",
          "bf16_with_fp8_subchannel_scaling_mixed"]  # fmt: skip


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("level", LEVELS)
def test_a_profiled_training(level, graphs, tmp_path):
    length = 512
    losses, _ = profiled(level, None, "gpu", length=length, graphs=graphs)
    watched, found = profiled(level, tmp_path / "found.json", "gpu", length=length, graphs=graphs)
    assert watched == losses
    assert found.matched > 0.9  # a graph has copies of its own, which are many in so small a model
    parts = found.parts()
    assert sum(parts.values()) == pytest.approx(found.ms, rel=0.02) or parts[WAITS] == 0
    assert parts["gemm"] > 0 and parts["attention"] > 0 and parts["optimizer"] > 0 and parts["communication"] == 0
    assert (parts["quantization"] > 0) == CHART[level].has_fp8
    of_layers = {part: sum(us.get(part, 0) for layer, us in found.layers.items() if layer) / 1e3 for part in parts}
    assert of_layers["attention"] == pytest.approx(parts["attention"], rel=0.02)
    assert of_layers["gemm"] > 0.95 * parts["gemm"]
    if CHART[level].has_fp8:
        plain = found
        if graphs and CHART[level].weight_grad == "fp8":
            # Gradients are stored by launches that belong to no layer: one for all, and one for each in a graph.
            plain = profiled(level, tmp_path / "plain.json", "gpu", length=length, graphs=False)[1]
        assert of_layers["quantization"] > 0.8 * plain.parts()["quantization"]
    assert sorted(found.low) == (sorted(LINEARS) if CHART[level].has_fp8 else [])
    gemms = sum(us.get("gemm", 0) for layer, us in found.layers.items() if ".layers." in layer)
    assert gemms > 0.5e3 * parts["gemm"]


def test_layers_beside_bf16(tmp_path):
    profiles = [profiled(level, tmp_path / level, "gpu", length=512)[1] for level in ("bf16_mixed", "msamp_o2")]
    found = beside(*profiles)
    of_linears = [one for one in found.layers if one.low]
    assert sorted(name for one in of_linears for name in one.low) == sorted(LINEARS)
    for one in of_linears:
        assert one.half_us["gemm"] > 0 and one.low_us["gemm"] > 0, one
    kinds = found.kinds_of_layers()
    assert all(len(one.low) % BLOCKS == 0 for one in kinds)
    # FP8 does not pay for layers of 128 features.
    assert found.better_in_half


@pytest.fixture(scope="module")
def on_megatron(megatron_weights, tmp_path_factory):
    folder = tmp_path_factory.mktemp("profiled")
    jobs = {}
    for case in ("bf16_mixed", "bf16_with_fp8_mixed", "msamp_o2+fp16"):
        common = {"case": case, "sizes": {}, "weights": megatron_weights, "kind": "gpt", "steps": StepProfiler.steps()}
        jobs |= {case: common, f"{case} profiled": {**common, "profiled": str(folder / case)}}
    return folder, results(1, folder, jobs)


@pytest.mark.parametrize("case", ["bf16_mixed", "bf16_with_fp8_mixed", "msamp_o2+fp16"])
def test_a_model_on_megatron_core(case, on_megatron):
    folder, found = on_megatron
    assert found(f"{case} profiled")["losses"] == found(case)["losses"]
    profile = read_profile(folder / case)
    parts = profile.parts()
    assert profile.about["engine"] == "megatron" and profile.matched > 0.9
    assert parts["gemm"] > 0 and parts["attention"] > 0 and parts["optimizer"] > 0
    assert (parts["quantization"] > 0) == (case != "bf16_mixed")
    gemms = sum(us.get("gemm", 0) for layer, us in profile.layers.items() if "linear_" in layer)
    assert gemms > 0.5e3 * parts["gemm"]


@pytest.mark.multi_gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")
@pytest.mark.parametrize("strategy", ["lowprec_ddp", "ddp", "lowprec_sharded"])
def test_two_processes(strategy, tmp_path):
    on_processes(2, tmp_path, fit, str(tmp_path), strategy, "gpu", backend="nccl")
    for case in CASES:
        found = read_profile(tmp_path / f"{case}.json")
        parts = found.parts()
        assert found.about["processes"] == 2 and parts["communication"] > 0 and parts["gemm"] > 0, parts
        assert sum(parts.values()) == pytest.approx(found.ms, rel=0.02) or parts[WAITS] == 0
