"""The plan of a process that has the whole model: one device, ``ddp`` and ``lowprec_ddp``."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from nemo_lowprec.comm.planned import Message, buffer_bytes, peer_bytes, plan_buckets
from nemo_lowprec.engine import Engine
from nemo_lowprec.report.plan.columns import AT_MOST, KEPT, Beside, PlannedColumn, columns_of_chart
from nemo_lowprec.report.plan.layout import Layout
from nemo_lowprec.report.plan.on_meta import planned_parts
from nemo_lowprec.report.tensor_storage import as_stored
from nemo_lowprec.tensors import GradientTensor
from nemo_lowprec.weights import master_of

UNSCALED = "Unscaled gradients"


def plan_whole(
    model: nn.Module, engine: Engine, layout: Layout
) -> tuple[list[PlannedColumn], list[Message], Beside]:  # fmt: skip
    """Columns, messages, and bytes beside activations, of a model that was settled on the meta device."""
    weights, masters, gradients, states = columns_of_chart()
    largest: Tensor | None = None
    for part in planned_parts(model, engine):
        for param in part.params:
            weights.add(part.name, param)
            masters.add(part.name, master_of(param) if param.requires_grad else None)
            if not param.requires_grad:
                continue
            gradient = _gradient(param, engine)
            states.add_states(part.name, param, param, engine.level)
            if not engine.options.low_bit.gradient_release:
                gradients.add(part.name, gradient)
            elif largest is None or gradient.numel() > largest.numel():
                largest = gradient
    if largest is not None:  # gradients are released one by one
        gradients.add("all", largest)
        gradients.when = AT_MOST
    messages, buffers, peers = _averaging(model, engine, layout)
    columns = [weights, masters, gradients, *_unscaled(gradients, engine), states, buffers]
    return columns, messages, Beside(peers, peers, buffers.bytes if buffers.when == AT_MOST else 0)


def _unscaled(gradients: PlannedColumn, engine: Engine) -> list[PlannedColumn]:
    """The bytes that unscaling adds: it widens FP16 gradients to FP32, until they are zeroed."""
    if not engine.level.has_loss_scale or engine.level.weight_grad != "fp16":
        return []
    wider = PlannedColumn(UNSCALED, AT_MOST)
    for part, size in gradients.parts.items():
        wider.add_bytes(part, torch.float32, size)
    return [wider]


def gradient_of(param: nn.Parameter, engine: Engine) -> int:
    """Bytes in which a parameter's gradient is stored."""
    return as_stored(_gradient(param, engine)).bytes


def _gradient(param: nn.Parameter, engine: Engine) -> Tensor:
    if engine.columns.weights.is_matrix(param):
        return GradientTensor.empty(param)
    return torch.empty(param.shape, dtype=param.grad_dtype or param.dtype, device="meta")


def _averaging(model: nn.Module, engine: Engine, layout: Layout) -> tuple[list[Message], PlannedColumn, int]:
    """Messages of gradients, the column of the messages' buffers, and bytes of the buffers that stay in forward."""
    held = PlannedColumn("Communication buffers", AT_MOST)
    messages: list[Message] = []
    peers = 0
    trained = [p for p in model.parameters() if p.requires_grad]
    if layout.world > 1 and layout.strategy == "ddp" and not engine.level.has_half_weights:
        # torch's own: as many bytes as gradients, for all of training.
        held.when = KEPT
        for dtype in dict.fromkeys(p.dtype for p in trained):
            size = sum(p.nbytes for p in trained if p.dtype == dtype)
            held.add_bytes("all", dtype, size)
            messages.append(Message("all_reduce", dtype, size, layout.world))
    elif layout.world > 1:
        engine.columns.comm.check_averaging()
        buckets = plan_buckets(
            trained, engine.columns.comm.wire, layout.world, layout.bucket_bytes, peers=layout.peers(layout.world)
        )
        messages = [m for bucket in buckets for m in bucket.messages]
        held.add_bytes("all", _widest(messages), buffer_bytes(buckets, layout.world))
        peers = peer_bytes(buckets, layout.world)
    return messages, held, peers


def _widest(messages: list[Message]) -> torch.dtype:
    """The dtype that most of the bytes are sent in."""
    return max(messages, key=lambda m: m.bytes).dtype
