"""``strategy="lowprec_ddp"``: data parallelism without torch's DistributedDataParallel and its buckets."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from typing_extensions import override

from nemo_lowprec.arguments import checked
from nemo_lowprec.compat.lightning import broadcast_states
from nemo_lowprec.plugins.precision import LowPrecision


class LowPrecisionDDPStrategy(DDPStrategy):
    """Every process has the whole model; gradients are averaged in the level's format while backward goes on.

    The strategy trains as ``strategy="ddp"`` does, without torch's wrapper around the model. At ``fp16_amp`` and
    ``te_fp8`` this saves DDP's buckets, 4 bytes a parameter.

    Args:
        bucket_cap_mb: size of a gradient bucket that is sent, MiB.
        broadcast_buffers: whether each training step broadcasts the first process's buffers (BatchNorm's statistics).
        options: options of Lightning's ``DDPStrategy``, without those of torch's DistributedDataParallel.

    Raises:
        TypeError: an option of torch's DistributedDataParallel.
    """

    strategy_name = "lowprec_ddp"

    @partial(checked, also=DDPStrategy.__init__)
    def __init__(self, bucket_cap_mb: float | None = None, broadcast_buffers: bool = True, **options: Any) -> None:
        super().__init__(**options)
        if self._ddp_kwargs:
            raise TypeError(
                f"lowprec_ddp has no wrapper of torch's, whose options these are: {', '.join(self._ddp_kwargs)}. "
                "Leave them out, or use strategy='ddp'."
            )
        self._ddp_kwargs = {} if bucket_cap_mb is None else {"bucket_cap_mb": bucket_cap_mb}
        self._broadcast_buffers = broadcast_buffers
        self.require_backward_grad_sync = True

    def agreement(self) -> dict[str, Any]:
        """Settings that must be the same on all processes."""
        return {**self._ddp_kwargs, "broadcast_buffers": self._broadcast_buffers}

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        if not isinstance(self.precision_plugin, LowPrecision):
            raise ValueError(
                "lowprec_ddp needs a level of nemo_lowprec among the Trainer's plugins. Use strategy='ddp'."
            )
        super().setup(trainer)

    @override
    def configure_ddp(self) -> None:
        assert self.model is not None
        broadcast_states(self.model)

    @override
    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        self.require_backward_grad_sync = False
        try:
            yield
        finally:
            self.require_backward_grad_sync = True

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if self._broadcast_buffers and self.require_backward_grad_sync and self.world_size > 1:
            assert self.model is not None
            for buffer in self.model.buffers():
                dist.broadcast(buffer, 0)
        return super().training_step(*args, **kwargs)
