"""Refuses models in wrappers that own the parameters (FSDP1, DeepSpeed) or copy them (DataParallel)."""

from __future__ import annotations

from torch import nn

_DDP = "DistributedDataParallel after initialize, or a Trainer with strategy='ddp' or 'lowprec_ddp'"
_SHARDED = "a Trainer with strategy='lowprec_sharded', which shards in the level's formats"


def check_unwrapped(model: nn.Module) -> None:
    """Refuse a model whose parameters do not belong to its layers. Models sharded by ``fully_shard`` pass.

    Raises:
        ValueError: a module is wrapped in FSDP1, DataParallel or DeepSpeed, or a parameter is tensor-parallel.
    """
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
    from torch.distributed.tensor import DTensor

    for name, module in model.named_modules():
        what = f"{name or 'The model'} is wrapped in {type(module).__name__}"
        if isinstance(module, FullyShardedDataParallel):
            raise ValueError(
                f"{what} (FSDP1), whose flat parameter stays FP32 with its gradient and states. Use {_SHARDED}."
            )
        if isinstance(module, nn.DataParallel):
            raise ValueError(f"{what}, which computes with copies of the parameters. Use {_DDP}.")
        if type(module).__module__.partition(".")[0] == "deepspeed":
            raise ValueError(
                f"{what}, which has taken the parameters into buffers of its own. Leave DeepSpeed out, and use "
                f"{_SHARDED}."
            )
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        return
    for name, param in model.named_parameters():
        if isinstance(param, DTensor):
            raise ValueError(
                f"{name} is a DTensor, placed {param.placements}: tensor-parallel layers are not converted. Use "
                "MegatronStrategy(tensor_model_parallel_size=...), or leave parallelize_module out."
            )
