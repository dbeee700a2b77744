"""FP8 gradient buffers for Megatron-core's DistributedDataParallel, and their reduce-scatter in FP8.

Megatron adds each gradient to its parameter's ``main_grad``, a slice of one contiguous buffer. The buffer is cut into
buckets, and each bucket into equal shards, one a process. The FP8 buffer holds the same elements in E4M3 with an
exponent for every 128 elements (``formats.block_scale_128``): 1.01 bytes an element in place of 2 or 4. A bucket is
sent as it is stored, by an all-to-all; each process sums its shard in FP32 and stores the mean in FP8.

``_Fp8BucketGroup`` sends the buckets where Megatron would call its ``reduce_scatter_with_fp32_accumulation``. Megatron
calls that function while NCCL operations are being coalesced, and a coalesced operation records no end to wait for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import param_and_grad_buffer as seam
from torch import Tensor

from nemo_lowprec.comm.wire import Messages, mean_of_messages
from nemo_lowprec.compat.distributed import reduce_scatter_single
from nemo_lowprec.compat.megatron import BucketGroup
from nemo_lowprec.formats import E4M3
from nemo_lowprec.formats.block_scale_128 import BLOCK, UNIT
from nemo_lowprec.observers import NOBODY, Observers
from nemo_lowprec.tensors import GradientTensor


class _WithoutFactor(GradientTensor):
    """Multiplies the stored values at once: the optimizer reads other views of the buffer, which lack the factor."""

    @classmethod
    def scale(cls, grads: Sequence[GradientTensor], change: Callable[..., None], by: Any) -> None:
        for grad in grads:
            values = grad.dequantize()
            change([values], by)
            grad.quantize_(values)


class MainGradient(_WithoutFactor):
    """A parameter's slice of an FP8 buffer. The first gradient after ``zero_`` is stored, and not added to zeros.

    Attributes:
        is_empty: whether no gradient has been added since ``zero_``; the stored values are then an earlier step's.
        weight: factor of the mean over the processes that hold the parameter: Megatron's ``gradient_scaling_factor``,
            as experts are on fewer processes than the mean counts.
    """

    is_empty = False
    weight: float = 1.0

    def add_(self, other: Tensor, *, alpha: float = 1.0) -> GradientTensor:  # type: ignore[override]
        """Add a gradient of the parameter's shape to this flat slice."""
        return self.accumulate_(other.reshape(-1), alpha)

    def accumulate_(self, values: Tensor, alpha: float = 1.0) -> GradientTensor:
        if self.is_empty:
            self.is_empty = False
            return self.quantize_(values if alpha == 1.0 else alpha * values.float())
        return super().accumulate_(values, alpha)


class _Buffer(_WithoutFactor):
    """A whole FP8 buffer. ``zero_`` marks the members empty; ``_exchange`` zeroes members that are still empty."""

    members: list[MainGradient]

    def zero_(self) -> Any:  # type: ignore[override]
        for member in self.members:
            member.is_empty = True
        return self


def hold_in_fp8(ddp: Any, observers: Observers = NOBODY) -> None:
    """Replace the gradient buffers of the matrices of a wrapped chunk by FP8 buffers.

    Args:
        ddp: Megatron's DistributedDataParallel, freshly built, with ``average_in_collective`` and
            ``pad_buckets_for_high_nccl_busbw`` in its config.
        observers: are told of the means of gradients.

    Raises:
        ValueError: the number of a matrix's elements is no multiple of 128.
    """
    names = {id(p): name for name, p in ddp.module.named_parameters()}
    for buffer in (*ddp.buffers, *ddp.expert_parallel_buffers):
        if buffer.grad_dtype == torch.float32:  # the buffer of the vectors
            continue
        for param in buffer.params:
            if param.numel() % BLOCK:
                raise ValueError(
                    f"{names[id(param)]} has {param.numel()} elements on each process, and FP8 gradients are stored in "
                    f"blocks of {BLOCK}. Use sizes of which it is a multiple, or bf16_with_fp8_mixed."
                )
        _replace(buffer)
    for groups in (ddp.bucket_groups, ddp.expert_parallel_bucket_groups):
        before = None
        for group in groups:
            group.__class__, group.observers = _Fp8BucketGroup, observers
            group.drains, before = before, group
            for index, bucket in enumerate(group.buckets):
                if isinstance(bucket.grad_data, GradientTensor):
                    whole, world = bucket.grad_data, group.intra_distributed_optimizer_instance_size
                    size = whole.numel() // world
                    shards = [part_of_gradient(whole, rank * size, (rank + 1) * size) for rank in range(world)]
                    group.cached_grad_buffer_shard_list[index] = shards


def _replace(buffer: Any) -> None:
    device, size = buffer.grad_data.device, buffer.numel
    for param in buffer.params:
        param.main_grad = None
    buffer.grad_data = None
    for bucket in buffer.buckets:
        bucket.grad_data = None
    data = torch.zeros(size, dtype=E4M3.dtype, device=device)
    exponent = torch.full((1, size // BLOCK), UNIT, dtype=torch.uint8, device=device)
    flags = torch.zeros(len(buffer.params), device=device, dtype=torch.float32)
    one = torch.ones(1, device=device, dtype=torch.float32)
    for index, param in enumerate(buffer.params):
        start, end = buffer.param_index_map[param][:2]
        blocks = exponent[:, start // BLOCK : end // BLOCK]
        param.main_grad = MainGradient(data[start:end], blocks, one, flags[index : index + 1])
        param.main_grad.weight = buffer.gradient_scaling_factor
    buffer.grad_data = whole = _Buffer(data, exponent, one, flags)
    whole.members = [param.main_grad for param in buffer.params]
    for bucket in buffer.buckets:
        start, end = buffer.bucket_indices[bucket.bucket_id]
        bucket.grad_data = part_of_gradient(whole, start, end)
        bucket.grad_data.members = [p.main_grad for p in bucket.params_list]


def part_of_gradient(gradient: GradientTensor, start: int, end: int) -> GradientTensor:
    """A view of elements ``[start, end)`` of a flattened gradient; both bounds are multiples of 128."""
    assert start % BLOCK == 0 and end % BLOCK == 0, (start, end)
    data = gradient.data_blocks.view(-1)[start:end]
    exponent = gradient.exponent.view(1, -1)[:, start // BLOCK : end // BLOCK]
    return GradientTensor(data, exponent, gradient.factor, gradient.nonfinite)


class _Fp8BucketGroup(BucketGroup):
    """Megatron's group of buckets, which averages FP8 buckets in FP8 and the others in their own dtype."""

    drains: Any = None  # the bucket group that backward sends before this group
    observers: Observers
    grad_reduce_handle: Any

    def start_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        if self.is_first_batch and self.grad_reduce_handle is not None:
            return  # as in Megatron-core: the first batch's gradients have been sent
        assert self.grad_reduce_handle is None and not force_all_reduce
        if self.drains is not None and self.drains.grad_reduce_handle is not None:
            # The messages of a group take as much memory as its gradients.
            self.drains.grad_reduce_handle.wait()
        works = []
        for bucket, shards in zip(self.buckets, self.cached_grad_buffer_shard_list, strict=True):
            group = self.intra_distributed_optimizer_instance_group
            if isinstance(bucket.grad_data, GradientTensor):
                works.append(_exchange(bucket.grad_data, shards[group.rank()], group, self.observers))
            else:
                if bucket.gradient_scaling_factor != 1:
                    bucket.grad_data *= bucket.gradient_scaling_factor
                out = seam.shard_buffer(bucket.grad_data, group.size())[group.rank()]
                work = reduce_scatter_single(out, bucket.grad_data, dist.ReduceOp.AVG, group, async_op=True)
                works.append(work)
        handle = _Works(works)
        if self.ddp_config.overlap_grad_reduce:
            self.grad_reduce_handle = handle
        else:
            handle.wait()


class _Works:
    """Handles of several collectives; the first ``wait`` waits for all of them."""

    def __init__(self, works: list[Any]) -> None:
        self._works = works

    def wait(self) -> None:
        works, self._works = self._works, []
        for work in works:
            work.wait()


@torch.no_grad()
def _exchange(
    bucket: GradientTensor, out: GradientTensor, group: dist.ProcessGroup, observers: Observers = NOBODY
) -> Any:
    """Average a bucket over ``group``, and store each process's shard of the mean in ``out`` when the handle is waited.

    Args:
        bucket: FP8 gradients of a bucket, the same elements on all processes.
        out: this process's shard of ``bucket``.
        observers: are told of the mean.
    """
    for member in bucket.members:  # type: ignore[attr-defined]
        if member.is_empty:
            GradientTensor.zero_(member)
            member.is_empty = False
    world = group.size()
    if world == 1:
        return _Works([])
    exponent = bucket.exponent.view(world, -1)
    messages = torch.cat([bucket.data_blocks.view(torch.uint8).view(world, -1), exponent], dim=1)
    received = torch.empty_like(messages)
    work = dist.all_to_all_single(received, messages, group=group, async_op=True)
    layout = Messages((), (), exponent.shape[1], world)
    return _Received(work, messages, received, layout, out, observers)


class _Received:
    """The handle of an all-to-all of gradients; ``wait`` stores the mean of the received messages."""

    def __init__(
        self,
        work: Any,
        sent: Tensor,
        received: Tensor,
        layout: Messages,
        out: GradientTensor,
        observers: Observers,
    ) -> None:
        self._work, self._sent, self._received, self._layout, self._out = work, sent, received, layout, out
        self._observers = observers

    @torch.no_grad()
    def wait(self) -> None:
        self._work.wait()
        mean = torch.empty(self._layout.bytes, dtype=torch.uint8, device=self._received.device)
        mean_of_messages(self._received, self._layout, mean, observers=self._observers)
        data, exponent = self._layout.parts(mean.view(1, -1))
        self._out.data_blocks.view(torch.uint8).copy_(data.reshape(-1))
        self._out.exponent.copy_(exponent)
