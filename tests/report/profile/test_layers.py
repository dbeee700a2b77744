"""Which layer a kernel belongs to."""

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from nemo_lowprec.compat.profiler import Event, trace_of
from nemo_lowprec.report.profile.layers import kernels_of, layer_ranges, operations_of, optimizer_range


class Model(nn.Module):
    def __init__(self, recomputes=False):
        super().__init__()
        self.first, self.block, self.recomputes = (
            nn.Linear(64, 64),
            nn.Sequential(nn.Linear(64, 64), nn.ReLU()),
            recomputes,
        )

    def forward(self, x):
        x = self.first(x)
        x = checkpoint(self.block, x, use_reentrant=False) if self.recomputes else self.block(x)
        return x.pow(2).mean()


@pytest.mark.parametrize("recomputes", [False, True])
def test_operations_of_forward_backward_and_the_optimizer(recomputes):
    model, x = Model(recomputes), torch.randn(32, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler, layer_ranges(model):
        model(x).backward()
        with optimizer_range():
            optimizer.step()
    found = operations_of(trace_of(profiler))
    gemms = [one.layer for one in found if one.kind == "gemm"]
    # Forward, and the gradients of the weight and of the input; the model's own input has none.
    assert gemms.count("first") == 2 and gemms.count("block.0") == 3 + recomputes and len(gemms) == 5 + recomputes
    assert {one.layer for one in found if "threshold_backward" in one.name} == {"block.1"}
    assert {one.layer for one in found if one.name in ("aten::pow", "aten::mean")} == {""}
    updates = {one.name for one in found if one.kind == "optimizer"}
    assert updates and not updates & {one.name for one in found if one.kind == "gemm"}
    assert all(one.layer == "" for one in found if one.kind == "optimizer")


def event(name, what, start, end, launch=0, sequence=-1, thread=1, forward_thread=0):
    return Event(name, what, start, end, thread, launch, sequence, forward_thread)


def test_kernels_of_a_gpu_belong_where_they_were_launched():
    node = "autograd::engine::evaluate_function: MulBackward0"
    events = [
        event("nemo_lowprec.layer a", "range", 0, 10),
        event("aten::mul", "op", 2, 6, sequence=7),
        event("cudaLaunchKernel", "launch", 3, 4, launch=1),
        event("cuLaunchKernelEx", "launch", 12, 13, launch=2),
        event(node, "op", 20, 30, sequence=7, thread=2, forward_thread=1),
        event("cudaLaunchKernel", "launch", 21, 22, launch=3),
        event("nemo_lowprec.optimizer", "range", 40, 50),
        event("cudaLaunchKernel", "launch", 41, 42, launch=4),
        event("gemm", "kernel", 100, 110, launch=1),
        event("other", "kernel", 110, 120, launch=2),
        event("gemm", "kernel", 120, 130, launch=3),
        event("adam", "kernel", 130, 140, launch=4),
    ]
    found = [(one.layer, one.kind) for one in kernels_of(events)]
    assert found == [("a", "gemm"), ("", "elementwise"), ("a", "gemm"), ("", "optimizer")]
