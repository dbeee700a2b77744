"""The grouped GEMMs of experts in a few launches, without waiting for the device: on Hopper, with scales per tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from nemo_lowprec.compute.backends import fused_activations
from nemo_lowprec.compute.backends.scaled_mm import ScaledMMBackend
from nemo_lowprec.compute.backends.scaled_mm_blocks import ScaledBlocksBackend
from nemo_lowprec.compute.experts.gate import Gate
from nemo_lowprec.compute.experts.gemms import LoopGemms
from nemo_lowprec.compute.experts.routing import Routing, route
from nemo_lowprec.compute.gemm_plan import GemmPlan
from nemo_lowprec.compute.linear_function import weight_operand
from nemo_lowprec.kernels.loader import expert_kernels, fused_kernels, grouped_kernels
from nemo_lowprec.tensors import Fp8Weight, stored_data

_HALVES = (torch.float16, torch.bfloat16)


def can_fuse(plans: Sequence[GemmPlan], device: torch.device) -> bool:
    """Whether ``FusedGemms`` can compute two projections with these plans on ``device``."""
    if device.type != "cuda" or grouped_kernels() is None or expert_kernels() is None:
        return False
    if torch.cuda.get_device_capability(device) != (9, 0):
        return False
    kinds = {type(plan.backend) for plan in plans}
    return (
        kinds <= {ScaledMMBackend, ScaledBlocksBackend}
        and len(kinds) == 1
        and all(all(plan.fp8) and plan.half in _HALVES for plan in plans)
    )


class _Weight(NamedTuple):
    """The weights of all experts, as the GEMMs of forward and of backward read them; None for an unread form."""

    forward: Any
    backward: Any


class FusedGemms(LoopGemms):
    """``LoopGemms`` by the kernels of ``triton_grouped`` and ``triton_experts``."""

    waits = False

    def _route(self, index: Tensor, experts: int) -> Routing:
        routing = route(index, experts)
        self.tables = grouped_kernels().make_tables(routing.order, routing.ends)  # type: ignore[union-attr]
        return routing

    def _sizes(self) -> list[int]:
        return []

    def gather(
        self, values: Tensor, plan: GemmPlan, kind: str, *, rowwise: bool, columnwise: bool, record: bool
    ) -> Any:
        data = plan.backend.quantize(values, plan.operands[kind], rowwise=True, columnwise=False, record=record)
        if plan.observers.quantized:
            plan.announce(kind, values, data)
        part, routing = data.rowwise, self.routing
        return expert_kernels().gather(  # type: ignore[union-attr]
            part.data, part.scale_inv, routing.order, routing.top_k, self.tables, rowwise, columnwise
        )

    def quantize(
        self, rows: Tensor, plan: GemmPlan, kind: str, *, rowwise: bool, columnwise: bool, record: bool
    ) -> Any:
        scale, amax = _scale(rows, plan, kind, record)
        operand = expert_kernels().quantize(  # type: ignore[union-attr]
            rows.contiguous(), scale, plan.operands[kind].fmt, amax, self.tables, rowwise, columnwise
        )
        self._announce(plan, kind, rows)
        return operand

    @staticmethod
    def _announce(plan: GemmPlan, kind: str, values: Tensor) -> None:
        if plan.observers.quantized:
            how = {"rowwise": True, "columnwise": False, "record": False}
            plan.announce(kind, values, plan.backend.quantize(values, plan.operands[kind], **how))

    def weight(self, weight: Tensor, plan: GemmPlan, transposed: bool, *, rowwise: bool, columnwise: bool) -> Any:
        wanted = (columnwise, rowwise) if transposed else (rowwise, columnwise)
        found = weight_operand(_as_matrix(weight), weight, plan, rowwise=wanted[0], columnwise=wanted[1])
        kernels, (_, down, across) = grouped_kernels(), weight.shape
        row, col = found.rowwise, found.columnwise
        # Stored below each other, the experts' matrices are rows of one matrix, and columns of its transpose.
        stored = row and kernels.Weight(row.data, row.scale_inv, down, 0, down)  # type: ignore[union-attr]
        turned = col and kernels.Weight(col.data, col.scale_inv, 0, down, across)  # type: ignore[union-attr]
        return _Weight(turned, stored) if transposed else _Weight(stored, turned)

    def save(self, operand: Any, plan: GemmPlan, low: bool) -> tuple[list[Tensor | None], Any]:
        if isinstance(operand, _Weight):
            data, scale_inv, *steps = operand.backward
            return [data, scale_inv], tuple(steps)
        return [operand.col, operand.scale_inv], False

    def restore(self, tensors: Sequence[Tensor | None], metas: Any, plan: GemmPlan) -> Any:
        if metas is False:
            return expert_kernels().Quantized(None, *tensors)  # type: ignore[union-attr]
        return _Weight(None, grouped_kernels().Weight(*tensors, *metas))  # type: ignore[union-attr]

    def fprop(self, x: Any, weight: Any, plan: GemmPlan, outs: int) -> Tensor:
        return grouped_kernels().rows_gemm(  # type: ignore[union-attr,no-any-return]
            x.row, x.scale_inv, weight.forward, x.row.shape[1], self.tables, plan.half, False
        )

    def dgrad(self, grad: Any, weight: Any, plan: GemmPlan, ins: int) -> Tensor:
        return grouped_kernels().rows_gemm(  # type: ignore[union-attr,no-any-return]
            grad.row, grad.scale_inv, weight.backward, grad.row.shape[1], self.tables, plan.half,
            not plan.backend.fast_accum,
        )  # fmt: skip

    def wgrad(
        self, grad: Any, x: Any, plan: GemmPlan, shape: torch.Size, transposed: bool, dtype: torch.dtype
    ) -> Tensor:
        a, b = (x, grad) if transposed else (grad, x)
        return grouped_kernels().weights_gemm(  # type: ignore[union-attr,no-any-return]
            a.col, a.scale_inv, b.col, b.scale_inv, self.tables, dtype, not plan.backend.fast_accum
        )

    def activate(
        self, h: Tensor, factor: Tensor, gate: Gate, module: nn.Module, plan: GemmPlan, *,
        rowwise: bool, columnwise: bool, record: bool,
    ) -> Any:  # fmt: skip
        activation, operand = gate.activation, plan.operands["input"]
        if not self._is_known(gate) or plan.observers.quantized or operand.slot is None or operand.slot.cold:
            return super().activate(
                h, factor, gate, module, plan, rowwise=rowwise, columnwise=columnwise, record=record
            )  # fmt: skip
        return expert_kernels().gate(  # type: ignore[union-attr]
            activation.kind, activation.form, h, factor, operand.slot.scale, operand.fmt,  # type: ignore[union-attr]
            operand.slot.amax if record else None, self.tables, rowwise, columnwise,
        )  # fmt: skip

    def activate_backward(
        self, grad: Tensor, h: Tensor, factor: Tensor, gate: Gate, module: nn.Module, plan: GemmPlan, *,
        rowwise: bool, columnwise: bool, record: bool, half: bool,
    ) -> tuple[Any, Tensor | None, Tensor]:  # fmt: skip
        activation, operand = gate.activation, plan.operands["grad_output"]
        if not self._is_known(gate) or plan.observers.quantized or operand.slot is None or operand.slot.cold:
            return super().activate_backward(
                grad, h, factor, gate, module, plan, rowwise=rowwise, columnwise=columnwise, record=record, half=half
            )
        return expert_kernels().gate_backward(  # type: ignore[union-attr,no-any-return]
            activation.kind, activation.form, grad, h, factor, operand.slot.scale, operand.fmt,  # type: ignore[union-attr]
            operand.slot.amax if record else None, self.tables, rowwise, columnwise, half,
        )  # fmt: skip

    @staticmethod
    def _is_known(gate: Gate) -> bool:
        return gate.activation is not None and fused_activations.is_faster(gate.activation)

    def combine(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        routing = self.routing
        return expert_kernels().combine(rows, routing.ends, routing.top_k, self.tables, dtype)  # type: ignore[union-attr,no-any-return]


def _scale(rows: Tensor, plan: GemmPlan, kind: str, record: bool) -> tuple[Tensor, Tensor | None]:
    """The scale of ``rows``, and the amax that the kernel shall raise; None where no amax is left to record."""
    operand = plan.operands[kind]
    if operand.slot is None or operand.slot.cold:
        return operand.scale(fused_kernels().amax(rows), record), None  # type: ignore[union-attr]
    return operand.slot.scale, operand.slot.amax if record else None


def _as_matrix(weight: Tensor) -> Tensor:
    """A weight [experts, rows, cols] as [experts * rows, cols], in its storage."""
    if isinstance(weight, Fp8Weight):
        return weight.joined()
    return stored_data(weight).flatten(0, 1)
