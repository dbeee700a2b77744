"""The processes of a plan, and how a strategy spreads a model over them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from nemo_lowprec.arguments import AtLeast1, check_value
from nemo_lowprec.comm.topology import peer_access_is_off
from nemo_lowprec.megatron import ParallelLayout

MEGATRON = "lowprec_megatron"
# Megatron-core's names of the arguments of ParallelLayout, in its order, with the defaults.
_SIZES: dict[str, Any] = {**ParallelLayout().sizes(), "sequence_parallel": False}
STRATEGIES: dict[str, tuple[str, ...]] = {
    "single_device": (),
    "ddp": ("bucket_cap_mb",),
    "lowprec_ddp": ("bucket_cap_mb",),
    "lowprec_sharded": ("reshard_after_forward", "shard_size"),
    MEGATRON: (*_SIZES, "overlap_grad_reduce", "bucket_size"),
}


@dataclass(frozen=True)
class Layout:
    """Processes and a strategy, checked.

    Attributes:
        nodes, gpus: machines, and processes of each.
        strategy: a key of ``STRATEGIES``.
        accelerator: ``gpu`` or ``cpu``.
        micro_batches: backward passes of a step.
        reshard_after_forward: whether ``lowprec_sharded`` frees gathered weights between forward and backward.
        shard_size: processes that hold one copy of the model among them; None for all.
        bucket_cap_mb: size of a bucket of gradients, MiB; None for the default.
        sizes: Megatron-core's parallel sizes.
        overlap_grad_reduce: whether Megatron-core reduces gradients in buckets.
        bucket_size: parameters of a bucket of Megatron-core's; None for Megatron-core's choice.
    """

    nodes: int
    gpus: int
    strategy: str
    accelerator: str = "gpu"
    micro_batches: int = 1
    reshard_after_forward: bool = True
    shard_size: int | None = None
    bucket_cap_mb: float | None = None
    sizes: ParallelLayout = ParallelLayout()  # noqa: RUF009
    overlap_grad_reduce: bool = True
    bucket_size: int | None = None

    def __post_init__(self) -> None:
        for name in ("nodes", "gpus", "micro_batches"):
            check_value(name, getattr(self, name), AtLeast1)
        self.sizes.check_world(self.world)
        self.sizes.check_micro_batches(self.micro_batches, "A step")
        if self.sizes.expert > 1:
            raise ValueError("No plan for experts on Megatron-core: leave expert_model_parallel_size out.")
        if self.accelerator not in ("gpu", "cpu"):
            raise ValueError(f"accelerator={self.accelerator!r} must be 'gpu' or 'cpu'.")
        if self.strategy == "single_device" and self.world > 1:
            raise ValueError(
                f"single_device is one process, and nodes={self.nodes} with gpus={self.gpus} are {self.world}. "
                f"Use one of: {', '.join(s for s in STRATEGIES if s != 'single_device')}."
            )
        check_value("reshard_after_forward", self.reshard_after_forward, bool)
        check_value("shard_size", self.shard_size, AtLeast1 | None)
        if self.world % self.shards:
            raise ValueError(f"shard_size={self.shard_size!r} must divide the number of processes, {self.world}.")
        if self.bucket_cap_mb is not None and not self.bucket_cap_mb > 0:
            raise ValueError(f"bucket_cap_mb={self.bucket_cap_mb!r} must be a positive number.")

    @classmethod
    def of(cls, nodes: int, gpus: int, strategy: str | None, options: dict[str, Any], **rest: Any) -> Layout:
        """The layout of a strategy with options of its own.

        Raises:
            ValueError: a bad value.
            TypeError: an option that the strategy does not take.
        """
        if strategy is None:
            strategy = "single_device" if nodes == gpus == 1 else "lowprec_sharded"
        if strategy not in STRATEGIES:
            raise ValueError(f"Unknown strategy {strategy!r}. Choose one of: {', '.join(STRATEGIES)}.")
        for name in options:
            if name not in STRATEGIES[strategy]:
                known = ", ".join(STRATEGIES[strategy]) or "no options"
                raise TypeError(f"{strategy} has no option {name!r} that a plan knows. It takes: {known}.")
        sizes = ParallelLayout(*(options.get(name, default) for name, default in _SIZES.items()))
        others = {name: value for name, value in options.items() if name not in _SIZES}
        return cls(nodes, gpus, strategy, sizes=sizes, **rest, **others)

    @property
    def world(self) -> int:
        """All processes."""
        return self.nodes * self.gpus

    @property
    def bucket_bytes(self) -> int | None:
        """Of a bucket of gradients; None for the default."""
        return None if self.bucket_cap_mb is None else int(self.bucket_cap_mb * 2**20)

    @property
    def is_sharded(self) -> bool:
        """Whether each process holds a part of the model."""
        return self.strategy == "lowprec_sharded"

    @property
    def shards(self) -> int:
        """Processes that hold one copy of the model among them."""
        return (self.shard_size or self.world) if self.is_sharded else self.sizes.tensor * self.sizes.pipeline

    @property
    def replicas(self) -> int:
        """Copies of the model."""
        return self.world // self.shards

    @property
    def averaged_machines(self) -> int:
        """Machines that average gradients in FP8 each by itself first (see ``Machines``); 1 where none does."""
        return self.nodes if self.gpus > 1 else 1

    def peers(self, size: int) -> bool:
        """Whether groups of ``size`` processes copy messages between their memories (see ``PeerMemory``)."""
        on_one_node = size <= self.gpus and self.gpus % size == 0
        return self.accelerator == "gpu" and size > 1 and on_one_node and not peer_access_is_off()

    def __str__(self) -> str:
        if self.strategy == "single_device":
            return "one process, single_device"
        sizes, text = self.sizes, f"{self.nodes} × {self.gpus} processes, {self.strategy}"
        if self.is_sharded:
            text += ", ZeRO-3" if self.reshard_after_forward else ", ZeRO-2"
            text += f", {self.replicas} copies of {self.shards} shards" if self.replicas > 1 else ""
        names = {"TP": sizes.tensor, "PP": sizes.pipeline, "CP": sizes.context}
        text += "".join(f", {name} {size}" for name, size in names.items() if size > 1)
        text += ", sequence parallel" if sizes.sequence_parallel else ""
        text += f", {sizes.virtual_pipeline} parts a stage" if sizes.virtual_pipeline else ""
        return text + (f", {self.micro_batches} micro-batches" if self.micro_batches > 1 else "")
