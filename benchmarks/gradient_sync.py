"""Gradients averaged over all GPUs of a machine: FP8 beside all_reduce of FP32 and BF16 and NCCL's own sum of float8.

    python -m benchmarks.gradient_sync
    NCCL_P2P_DISABLE=1 NCCL_SHM_DISABLE=1 python -m benchmarks.gradient_sync --out FILE  # over sockets
    NCCL_IB_DISABLE=1 python -m benchmarks.gradient_sync --machines 2 --out FILE  # four GPUs or more
    python -m benchmarks.gradient_sync --machines 2 --mbit 100 --size 1024 --count 4 --buckets 1 --out FILE  # a CPU

268 M gradients, as of 16 matrices of 4096 x 4096. A pass lets every process sleep on its GPU while the host queues the
work (in training it runs ahead of the GPU, too), then for the others, and measures from there to the end; a round
times one pass of each contestant, and rounds repeat. The time of a pass is that of the slowest process.

``fp8`` is what training runs: a backward pass hands out BF16 gradients, each is quantized and stored, and buckets are
sent as they fill. ``fp8, stored before`` is the same without quantization. ``nccl float8 sum`` adds up float8 in NCCL:
blocks need a scale that all processes share (an all_reduce of their exponents) and room for the sum; its time here is
that of the two collectives alone, without the kernels that it would need.

With ``--machines`` the processes are on as many machines by ``NCCL_HOSTID``: NCCL uses the network between them,
and training averages within each machine first. ``at once`` averages over all processes at once. ``--mbit`` makes two
machines of network namespaces (see ``slow_network``), with gloo where there is no GPU; ``mb_between`` is what a machine
then sends to the other, headers included. Without a GPU, times are the host's.

Errors are relative to the mean in FP64 of the BF16 gradients, as Euclidean norms.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

from benchmarks.processes import links, put_on_machine
from benchmarks.record import Record, arguments
from benchmarks.slow_network import ADDRESS, bytes_out, enter, two_machines
from nemo_lowprec.comm import GradientReducer
from nemo_lowprec.comm.topology import peer_access_is_off
from nemo_lowprec.formats import E4M3
from nemo_lowprec.formats.block_scale_128 import BLOCK, block_exponent, power
from nemo_lowprec.grads import Fp8Gradients
from nemo_lowprec.observers import Observers
from nemo_lowprec.report.traffic import Traffic

SLEEP = 60_000_000  # cycles, about 30 ms


class _HandOut(torch.autograd.Function):
    """Nothing forward; backward hands a given gradient out."""

    @staticmethod
    def forward(ctx: Any, param: Tensor, gradients: list[Tensor]) -> Tensor:
        ctx.gradients = gradients
        return torch.zeros((), device=param.device)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        return ctx.gradients.pop(), None  # nobody else holds it: autograd would make a copy


class Stored:
    """Parameters whose gradients are stored in FP8 and averaged while backward goes on.

    Args:
        collectives: whether NCCL's collectives are used where GPUs reach each other's memory.
        at_once: whether all processes average at once where there are several machines.

    Attributes:
        observers: the messages of all contestants are announced to them.
    """

    observers = Observers()

    def __init__(
        self, gradients: list[Tensor], bucket_bytes: int, collectives: bool = False, at_once: bool = False
    ) -> None:  # fmt: skip
        self.gradients = gradients
        # Of no size in memory: nothing reads the weights.
        self.params = [nn.Parameter(torch.zeros((), device=g.device).expand(g.shape)) for g in gradients]
        for param in self.params:
            param.grad_dtype = None
        self.hooks = Fp8Gradients()
        self.hooks.cover(self.params)
        self.reducer = GradientReducer(
            self.params, None, lambda _: torch.float8_e4m3fn, bucket_bytes, observers=self.observers
        )
        if collectives:
            self.reducer._peer_memory = lambda *_: None  # type: ignore[method-assign]
        if at_once:
            self.reducer._machines = None
        self.prepare()
        self.backward()  # the first pass learns

    def prepare(self) -> None:
        self.losses = []
        for param, gradient in zip(self.params, self.gradients, strict=True):
            param.grad = None
            self.losses.append(_HandOut.apply(param, [gradient.clone()]))
        self.ones = [torch.ones_like(loss) for loss in self.losses]

    def backward(self) -> None:
        self.reducer.begin()
        torch.autograd.backward(self.losses, self.ones)
        self.reducer.finish()

    def reduce(self) -> None:
        self.reducer.reduce()

    def result(self) -> list[Tensor]:
        return [p.grad.dequantize() for p in self.params]  # type: ignore[union-attr]


def nccl_sum(gradients: list[Tensor]) -> list[Tensor]:
    """Means by a sum of float8 in NCCL, with exponents that all processes share and room for the sum."""
    world = dist.get_world_size()
    means = []
    for gradient in gradients:
        blocks = gradient.float().view(-1, BLOCK)
        exponent = block_exponent(blocks.abs().amax(1), E4M3).int() + (world - 1).bit_length()
        dist.all_reduce(exponent, dist.ReduceOp.MAX)
        data = (blocks * power(254 - exponent)[:, None]).to(torch.float8_e4m3fn)
        dist.all_reduce(data)
        means.append((data.float() * power(exponent)[:, None] / world).view(gradient.shape))
    return means


def error(got: list[Tensor], want: list[Tensor]) -> float:
    distance = sum(float((g.double() - w).square().sum()) for g, w in zip(got, want, strict=True))
    return (distance / sum(float(w.square().sum()) for w in want)) ** 0.5


def milliseconds(work: Callable[[], None], prepare: Callable[[], None], device: torch.device) -> float:
    """Of one pass, on the slowest process."""
    prepare()
    dist.barrier()
    if device.type == "cpu":
        begun = time.perf_counter()
        work()
        took = torch.tensor(1e3 * (time.perf_counter() - begun), dtype=torch.float32)
        dist.all_reduce(took, dist.ReduceOp.MAX)
        return float(took)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    together = torch.zeros(1, device=device)
    torch.cuda.synchronize()
    torch.cuda._sleep(SLEEP)
    dist.all_reduce(together)  # clocks differ, and a GPU that wakes before the others would wait in what is timed
    start.record()
    work()
    end.record()
    torch.cuda.synchronize()
    worst = torch.tensor(start.elapsed_time(end), device=device)
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return float(worst)


def place(rank: int, world: int, args: argparse.Namespace, machines: list[int]) -> None:
    """Put this process on its machine, of ``args.machines``; ``machines`` are those of ``two_machines``, if any."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(args.port))
    machine = put_on_machine(rank, world, args.machines)
    if machines:
        os.environ["MASTER_ADDR"] = ADDRESS.format(1)
        enter(machines[machine])


def run(rank: int, world: int, args: argparse.Namespace, machines: list[int]) -> None:
    cuda = torch.cuda.is_available()
    place(rank, world, args, machines)
    device = torch.device("cuda", rank % torch.cuda.device_count()) if cuda else torch.device("cpu")
    gpus = min(world, torch.cuda.device_count()) if cuda else 0
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo", rank=rank, world_size=world)
    record = Record(args.out) if rank == 0 else None

    generator = torch.Generator(device).manual_seed(rank)
    shape = (args.size, args.size)
    # Magnitudes that differ by a factor of a hundred between rows, as gradients' do.
    spread = torch.logspace(-4, -2, args.size, device=device)[:, None]
    gradients = [
        (torch.randn(shape, generator=generator, device=device) * spread).bfloat16() for _ in range(args.count)
    ]
    want = []
    for gradient in gradients:
        total = gradient.double()
        dist.all_reduce(total)
        want.append(total / world)

    flat = {d: torch.cat([g.flatten().to(d) for g in gradients]) for d in (torch.float32, torch.bfloat16)}
    bytes_8 = torch.zeros(flat[torch.float32].numel(), dtype=torch.uint8, device=device)
    exponents = torch.zeros(bytes_8.numel() // BLOCK, dtype=torch.uint8, device=device)
    stored = {f"buckets of {mib} MiB": Stored(gradients, mib * 2**20) for mib in args.buckets}
    if cuda and not peer_access_is_off():
        for mib in args.buckets:
            stored[f"by collectives, buckets of {mib} MiB"] = Stored(gradients, mib * 2**20, collectives=True)

    if args.machines > 1:
        for mib in args.buckets:
            stored[f"at once, buckets of {mib} MiB"] = Stored(gradients, mib * 2**20, at_once=True)

    mean = dist.ReduceOp.AVG if cuda else dist.ReduceOp.SUM

    def float8_sum() -> None:
        dist.all_reduce(exponents, dist.ReduceOp.MAX)
        dist.all_reduce(bytes_8.view(torch.float8_e4m3fn))

    def nothing() -> None:
        pass

    Contestant = tuple[Callable[[], None], Callable[[], None], Callable[[], list[Tensor]] | None]
    contestants: dict[str, Contestant] = {
        "fp32 all_reduce": (nothing, lambda: dist.all_reduce(flat[torch.float32], mean), None),
        "bf16 all_reduce": (nothing, lambda: dist.all_reduce(flat[torch.bfloat16], mean), lambda: _bf16(gradients)),
    }
    if cuda:
        contestants["nccl float8 sum"] = (nothing, float8_sum, lambda: nccl_sum(gradients))
    for name, one in stored.items():
        contestants[f"fp8, {name}"] = (one.prepare, one.backward, one.result)
        contestants[f"fp8, stored before, {name}"] = (nothing, one.reduce, None)

    times: dict[str, list[float]] = {name: [] for name in contestants}
    for round_ in range(args.rounds + 3):
        for name, (prepare, work, _) in contestants.items():
            elapsed = milliseconds(work, prepare, device)
            if round_ >= 3:
                times[name].append(elapsed)
    for name, (prepare, work, result) in contestants.items():
        prepare()
        dist.barrier()
        before = bytes_out() if machines else 0
        with Traffic(observers=Stored.observers) as traffic:
            work()
        figures: dict[str, Any] = {"bytes_sent": sum(s.bytes for s in traffic.sent), "messages": len(traffic.sent)}
        if machines:
            dist.barrier()
            figures["mb_between"] = round((bytes_out() - before) / 1e6, 3)
        if result is not None:
            figures["error"] = error(result(), want)
        middle = statistics.median(times[name])
        figures |= {"ms": middle, "ms_min": min(times[name]), "ms_max": max(times[name])}
        figures["of_bf16"] = middle / statistics.median(times["bf16 all_reduce"])
        figures |= links(args.machines)
        if args.mbit is not None:
            figures["mbit"] = args.mbit
        if record is not None:
            figures = {"elements": bytes_8.numel()} | ({"processes": world} if world != gpus else {}) | figures
            record.add(benchmark="gradient_sync", contestant=name, gpus=gpus, **figures)
    dist.destroy_process_group()


def _bf16(gradients: list[Tensor]) -> list[Tensor]:
    means = []
    for gradient in gradients:
        mean = gradient / dist.get_world_size()
        dist.all_reduce(mean)
        means.append(mean)
    return means


def main() -> None:
    parser = arguments(__doc__ or "", "gradient_sync_h200.jsonl")
    parser.add_argument("--size", type=int, default=4096)
    parser.add_argument("--count", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--buckets", type=int, nargs="+", default=[16, 32, 64], help="MiB")
    parser.add_argument("--machines", type=int, default=1)
    parser.add_argument("--processes", type=int, help="by default one a GPU, or two on each machine of a CPU")
    parser.add_argument("--mbit", type=int, help="rate of a network between two machines; needs root")
    parser.add_argument("--port", type=int, default=29511)
    args = parser.parse_args()
    if args.mbit is not None and args.machines != 2:
        parser.error("--mbit is for --machines 2")
    world = args.processes or (torch.cuda.device_count() if torch.cuda.is_available() else 2 * args.machines)
    with ExitStack() as stack:
        machines = [] if args.mbit is None else stack.enter_context(two_machines(args.mbit))
        mp.spawn(run, (world, args, machines), nprocs=world)


if __name__ == "__main__":
    main()
