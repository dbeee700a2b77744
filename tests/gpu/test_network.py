"""FP8 averaging over NCCL's network: each process is on a machine of its own to NCCL, and all share one GPU."""

import os

import pytest
import torch

from nemo_lowprec.comm import topology
from tests.gpu import test_multi_gpu, test_multi_gpu_machines
from tests.processes import on_processes

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


def reduced(rank):
    os.environ["NCCL_HOSTID"] = str(rank)
    return test_multi_gpu.reduced(rank)


def reduced_in_two_levels(rank):
    """NCCL takes the network within the machines, too: it refuses two processes of one machine on one GPU."""
    os.environ["NCCL_HOSTID"] = str(rank)
    topology.machines_by_rank = lambda group: ["a", "a", "b", "b"]
    return test_multi_gpu_machines.averaged(rank)


def test_means_of_two_machines_are_those_of_the_definition(tmp_path):
    ranks = on_processes(2, tmp_path, reduced, backend="nccl")
    test_multi_gpu.assert_means(ranks)
    assert len(ranks) == 2


def test_means_in_two_levels_are_those_of_the_definition(tmp_path):
    ranks = on_processes(4, tmp_path, reduced_in_two_levels, backend="nccl")
    test_multi_gpu_machines.assert_groups(ranks)
    test_multi_gpu_machines.assert_means(ranks)
    assert not any(found["peers"] for found in ranks)
