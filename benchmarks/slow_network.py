"""Two machines on one: network namespaces of Linux, and a network of a given rate between them.

Needs root and iproute2. Nothing outside of the two namespaces changes.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["ADDRESS", "bytes_out", "enter", "two_machines"]

ADDRESS = "10.9.0.{}"  # of machine 1 and 2
_LINK = "lan"
_NEW_NETWORK = 0x40000000  # CLONE_NEWNET


@contextmanager
def two_machines(mbit: int) -> Iterator[list[int]]:
    """Context of two machines, for ``enter``; each is held open by a process.

    Args:
        mbit: rate of the network in each direction, Mbit/s.

    Raises:
        OSError, subprocess.CalledProcessError: this user may not make network namespaces.
    """
    holders = [subprocess.Popen(["unshare", "--net", "sleep", "infinity"]) for _ in range(2)]
    try:
        first, second = machines = [holder.pid for holder in holders]
        own = os.readlink("/proc/self/ns/net")
        while any(os.readlink(f"/proc/{machine}/ns/net") == own for machine in machines):
            time.sleep(0.01)
        _run(first, f"ip link add {_LINK} type veth peer name {_LINK} netns {second}")
        for number, machine in enumerate(machines, start=1):
            _run(machine, "ip link set lo up")
            _run(machine, f"ip address add {ADDRESS.format(number)}/24 dev {_LINK}")
            _run(machine, f"ip link set {_LINK} up")
            _run(machine, f"tc qdisc add dev {_LINK} root tbf rate {mbit}mbit burst 256k latency 100ms")
        yield machines
    finally:
        for holder in holders:
            holder.kill()
            holder.wait()


def _run(machine: int, command: str) -> None:
    subprocess.run(["nsenter", "--target", str(machine), "--net", *command.split()], check=True)


def enter(machine: int) -> None:
    """Move this process onto ``machine``. gloo and NCCL then find other processes through its network."""
    library = ctypes.CDLL(None, use_errno=True)
    with open(f"/proc/{machine}/ns/net") as namespace:
        if library.setns(namespace.fileno(), _NEW_NETWORK):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    os.environ.update(GLOO_SOCKET_IFNAME=_LINK, NCCL_SOCKET_IFNAME=_LINK)


def bytes_out() -> int:
    """Bytes that this process's machine has sent to the other so far, headers included."""
    with open("/proc/self/net/dev") as file:
        counters = next(line for line in file if line.strip().startswith(f"{_LINK}:"))
    return int(counters.partition(":")[2].split()[8])
