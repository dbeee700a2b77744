"""FP8 gradients averaged within machines and then between machines, over NCCL: four GPUs as two machines."""

import os

import pytest
import torch
import torch.distributed as dist

from nemo_lowprec.comm import GradientReducer
from nemo_lowprec.comm.topology import Machines
from tests.comm.test_machines import reference, rounded
from tests.gpu.test_multi_gpu import SHAPES, _store, averaged_pass, on_cpu
from tests.processes import on_processes
from tests.support import assert_same, values_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.multi_gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 4, reason="needs four CUDA GPUs"),
]

LARGE = [(512, 1024)] * 12
STEPS = 4


def wire(param):
    return torch.float8_e4m3fn if param.dim() > 1 else torch.float32


def reduced(rank):
    os.environ["NCCL_HOSTID"] = str(rank // 2)
    return averaged(rank)


def averaged(rank):
    """Backward passes of many buckets, each while the buffers of those before are in use."""
    shapes = [*SHAPES, *LARGE]
    params = [torch.nn.Parameter(torch.zeros(s, device="cuda", dtype=torch.float32)) for s in shapes]
    for param in params:
        if param.dim() > 1:
            param.grad_dtype = None
            param.register_post_accumulate_grad_hook(_store)
    reducer = GradientReducer(params, None, wire, bucket_bytes=2**18)
    machines = Machines.of(None)
    found = []
    for step in range(STEPS):
        factors = averaged_pass(reducer, params, 10 * step + rank)
        kept = slice(None) if step in (1, STEPS - 1) else slice(len(SHAPES))
        found.append({"own": factors[kept], "mean": [values_of(p.grad) for p in params][kept]})
    return on_cpu({
        "passes": found, "stages": [len(b.stages) for b in reducer._buckets], "peers": reducer._peers is not None,
        "groups": [dist.get_process_group_ranks(g) for g in (machines.within, machines.across)],
    })  # fmt: skip


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return on_processes(4, tmp_path_factory.mktemp("ranks"), reduced, backend="nccl")


def test_gpus_of_a_machine_copy_between_their_memories(ranks):
    assert_groups(ranks)
    assert all(found["peers"] for found in ranks)


def assert_groups(ranks):
    for rank, found in enumerate(ranks):
        assert found["groups"] == [[[0, 1], [2, 3]][rank // 2], [[0, 2], [1, 3]][rank % 2]]
        assert max(found["stages"]) == 3 and len(found["stages"]) > 6


def test_means_are_those_of_the_definition_on_all_processes(ranks):
    assert_means(ranks)
    assert len(ranks) == 4


def assert_means(ranks):
    for step in range(STEPS):
        passes = [rank["passes"][step] for rank in ranks]
        for other in passes[1:]:
            assert_same(other["mean"], passes[0]["mean"])
        for *own, got in zip(*(one["own"] for one in passes), passes[0]["mean"], strict=True):
            if got.dim() > 1:
                assert torch.equal(got, reference([rounded(g) for g in own], "in turn"))
            else:
                assert torch.allclose(got, torch.stack(own).mean(0), atol=1e-6)
