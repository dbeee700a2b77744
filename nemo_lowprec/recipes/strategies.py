"""Strategies for several processes as nemo_run factories: each argument is one of the strategy's own."""

from __future__ import annotations

import nemo_run as run
from lightning.pytorch.strategies import Strategy

from nemo_lowprec.recipes.factories import factory
from nemo_lowprec.recipes.parsers import register_annotations
from nemo_lowprec.strategies import LowPrecisionDDPStrategy, LowPrecisionShardedStrategy, MegatronStrategy


@factory(Strategy)
def lowprec_ddp(bucket_cap_mb: float | None = None) -> run.Config[LowPrecisionDDPStrategy]:
    """Data-parallel training that averages gradients in the level's format, without torch's wrapper.

    Args:
        bucket_cap_mb: size of a bucket on the wire, MiB; None for the default.
    """
    return run.Config(LowPrecisionDDPStrategy, **locals())


@factory(Strategy)
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
        save_distributed_checkpoint: whether every process writes its part of a checkpoint folder, or rank 0 one file.
        async_checkpoints: whether checkpoints are written while training goes on.
    """
    return run.Config(LowPrecisionShardedStrategy, **locals())


@factory(Strategy)
def lowprec_megatron(
    tensor_model_parallel_size: int = 1,
    pipeline_model_parallel_size: int = 1,
    virtual_pipeline_model_parallel_size: int | None = None,
    context_parallel_size: int = 1,
    expert_model_parallel_size: int = 1,
    sequence_parallel: bool = False,
    overlap_grad_reduce: bool = True,
    overlap_param_gather: bool | None = None,
    bucket_size: int | None = None,
    checkpoint_form: str = "fully_reshardable",
) -> run.Config[MegatronStrategy]:
    """Megatron-core's engine: ``MegatronGPT`` at any of the parallel sizes, any other module data-parallel.

    Args:
        tensor_model_parallel_size: processes that share each layer's matrices.
        pipeline_model_parallel_size: stages of the pipeline.
        virtual_pipeline_model_parallel_size: parts that each process has of the layers, interleaved; None for one.
        context_parallel_size: processes that share each sequence.
        expert_model_parallel_size: processes that share the experts of a layer.
        sequence_parallel: whether tensor-parallel processes share the sequence outside of the matrices, too.
        overlap_grad_reduce: whether gradients are reduced while backward goes on.
        overlap_param_gather: whether weights are gathered while the next forward goes on; None: with a GPTModel.
        bucket_size: parameters of a bucket; None for Megatron-core's choice.
        checkpoint_form: ``fully_reshardable``, or ``dp_reshardable``: faster, for the same tensor and pipeline sizes.
    """
    return run.Config(MegatronStrategy, **locals())


register_annotations(LowPrecisionDDPStrategy, LowPrecisionShardedStrategy, MegatronStrategy)
