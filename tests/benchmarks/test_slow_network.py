"""Machines of network namespaces, for benchmarks of averaging over a slow network."""

import os
import shutil
import socket
import subprocess
import time

import pytest
import torch.multiprocessing as mp

from benchmarks.processes import links, put_on_machine
from benchmarks.slow_network import ADDRESS, bytes_out, enter, two_machines

SIZE = 2**20
MBIT = 40


def talk(rank, machines, folder):
    enter(machines[rank])
    if rank == 0:
        with socket.create_server((ADDRESS.format(1), 5000)) as server:
            (folder / "ready").touch()
            connection, _ = server.accept()
            with connection:
                while connection.recv(SIZE):
                    pass
                assert bytes_out() < SIZE
        return
    while not (folder / "ready").exists():
        time.sleep(0.05)
    begun = time.monotonic()
    with socket.create_connection((ADDRESS.format(1), 5000)) as connection:
        connection.sendall(bytes(SIZE))
        connection.shutdown(socket.SHUT_WR)
        connection.recv(1)  # until the other has read all
    (folder / "seconds").write_text(f"{time.monotonic() - begun} {bytes_out()}")


def may_make_namespaces():
    """Root of a container may lack the right."""
    tools = all(map(shutil.which, ("ip", "tc", "nsenter", "unshare")))
    return tools and subprocess.run(["unshare", "--net", "ip", "link", "add", "lan", "type", "veth"]).returncode == 0


@pytest.mark.skipif(not may_make_namespaces(), reason="needs root and iproute2")
def test_two_machines_have_a_network_of_the_rate(tmp_path):
    own = os.readlink("/proc/self/ns/net")
    with two_machines(MBIT) as machines:
        mp.spawn(talk, (machines, tmp_path), nprocs=2)
    seconds, sent = map(float, (tmp_path / "seconds").read_text().split())
    assert SIZE < sent < 1.2 * SIZE
    rest = 8 * (SIZE - 256 * 1024) / (1e6 * MBIT)  # after the first burst
    assert 0.8 * rest < seconds < 10 * rest
    assert os.readlink("/proc/self/ns/net") == own


def test_processes_are_put_on_machines(monkeypatch):
    monkeypatch.delenv("NCCL_HOSTID", raising=False)
    assert put_on_machine(3, 4, 1) == 0 and "NCCL_HOSTID" not in os.environ
    assert [put_on_machine(rank, 4, 2) for rank in range(4)] == [0, 0, 1, 1]
    assert os.environ["NCCL_HOSTID"] == "machine 1"
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    assert links(2) == {"machines": 2, "nccl": {"NCCL_P2P_DISABLE": "1"}}
    monkeypatch.delenv("NCCL_P2P_DISABLE")
    assert links(1) == {}
