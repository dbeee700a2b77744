"""``doctor`` on a GPU: versions, the backend of every level, and times of a model's GEMMs."""

import json
import os
import subprocess
import sys

import pytest
import torch

from nemo_lowprec import CHART
from nemo_lowprec.chart.recipe import Recipe
from nemo_lowprec.compute.backends import find_backend
from nemo_lowprec.compute.gemm_measure import layer_times, warm_operands
from nemo_lowprec.report import examine
from tests.processes import of_a_shell

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
HAS_FP8 = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)
needs_fp8 = pytest.mark.skipif(not HAS_FP8, reason="needs a GPU with FP8")
SCALINGS = ["delayed", "current", "rowwise", "blockwise"]


def doctor(folder, *arguments):
    """What the command prints to stdout in a process of its own, as it loads libraries that close a test's stderr."""
    command = [sys.executable, "-m", "nemo_lowprec.cli", "doctor", *arguments]
    environment = of_a_shell(PYTHONPATH=os.pathsep.join(filter(None, sys.path)))
    return subprocess.run(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout


def test_the_machine_and_every_level():
    report = examine()
    (first, *_) = report.machine.gpus
    assert first.name == torch.cuda.get_device_name(0) and first.bytes > 2**30
    assert len(report.machine.gpus) == torch.cuda.device_count()
    assert report.machine.driver and report.machine.cuda == torch.version.cuda
    assert report.machine.cudnn.count(".") == 2 and report.machine.nccl.count(".") >= 1
    for one in report.levels:
        scaling = CHART[one.level].scaling
        if scaling in ("delayed", "current") and HAS_FP8:
            assert one.backend in ("torch", "te") and not one.note
        if scaling is None:
            assert one.backend == "torch" and not any(one.engines[name] for name in list(one.engines)[:2])


@needs_fp8
@pytest.mark.parametrize("scaling", SCALINGS)
def test_a_large_layer_is_faster_in_fp8_than_a_small_one_gains(scaling):
    recipe = Recipe(scaling, fp8="hybrid" if scaling in ("delayed", "current") else "e4m3")
    backend, _ = find_backend("auto", recipe, torch.device("cuda"))
    if backend.name == "reference":
        pytest.skip(f"no backend for {scaling} here")
    operands = warm_operands(recipe)
    small = layer_times(256, 256, 256, backend, operands)
    large = layer_times(8192, 8192, 8192, backend, operands)
    assert all(0 < time < 1e6 for time in (*small, *large))
    assert large[0] / large[1] < small[0] / small[1] and large[1] > 5 * small[1]
    if scaling == "delayed":
        assert large[0] < large[1]


@needs_fp8
def test_the_command_measures_a_model(tmp_path):
    sizes = ["model=llama3_8b", "data.seq_length=4096", "data.micro_batch_size=1"]
    found = json.loads(doctor(tmp_path, *sizes, "--json"))["gemms"]
    assert found["why"] == "" and found["backend"] in ("torch", "te")
    assert {(t["rows"], t["ins"], t["outs"]): t["layers"] for t in found["times"]} == {
        (4096, 4096, 14336): 64, (4096, 14336, 4096): 32, (4096, 4096, 4096): 64, (4096, 4096, 1024): 64,
    }  # fmt: skip
    assert all(t["fp8"] > 0 and t["half"] > 0 for t in found["times"]) and found["ratio"] < 0.9
    small = doctor(tmp_path, "model=llama_tiny", "data.seq_length=128", "data.micro_batch_size=1")
    assert "FP8 does not pay" in " ".join(small.split())
