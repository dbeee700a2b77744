"""Strategies for several processes as nemo_run factories of their names."""

from __future__ import annotations

import nemo_run as run
from lightning.pytorch.strategies import Strategy

from nemo_lowprec.strategies import LowPrecisionDDPStrategy, LowPrecisionShardedStrategy

__all__ = ["lowprec_ddp", "lowprec_sharded"]


@run.cli.factory(target=Strategy)
def lowprec_ddp(bucket_cap_mb: float | None = None) -> run.Config[LowPrecisionDDPStrategy]:
    """Gradients averaged in the level's format, without torch's wrapper.

    Args:
        bucket_cap_mb: size of a bucket on the wire, MiB; None for the default.
    """
    return run.Config(LowPrecisionDDPStrategy, bucket_cap_mb=bucket_cap_mb)


@run.cli.factory(target=Strategy)
def lowprec_sharded(
    reshard_after_forward: bool = True,
    shard_size: int | None = None,
    save_distributed_checkpoint: bool = True,
    async_checkpoints: bool = False,
) -> run.Config[LowPrecisionShardedStrategy]:
    """Weights, masters, gradients and optimizer states sharded with FSDP2.

    Args:
        reshard_after_forward: whether weights are freed between forward and backward (ZeRO-3), or kept (ZeRO-2).
        shard_size: processes that hold one copy of the model among them; None for all.
        save_distributed_checkpoint: whether a checkpoint is a folder that every process writes a part of, or one file.
        async_checkpoints: whether checkpoints are written while training goes on.
    """
    return run.Config(
        LowPrecisionShardedStrategy,
        reshard_after_forward=reshard_after_forward,
        shard_size=shard_size,
        save_distributed_checkpoint=save_distributed_checkpoint,
        async_checkpoints=async_checkpoints,
    )
