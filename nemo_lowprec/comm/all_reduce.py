"""Average gradients over processes; those stored in FP8 travel in FP8.

Quantize, exchange (all_to_all), sum in FP32, quantize, gather (all_gather): one rounding each way, no patched NCCL, no
exchange of amaxes and no headroom factor. Bytes travel as uint8, since gloo knows no float8.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from nemo_lowprec.formats import E4M3, BlockTensor, GradientTensor, StoredTensor
from nemo_lowprec.formats.row_blocks import BLOCK, UNIT, block_grid, dequantize_rows

__all__ = ["all_reduce_mean", "average_gradients", "broadcast_weights"]

_BUCKET = 2**22  # blocks of 128 elements: 512 MiB


@torch.no_grad()
def average_gradients(params: Iterable[Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Make the gradient of every parameter the mean over the processes of ``group``, and equal on all of them.

    A parameter that has a gradient on some processes only counts as zero on the others; one without any stays so.

    Args:
        params: the same parameters in the same order on every process.
    """
    chosen = [p for p in params if p.requires_grad]
    if not dist.is_initialized() or dist.get_world_size(group) == 1 or not chosen:
        return
    there = torch.tensor([p.grad is not None for p in chosen], dtype=torch.uint8, device=chosen[0].device)
    dist.all_reduce(there, dist.ReduceOp.MAX, group)
    used = [p for p, flag in zip(chosen, there.tolist(), strict=True) if flag]
    for param in used:
        if param.grad is None:
            zeros = torch.zeros(param.shape, device=param.device)
            param.grad = GradientTensor.from_float(zeros) if param.dim() > 1 and param.grad_dtype is None else zeros
    stored = [p.grad for p in used if isinstance(p.grad, GradientTensor)]
    all_reduce_mean(stored, group)
    plain = [p.grad for p in used if p.grad is not None and not isinstance(p.grad, GradientTensor)]
    if plain:
        flat = torch.cat([g.float().reshape(-1) for g in plain])
        dist.all_reduce(flat, group=group)
        flat /= dist.get_world_size(group)
        for grad, mean in zip(plain, flat.split([g.numel() for g in plain]), strict=True):
            grad.copy_(mean.view(grad.shape))


@torch.no_grad()
def all_reduce_mean(gradients: Sequence[GradientTensor], group: dist.ProcessGroup | None = None) -> None:
    """Average FP8 gradients in place; about 2 bytes an element travel from and to each process."""
    for bucket in _buckets(gradients):
        world = dist.get_world_size(group)
        for gradient in bucket:
            gradient.fold_()
        data, exponent = _pack(bucket, world)
        chunk = exponent.numel() // world

        theirs, their_exponents = torch.empty_like(data), torch.empty_like(exponent)
        dist.all_to_all_single(theirs, data, group=group)
        dist.all_to_all_single(their_exponents, exponent, group=group)
        values = dequantize_rows(theirs.view(torch.float8_e4m3fn).view(-1, BLOCK), their_exponents.view(-1, 1))
        mean = BlockTensor.from_float(values.view(world, chunk, BLOCK).sum(0) / world, E4M3)

        dist.all_gather_into_tensor(data, mean.data_blocks.view(torch.uint8).reshape(-1), group=group)
        dist.all_gather_into_tensor(exponent, mean.exponent.reshape(-1), group=group)
        _unpack(bucket, data, exponent)


def _buckets(gradients: Sequence[GradientTensor]) -> Iterator[list[GradientTensor]]:
    bucket: list[GradientTensor] = []
    blocks = 0
    for gradient in gradients:
        if bucket and blocks + gradient.exponent.numel() > _BUCKET:
            yield bucket
            bucket, blocks = [], 0
        bucket.append(gradient)
        blocks += gradient.exponent.numel()
    if bucket:
        yield bucket


def _pack(bucket: list[GradientTensor], world: int) -> tuple[Tensor, Tensor]:
    """Bytes and exponents of whole blocks, as many as divide by ``world``."""
    data, exponents = [], []
    for gradient in bucket:
        rows, cols, per_row = block_grid(gradient.shape)
        padded = F.pad(gradient.data_blocks.view(torch.uint8).view(rows, cols), (0, per_row * BLOCK - cols))
        data.append(padded.reshape(-1))
        exponents.append(gradient.exponent.reshape(-1))
    missing = -sum(e.numel() for e in exponents) % world
    device = data[0].device
    data.append(torch.zeros(missing * BLOCK, dtype=torch.uint8, device=device))
    exponents.append(torch.full((missing,), UNIT, dtype=torch.uint8, device=device))
    return torch.cat(data), torch.cat(exponents)


def _unpack(bucket: list[GradientTensor], data: Tensor, exponent: Tensor) -> None:
    at = 0
    for gradient in bucket:
        rows, cols, per_row = block_grid(gradient.shape)
        blocks = rows * per_row
        mine = data[at * BLOCK : (at + blocks) * BLOCK].view(rows, per_row * BLOCK)[:, :cols]
        stored = gradient.data_blocks.view(torch.uint8)
        stored.copy_(mine.reshape(stored.shape))
        gradient.exponent.copy_(exponent[at : at + blocks].view(gradient.exponent.shape))
        gradient.nonfinite.copy_(((stored & 0x7F) == 0x7F).any().reshape(1))  # E4M3's NaN
        at += blocks


@torch.no_grad()
def broadcast_weights(params: Iterable[Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Give every process the weights (and masters) that the first one of ``group`` has."""
    source = dist.get_global_rank(group, 0) if group is not None else 0
    for param in params:
        for tensor in (param, getattr(param, "master_weight", None)):
            for part in tensor.parts() if isinstance(tensor, StoredTensor) else () if tensor is None else (tensor,):
                plain = part.detach()
                dist.broadcast(plain.view(torch.uint8) if plain.element_size() == 1 else plain, source, group)
