"""A profile of two processes."""

from pathlib import Path

import pytest
import torch

from nemo_lowprec.report import StepProfiler
from nemo_lowprec.report.profile.step_profile import read_profile
from tests.processes import on_processes
from tests.support import Net, loader, plugin_on, trainer

CASES = ["bf16_mixed", "bf16_with_fp8_mixed", "msamp_o2"]


def fit(rank, folder, strategy, accelerator="cpu"):
    """Train with the profiler and without: the weights are the same, bit for bit."""
    for case in CASES:
        weights = []
        for path in (None, Path(folder) / f"{case}.json"):
            torch.manual_seed(0)
            model = Net()
            profiler = StepProfiler(path)
            callbacks = [] if path is None else [profiler]
            options = {
                "strategy": strategy,
                "accelerator": accelerator,
                "devices": 2,
                "max_steps": profiler.steps() + 1,
                "max_epochs": -1,
            }
            level = plugin_on("auto" if accelerator == "gpu" else None, case)
            trainer(level, *callbacks, **options).fit(model, loader())
            weights.append({name: value.detach().clone() for name, value in model.named_parameters()})
            assert (profiler.profile is not None) == (rank == 0 and path is not None)
        assert all(torch.equal(weights[1][name], value) for name, value in weights[0].items())


@pytest.mark.parametrize("strategy", ["lowprec_ddp", "ddp", "lowprec_sharded"])
def test_the_first_process_profiles_itself(strategy, tmp_path):
    on_processes(2, tmp_path, fit, str(tmp_path), strategy)
    for case in CASES:
        found = read_profile(tmp_path / f"{case}.json")
        parts = found.parts()
        assert found.about["processes"] == 2 and found.about["level"] == case
        assert sum(parts.values()) == pytest.approx(found.ms, rel=1e-3)
        assert parts["communication"] > 0 and parts["gemm"] > 0 and parts["optimizer"] > 0
        assert found.layers["mid"]["gemm"] > 0
