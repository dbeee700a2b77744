"""The grouped GEMMs of experts, one expert after the other, by any backend. This defines the numerics.

Rows lie in the order of ``Routing``. With a scale per tensor all rows have one scale, and so have all experts of a
weight; with scales of blocks each expert's rows and weight are quantized by themselves. The host waits for the sizes of
the groups. An expert without a row is not computed, and the gradient of its weight is zero.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nemo_lowprec.compute.experts.gate import Gate
from nemo_lowprec.compute.experts.routing import Routing, route
from nemo_lowprec.compute.gemm_plan import GemmPlan
from nemo_lowprec.compute.linear_function import new_weight_operand
from nemo_lowprec.compute.operands import Operand
from nemo_lowprec.formats import compute_amax
from nemo_lowprec.tensors import Fp8Weight, Fp16Weight, stored_data


@dataclass
class _OneScale:
    """The scale of all parts of a tensor, in the place of an ``AmaxSlot``; nothing is recorded."""

    scale: Tensor
    amax: Tensor
    cold: bool = False

    def current_scale(self, _: Tensor) -> Tensor:
        return self.scale


@dataclass
class Parts:
    """An operand of the grouped GEMMs, one part for each expert; None for an expert without rows.

    Attributes:
        parts: quantized, by the backend; empty where no GEMM reads FP8.
        values: [rows, features], for GEMMs in half precision; None where there is none.
    """

    parts: list[Any]
    values: Tensor | None


class LoopGemms:
    """The GEMMs of one call of a module. ``fp8`` of the plans says which of the GEMMs run in FP8."""

    waits = True  # whether the host waits for the device

    def __init__(self, index: Tensor, experts: int) -> None:
        self.routing = self._route(index, experts)
        self.sizes = self._sizes()

    def _route(self, index: Tensor, experts: int) -> Routing:
        return route(index, experts)

    def _sizes(self) -> list[int]:
        return self.routing.sizes()

    # Operands

    def gather(
        self, values: Tensor, plan: GemmPlan, kind: str, *, rowwise: bool, columnwise: bool, record: bool
    ) -> Any:
        """Quantize tokens, and put them in the order of the rows.

        Args:
            values: half [tokens, features].
            kind: ``input`` or ``grad_output``.
        """
        rows = values[self.routing.tokens]
        return self._quantize(rows, values, plan, kind, rowwise=rowwise, columnwise=columnwise, record=record)

    def quantize(
        self, rows: Tensor, plan: GemmPlan, kind: str, *, rowwise: bool, columnwise: bool, record: bool
    ) -> Any:
        """Quantize half [rows, features]."""
        return self._quantize(rows, rows, plan, kind, rowwise=rowwise, columnwise=columnwise, record=record)

    def _quantize(
        self,
        rows: Tensor,
        measured: Tensor,
        plan: GemmPlan,
        kind: str,
        *,
        rowwise: bool,
        columnwise: bool,
        record: bool,
    ) -> Parts:
        half = plan.in_half(kind, rows) if _reads_half(plan, kind) else None
        if not (rowwise or columnwise):
            return Parts([], half)
        operand = _with_one_scale(plan.operands[kind], measured, record)
        parts = [
            None if part is None else plan.backend.quantize(
                part, operand, rowwise=rowwise, columnwise=columnwise, record=False
            )
            for part in self._cut(rows, plan.backend.row_multiple)
        ]  # fmt: skip
        if plan.observers.quantized:
            for part, found in zip(self._cut(rows, plan.backend.row_multiple), parts, strict=True):
                if part is not None:
                    plan.announce(kind, part, found)
        return Parts(parts, half)

    def _cut(self, rows: Tensor, multiple: int) -> list[Any]:
        """The rows of each expert, with zeros to a multiple of ``multiple`` rows; None for no rows."""
        cut = rows[: sum(self.sizes)].split(self.sizes)
        return [F.pad(part, (0, 0, 0, -len(part) % multiple)) if len(part) else None for part in cut]

    def weight(self, weight: Tensor, plan: GemmPlan, transposed: bool, *, rowwise: bool, columnwise: bool) -> Any:
        """Quantize a weight [experts, outs, ins], or with ``transposed`` [experts, ins, outs]."""
        half = plan.in_half("weight", weight) if _reads_half(plan, "weight") else None
        if half is not None and transposed:
            half = half.transpose(1, 2)
        parts: list[Any] = []
        if rowwise or columnwise:
            parts = [
                None if not size else new_weight_operand(
                    _matrix(weight, expert, transposed), plan, rowwise=rowwise, columnwise=columnwise
                )
                for expert, size in enumerate(self.sizes)
            ]  # fmt: skip
        return Parts(parts, half)

    def save(self, operand: Any, plan: GemmPlan, low: bool) -> tuple[list[Tensor | None], Any]:
        """The parts of an operand that backward reads, as plain tensors, and their description (not None).

        Args:
            low: whether the GEMM of backward that reads the operand runs in FP8.
        """
        if not low:
            return [operand.values], ()
        saved = [None if part is None else plan.backend.save(part) for part in operand.parts]
        tensors = [tensor for part in saved if part is not None for tensor in part[0]]
        return tensors, [None if part is None else (len(part[0]), part[1]) for part in saved]

    def restore(self, tensors: Sequence[Tensor | None], metas: Any, plan: GemmPlan) -> Any:
        """The operand of which ``save`` has returned ``tensors`` and ``metas``."""
        if metas == ():
            return Parts([], tensors[0])
        parts: list[Any] = []
        at = 0
        for meta in metas:
            parts.append(None if meta is None else plan.backend.restore(list(tensors[at : at + meta[0]]), meta[1]))
            at += 0 if meta is None else meta[0]
        return Parts(parts, None)

    # GEMMs

    def fprop(self, x: Any, weight: Any, plan: GemmPlan, outs: int) -> Tensor:
        """Half [rows, outs]: each row times the weight of its expert."""
        if plan.fp8[0]:
            return self._rows(outs, plan, lambda g: plan.backend.fprop(x.parts[g], weight.parts[g], None, plan.half))
        values = self._cut(x.values, 1)
        return self._rows(outs, plan, lambda g: plan.backend.matmul(values[g], weight.values[g].t(), plan.half))

    def dgrad(self, grad: Any, weight: Any, plan: GemmPlan, ins: int) -> Tensor:
        """Half [rows, ins]: the gradient of each row's input."""
        if plan.fp8[1]:
            return self._rows(ins, plan, lambda g: plan.backend.dgrad(grad.parts[g], weight.parts[g], plan.half))
        values = self._cut(grad.values, 1)
        return self._rows(ins, plan, lambda g: plan.backend.matmul(values[g], weight.values[g], plan.half))

    def _rows(self, features: int, plan: GemmPlan, run: Callable[[int], Tensor]) -> Tensor:
        device = self.routing.order.device
        out = torch.zeros(self.routing.rows, features, dtype=plan.half, device=device)
        at = 0
        for expert, size in enumerate(self.sizes):
            if size:
                out[at : at + size] = run(expert)[:size]
            at += size
        return out

    def wgrad(
        self, grad: Any, x: Any, plan: GemmPlan, shape: torch.Size, transposed: bool, dtype: torch.dtype
    ) -> Tensor:
        """The gradient of a weight of this ``shape``, in ``dtype``."""
        out = torch.zeros(shape, dtype=dtype, device=self.routing.order.device)
        cut = [self._cut(operand.values, 1) if not plan.fp8[2] else operand.parts for operand in (grad, x)]
        for expert, size in enumerate(self.sizes):
            if not size:
                continue
            dy, values = cut[0][expert], cut[1][expert]
            into = out[expert].t() if transposed else out[expert]
            if not plan.fp8[2]:
                into.copy_(plan.backend.matmul(dy.t(), values, dtype))
            elif transposed:
                into.copy_(plan.backend.wgrad(dy, values, dtype))
            else:
                plan.backend.wgrad(dy, values, dtype, into)
        return out

    # Between the GEMMs

    def add_bias(self, rows: Tensor, bias: Tensor, factor: Tensor | None = None) -> Tensor:
        """``rows`` + each expert's bias [experts, features], times ``factor`` [rows]."""
        added = bias[self.routing.experts.clamp_(max=len(bias) - 1)].float()
        return (rows.float() + (added if factor is None else added * factor[:, None])).to(rows.dtype)

    def bias_gradient(self, rows: Tensor, bias: Tensor, factor: Tensor | None = None) -> Tensor:
        """The gradient of a bias [experts, features], times ``factor`` [rows], for that of ``rows``."""
        own = self.routing.experts == torch.arange(len(bias), device=rows.device)[:, None]
        chosen = own.float() if factor is None else own * factor
        return (chosen @ rows.float()).to(bias.dtype)

    def activate(
        self, h: Tensor, factor: Tensor, gate: Gate, module: nn.Module, plan: GemmPlan, *,
        rowwise: bool, columnwise: bool, record: bool,
    ) -> Any:  # fmt: skip
        """The gate's values times ``factor`` FP32 [rows], quantized: the input of the second projection."""
        values = (gate.forward(module, h).float() * factor[:, None]).to(plan.half)
        return self.quantize(values, plan, "input", rowwise=rowwise, columnwise=columnwise, record=record)

    def activate_backward(
        self, grad: Tensor, h: Tensor, factor: Tensor, gate: Gate, module: nn.Module, plan: GemmPlan, *,
        rowwise: bool, columnwise: bool, record: bool, half: bool,
    ) -> tuple[Any, Tensor | None, Tensor]:  # fmt: skip
        """The gradient of ``h`` quantized for the first projection, in half, and the gradient of ``factor``.

        Args:
            grad: half [rows, ins], of the input of the second projection.
            half: whether the half gradient is wanted.
        """
        dh, values = gate.backward(module, (grad.float() * factor[:, None]).to(grad.dtype), h)
        dh8 = self.quantize(dh, plan, "grad_output", rowwise=rowwise, columnwise=columnwise, record=record)
        return dh8, dh, (grad.float() * values.float()).sum(1)

    def combine(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """The sums [tokens, features] of each token's rows, added in FP32."""
        pairs = self.routing.in_pairs(rows)
        return pairs.float().sum(1).to(dtype)


def _reads_half(plan: GemmPlan, kind: str) -> bool:
    """Whether a GEMM in half precision reads the operand."""
    fprop, dgrad, wgrad = plan.fp8
    reads = {"input": (fprop, wgrad), "weight": (fprop, dgrad), "grad_output": (dgrad, wgrad)}
    return not all(reads[kind])


def _with_one_scale(operand: Operand, values: Tensor, record: bool) -> Operand:
    """``operand`` with the scale of all ``values``, where there is one scale per tensor."""
    if operand.layout is not None:
        return operand
    amax = compute_amax(values)
    return replace(operand, slot=_OneScale(operand.scale(amax, record), amax.reshape(1)))


def _matrix(weight: Tensor, expert: int, transposed: bool) -> Tensor:
    """The weight [outs, ins] of one expert, in its storage."""
    if isinstance(weight, Fp8Weight | Fp16Weight):
        stored = weight.item_of(expert)
        return stored.transposed() if transposed else stored
    one = stored_data(weight)[expert]
    return one.t() if transposed else one
