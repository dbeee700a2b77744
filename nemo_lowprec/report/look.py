"""The base of an audit's look into one training step: where the formats of all columns become findings."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from nemo_lowprec.chart.options import Options
from nemo_lowprec.compute import Conversion, gemm_plans
from nemo_lowprec.observers import Observer
from nemo_lowprec.report.findings import AuditReport, Finding
from nemo_lowprec.report.parts import CONVERTED, FROZEN_FP8, KEPT, LEFT, VECTORS, Parts
from nemo_lowprec.report.tensor_storage import Bytes, Stored, format_of
from nemo_lowprec.report.traffic import Sent, Traffic
from nemo_lowprec.weights import kept_in_fp32


@dataclass(frozen=True)
class Held:
    """Storage of some parameters on one process, after a step.

    Attributes:
        weights: the tensors that the model computes with.
        masters: the tensors that the optimizer steps in the weights' place; nothing where it steps the weights.
        states: first and second moments (see ``states_of``); None for moments that the optimizers do not have.
        elements: number of elements of the parameters' shards, to which masters and states belong.
    """

    weights: Bytes
    masters: Bytes
    states: Sequence[Bytes | None]
    elements: int


class Look(Observer, ABC):
    """Looks into one training step of one engine, from its making until ``report`` or ``end``.

    Args:
        engine: an ``Engine`` or a ``MegatronEngine``.
        options: the engine's row and its arguments.
        model: the layers that announce nothing are found in it.

    Attributes:
        places: the point of the step at which a column is read, for columns that are not read where ``AuditReport``
            says.
        is_sharded: whether each process holds shards, onto which gradients are reduced.
        operands: formats of the operands of the converted layers' GEMMs.
        left_operands: the same of the layers that ``convert="auto"`` has left in half precision.
        gradients: storage of the gradients, by the name of the part.
        traffic: the messages of the step, where several processes train.
        stack: undoes at the end what ``begin`` has added.
    """

    places: Mapping[str, str] = {}
    is_sharded = False

    def __init__(self, engine: Any, options: Options, model: nn.Module) -> None:
        self.level, self.recipe, self.model = options.level, options.recipe, model
        self.conversion: Conversion = engine.columns.computation.conversion
        # Names of the layers whose GEMMs run below 16 bits; none where all linear layers count as converted.
        self._low = frozenset(self.conversion.low)
        self.operands: set[str] = set()
        self.left_operands: set[str] = set()
        self.gradients: dict[str, Bytes] = {}
        # Messages of one number are norms, losses that are logged, and flags.
        self.traffic = Traffic(lambda tensor: tensor.numel() == 1, engine.observers)
        with ExitStack() as self.stack:
            self.stack.enter_context(engine.observers.watched_by(self))
            if not self._low:
                self._watch_outputs(model)
            if dist.is_initialized() and dist.get_world_size() > 1:
                self.stack.enter_context(self.traffic)
            self.begin()
            self.stack = self.stack.pop_all()

    def _watch_outputs(self, model: nn.Module) -> None:
        """Note the format that comes out of each linear layer without a plan: autocast computes in it."""
        for module in model.modules():
            if isinstance(module, nn.Linear) and not gemm_plans(module):
                hook = module.register_forward_hook(lambda _, args, out: self.operands.add(format_of(out.dtype)))
                self.stack.callback(hook.remove)

    def begin(self) -> None:
        """Register the hooks that this engine needs, all of them on ``stack``."""

    def end(self) -> None:
        """Leave the training as it was; nothing where that is done."""
        self.stack.close()

    def quantized(self, layer: str, kind: str, values: Tensor, operand: Any, backend: Any) -> None:
        if not self._low or layer in self._low:
            is_half = isinstance(operand, Tensor)
            found = self.left_operands if layer in self.conversion.left else self.operands
            found.add(format_of(operand.dtype) if is_half else backend.describe(operand))

    def take_gradients(self, of: Callable[[nn.Parameter], Any]) -> None:
        """Read the gradients, which ``of`` returns for each parameter."""
        parts = {**self.parts(), **self.frozen()}
        self.gradients = {name: Bytes(map(of, params)) for name, params in parts.items()}

    def after_backward(self) -> None:
        """Called after each backward pass."""

    def before_step(self) -> None:
        """Called before the optimizer steps."""

    @abstractmethod
    def parts(self) -> Parts:
        """The parameters that are trained."""

    def frozen(self) -> Parts:
        """The parameters that are not trained."""
        return {}

    @abstractmethod
    def held(self, params: Sequence[nn.Parameter]) -> Held:
        """Read weights, masters and states of ``params``."""

    @abstractmethod
    def sent_gradients(self) -> list[Sent] | None:
        """The messages that carried gradients; None where one process trains alone."""

    def further_bytes(self) -> dict[str, int]:
        """Bytes of tensors that no column of the chart names."""
        return {}

    def report(self) -> AuditReport:
        """The findings of the step that is over."""
        self.end()
        level, report, parts = self.level, AuditReport(self.level, places=self.places), self.parts()
        for name, params in parts.items():
            converted = name == CONVERTED
            if converted:
                # At a level that overrides a GEMM, or keeps layers in half precision, both formats are found. A level
                # that converts nothing does not do what it declares.
                found = "+".join(sorted(self.operands)) if params or self._low else ""
                report.findings.append(Finding("Computation (GEMM)", name, self._declared_gemm(), found or "–", None))
                if self.conversion.left:
                    left = "+".join(sorted(self.left_operands))
                    report.findings.append(Finding("Computation (GEMM)", LEFT, level.autocast, left or "–", None))
            if not params:
                continue
            plain = "fp32" if name == KEPT else None
            vectors = level.vectors if name == VECTORS else None
            weight: str = plain or vectors or level.rest
            if converted:
                stores_fp8 = self.recipe is not None and self.recipe.fp8_params
                weight = "fp8" if stores_fp8 else level.weight if level.has_half_weights else "fp32"
            master = level.master_weight if converted or not (level.is_low_bit or plain) else None
            reduced_by_fsdp = self.is_sharded and not level.is_low_bit
            gradient = (None if reduced_by_fsdp else plain) or vectors or level.weight_grad
            held, count = self.held(params), sum(p.numel() for p in params)
            report.add("Weight", name, weight, held.weights, count)
            report.add("Master weight", name, master, held.masters, held.elements)
            report.add("Weight gradient", name, gradient, self.gradients[name], count)
            for declared, states in zip(level.optimizer_states, held.states, strict=True):
                if states is not None:
                    report.add("Optimizer states", name, vectors or declared, states, held.elements)
        for name, params in self.frozen().items():
            self._report_frozen(report, name, params)
        sent = self.sent_gradients()
        for name, wanted, members, messages in [] if sent is None else self._groups(parts, sent):
            bytes_ = Bytes(Stored("fp8" if m.dtype == torch.uint8 else format_of(m.dtype), m.bytes) for m in messages)
            report.add("Comm", name, wanted, bytes_, sum(p.numel() for p in members))
        report.total_bytes |= self.further_bytes()
        return report

    def _report_frozen(self, report: AuditReport, name: str, params: list[nn.Parameter]) -> None:
        """Frozen parameters: a weight in one of the formats that the level has for it, and nothing else."""
        held, count = self.held(params), sum(p.numel() for p in params)
        found = set(held.weights.formats.split("+"))
        wanted = {"fp8"} if name == FROZEN_FP8 else self._frozen_formats(params)
        report.add("Weight", name, "+".join(sorted(found if found <= wanted else wanted)), held.weights, count)
        report.add("Master weight", name, None, held.masters, held.elements)
        report.add("Weight gradient", name, None, self.gradients[name], count)
        states = Bytes(Stored(one.formats, one.total) for one in held.states if one is not None)
        report.add("Optimizer states", name, None, states, held.elements)

    def _frozen_formats(self, params: list[nn.Parameter]) -> set[str]:
        """The formats in which the level stores frozen parameters that are not in FP8."""
        level = self.level
        if not level.has_half_weights:
            return {"fp32", "fp16", "bf16"}  # as they came
        if level.is_low_bit:
            return {"fp16", "bf16"} | ({"fp32"} if any(p.dim() < 2 for p in params) else set())
        kept = kept_in_fp32(self.model, False)
        in_fp8 = {"fp8"} if self.recipe is not None and self.recipe.fp8_params else set()
        return {level.rest} | in_fp8 | ({"fp32"} if any(id(p) in kept for p in params) else set())

    def _declared_gemm(self) -> str:
        """The formats of the operands, of which a recipe may leave some in half precision."""
        overridden = self.recipe.override_linear_precision if self.recipe is not None else (False,)
        formats = {self.level.autocast} if any(overridden) else set()
        return "+".join(sorted(formats if all(overridden) else formats | {self.level.compute}))

    def _groups(self, parts: Parts, sent: list[Sent]) -> list[tuple[str, str, list[nn.Parameter], list[Sent]]]:
        """(name, declared format, parameters, messages of their gradients); FP8 is sent as uint8."""
        level, kept = self.level, parts[KEPT]
        others = [p for name, params in parts.items() if name != KEPT for p in params]
        in_fp8, in_fp32 = ([s for s in sent if s.dtype == dtype] for dtype in (torch.uint8, torch.float32))
        if level.vectors is not None:
            matrices, vectors = [p for p in others if p.dim() > 1], [p for p in others if p.dim() < 2] + kept
            return [
                ("matrices", level.comm, matrices, in_fp8),
                (VECTORS, level.vectors, vectors, [s for s in sent if s not in in_fp8]),
            ]
        if kept and level.comm != "fp32" and not self.is_sharded:
            halves = [s for s in sent if s not in in_fp32]
            return [("all", level.comm, others, halves), (KEPT, "fp32", kept, in_fp32)]
        return [("all", level.comm, others + kept, sent)]
