"""Which figures a continued file of whole steps has already."""

import pytest

from benchmarks.parallel_step import over_same_links

SOCKETS = {"nccl": {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_VERSION": "2.28"}}
MACHINES = {"machines": 2, "nccl": {"NCCL_IB_DISABLE": "1"}}


@pytest.mark.parametrize(
    ("figure", "processes", "here", "same"),
    [
        ({"gpus": 2}, 2, {"nccl": {"NCCL_VERSION": "2.29"}}, True),
        ({"gpus": 4}, 2, {}, False),
        ({"gpus": 2}, 2, SOCKETS, False),
        ({"gpus": 2, **SOCKETS}, 2, SOCKETS, True),
        ({"gpus": 2, **SOCKETS}, 4, MACHINES, False),
        ({"gpus": 2, "processes": 4, **MACHINES}, 4, MACHINES, True),
        ({"gpus": 2, "processes": 4, **MACHINES}, 2, {}, False),
        ({"gpus": 4, "nccl": MACHINES["nccl"]}, 4, MACHINES, False),
    ],
)
def test_a_figure_counts_where_processes_machines_and_links_are_the_same(figure, processes, here, same):
    assert over_same_links(figure, processes, here) is same
