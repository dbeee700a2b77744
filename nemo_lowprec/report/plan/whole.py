"""The plan of a process that has the whole model: one device, ``ddp`` and ``lowprec_ddp``."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from nemo_lowprec.comm.planned import Message, buffer_bytes, peer_bytes, plan_buckets
from nemo_lowprec.compat.tensors import storage_key
from nemo_lowprec.engine import Engine
from nemo_lowprec.report.parts import CONVERTED
from nemo_lowprec.report.plan.columns import ADAM, PlannedColumn, PlannedProcess, columns_of_chart
from nemo_lowprec.report.plan.kept_weights import kept_operands, parts_of_operand, parts_of_tensor
from nemo_lowprec.report.plan.layout import Layout
from nemo_lowprec.report.plan.on_gpu import PlannedBackend
from nemo_lowprec.report.plan.on_meta import planned_moments, planned_parts
from nemo_lowprec.tensors import GradientTensor
from nemo_lowprec.weights import master_of

UNSCALED = "Unscaled gradients"


def plan_whole(model: nn.Module, engine: Engine, layout: Layout) -> PlannedProcess:
    """The plan of ``model``, which was settled on the meta device."""
    weights, masters, gradients, states = columns_of_chart()
    releases = engine.options.low_bit.gradient_release
    trained = [p for p in model.parameters() if p.requires_grad]
    moments = planned_moments(model)
    for part, params in planned_parts(model, engine).items():
        for param in params:
            weights.add(part, param)
            if param.requires_grad:
                masters.add(part, master_of(param))
                gradients.add(part, None if releases else gradient_of(param, engine))
                states.add_states(part, param, param, engine.options, moments.get(id(param), ADAM))
    if releases and trained:  # one by one
        gradients.add("all", gradient_of(max(trained, key=nn.Parameter.numel), engine))
        gradients.when = "at most"
    columns = [weights, *_quantized_weights(model, engine, layout), masters, gradients]
    if engine.level.has_loss_scale and engine.level.weight_grad == "fp16":
        # Unscaling widens FP16 gradients to FP32, which adds as many bytes until they are zeroed.
        columns.append(PlannedColumn(UNSCALED, "at most", gradients.parts, {"fp32"} if gradients.found else set()))
    messages, buffers, peers = _averaging(trained, engine, layout)
    beside = peers, peers, buffers.bytes if buffers.when == "at most" else 0
    return PlannedProcess([*columns, states, buffers], {"": messages}, beside)


def _quantized_weights(model: nn.Module, engine: Engine, layout: Layout) -> list[PlannedColumn]:
    """The column of the quantized weights that layers keep from step to step; none where they keep none.

    The storage of a weight in FP8 is one orientation of its operand, or both, and does not count again.
    """
    if not engine.amaxes.weights.keeps:
        return []
    held = PlannedColumn("Quantized weights", "kept")
    for _, weight, operand in kept_operands(model, PlannedBackend() if layout.accelerator == "gpu" else None):
        parts = parts_of_operand(operand)
        sizes = {storage_key(t.untyped_storage()): t.untyped_storage().nbytes() for t in parts}
        for part in parts_of_tensor(weight):
            sizes.pop(storage_key(part.untyped_storage()), None)
        held.add_bytes(CONVERTED, parts[0].dtype, sum(sizes.values()))
    return [held] if held.bytes else []


def gradient_of(param: nn.Parameter, engine: Engine) -> Tensor:
    """An uninitialised gradient of ``param`` as it is stored."""
    if engine.columns.weights.is_matrix(param):
        return GradientTensor.empty(param)
    return torch.empty(param.shape, dtype=param.grad_dtype or param.dtype, device="meta")


def _averaging(trained: list[nn.Parameter], engine: Engine, layout: Layout) -> tuple[list[Message], PlannedColumn, int]:
    """Messages of gradients, the column of the messages' buffers, and bytes of the buffers that stay in forward."""
    held = PlannedColumn("Communication buffers", "at most")
    messages: list[Message] = []
    peers = 0
    if layout.world > 1 and layout.strategy == "ddp" and not engine.level.has_half_weights:
        # torch's own: as many bytes as gradients, for all of training.
        held.when = "kept"
        for dtype in dict.fromkeys(p.dtype for p in trained):
            size = sum(p.nbytes for p in trained if p.dtype == dtype)
            held.add_bytes("all", dtype, size)
            messages.append(Message("all_reduce", dtype, size, layout.world))
    elif layout.world > 1:
        engine.columns.comm.check_averaging()
        machines = layout.averaged_machines
        within = layout.world // machines
        buckets = plan_buckets(
            trained, engine.columns.comm.wire, layout.world, layout.bucket_bytes,
            machines=machines, peers=layout.peers(within),
        )  # fmt: skip
        messages = [m for bucket in buckets for m in bucket.messages]
        largest = max(messages, key=lambda m: m.bytes)
        held.add_bytes("all", largest.dtype, buffer_bytes(buckets, within))
        peers = peer_bytes(buckets, within)
    return messages, held, peers
