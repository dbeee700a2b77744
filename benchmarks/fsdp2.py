"""The benchmarks' model sharded with FSDP2 by its user, as Lightning's and torchao's documents have it."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from benchmarks.llama import Llama

__all__ = ["Float8Gathered", "HalfGathered", "Sharded"]


class Sharded(Llama):
    """Gathered and reduced in the dtype of the weights."""

    policy = MixedPrecisionPolicy()

    def configure_model(self) -> None:
        mesh = self.device_mesh["data_parallel"]  # type: ignore[index]
        for layer in self.model.model.layers:
            fully_shard(layer, mesh=mesh, mp_policy=self.policy)
        fully_shard(self.model, mesh=mesh, mp_policy=self.policy)


class HalfGathered(Sharded):
    """FP32 shards, gathered in BF16 and reduced in FP32."""

    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)


class Float8Gathered(HalfGathered):
    """torchao: linear weights gathered in FP8, with one scale for each, found after each step; layers compiled."""

    def configure_model(self) -> None:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        convert_to_float8_training(
            self.model,
            config=Float8LinearConfig(enable_fsdp_float8_all_gather=True),
            module_filter_fn=lambda m, name: "lm_head" not in name,
        )
        for layer in self.model.model.layers:
            layer.compile()
        super().configure_model()

    def on_train_batch_end(self, *_: Any) -> None:
        from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

        precompute_float8_dynamic_scale_for_fsdp(self.model)
