"""The audit on Megatron-core's engine: Transformer Engine's GEMMs, gradient buffers, parts of masters and states."""

from __future__ import annotations

import importlib
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from nemo_lowprec.compute import linear_weights
from nemo_lowprec.report.findings import AuditReport, Finding
from nemo_lowprec.report.gemms import watch_gemms
from nemo_lowprec.report.tensor_storage import Bytes, Stored, as_stored, format_of
from nemo_lowprec.report.traffic import Sent, Traffic

if TYPE_CHECKING:
    from nemo_lowprec.megatron.engine import MegatronEngine

__all__ = ["MegatronLook"]

_PLACES = {
    "Comm": "gradients sent between data-parallel processes",
    "Master weight": "this process's parts, after the step",
    "Weight gradient": "their buffers, before the step",
    "Optimizer states": "this process's parts, after the step",
}
_GEMMS = ("transformer_engine.pytorch.module.linear", "transformer_engine.pytorch.module.layernorm_linear")


class MegatronLook:
    """Watches from its making on; ``take_gradients`` before the step, ``report`` after it."""

    def __init__(self, engine: MegatronEngine, module: nn.Module) -> None:
        from megatron.core import parallel_state

        self._engine, self._module = engine, module
        self._seen: dict[str, set[str]] = defaultdict(set)
        self._stack = ExitStack()
        if engine.is_pipelined:
            self._stack.enter_context(_watch_te(self._seen["converted"]))
        else:
            self._stack.enter_context(watch_gemms(module, self._seen))
        self._group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        self._traffic = self._stack.enter_context(Traffic(lambda tensor: tensor.numel() == 1))
        self._gradients: dict[str, Bytes] = {}

    def _parts(self) -> Iterator[tuple[str, list[nn.Parameter]]]:
        level = self._engine.settings.level
        modules = [m for chunk in self._engine.chunks for m in chunk.modules()]
        found: list[Any]
        if self._engine.is_pipelined:
            found = [m.weight for m in modules if hasattr(m, "fuse_wgrad_accumulation") and hasattr(m, "weight")]
        elif level.has_fp8:
            found = [self._module.get_parameter(n) for n in self._engine.columns.computation.conversion.weights]
        else:
            found = [w for chunk in self._engine.chunks for w in linear_weights(chunk).values()]
        weights = {id(w): w for w in found if w.requires_grad}
        yield "converted", list(weights.values())
        params = {id(p): p for chunk in self._engine.chunks for p in chunk.parameters() if p.requires_grad}
        rest = [p for p in params.values() if id(p) not in weights]
        if level.vectors is None:
            yield "rest", rest
            return
        yield "rest", [p for p in rest if p.dim() > 1]
        yield "vectors", [p for p in rest if p.dim() < 2]

    def take_gradients(self) -> None:
        """Look at the gradients, which the step lets go of."""
        self._gradients = {part: Bytes(p.main_grad for p in params) for part, params in self._parts()}  # type: ignore[attr-defined]

    def report(self) -> AuditReport:
        """What was found."""
        self._stack.close()
        settings, optimizer = self._engine.settings, self._engine.optimizer
        assert optimizer is not None
        level = settings.level
        report = AuditReport(level, places=_PLACES)
        totals: dict[str, int] = defaultdict(int)
        for part, params in self._parts():
            if not params:
                continue
            converted, vectors = part == "converted", level.vectors if part == "vectors" else None
            masters = optimizer.masters(params)
            count, held = sum(p.numel() for p in params), sum(m.numel() for m in masters)
            half = level.weight if level.has_half_weights else "fp32"
            weight = ("fp8" if settings.fp8_weights else half) if converted else vectors or level.rest
            master = level.master_weight if converted or not level.is_low_bit else None
            if converted:
                found = "+".join(sorted(self._seen["converted"])) or "–"
                report.findings.append(Finding("Computation (GEMM)", part, level.compute, found, None))
            columns = [
                ("Weight", weight, Bytes(map(_weight, params)), count),
                ("Master weight", master, Bytes(m for m in masters if not optimizer.is_weight(m)), held),
                ("Weight gradient", vectors or level.weight_grad, self._gradients[part], count),
            ]
            for index, key in enumerate(("exp_avg", "exp_avg_sq")):
                states = Bytes(state.get(key) for state in optimizer.states(params))
                columns.append(("Optimizer states", vectors or level.optimizer_states[index], states, held))
            for column, declared, bytes_, over in columns:
                size = bytes_.per_param(over) if over else None
                if over:
                    report.findings.append(Finding(column, part, declared or "–", bytes_.formats, size))
                totals[column] += bytes_.total
        for finding, size in self._sent():
            report.findings.append(finding)
            totals["Comm"] += size
        report.total_bytes = dict(totals)
        return report

    def _sent(self) -> Iterator[tuple[Finding, int]]:
        if self._group.size() == 1:
            return
        level = self._engine.settings.level
        mine = [s for s in self._traffic.sent if s.group == self._group.group_name]
        gradients = [s for s in mine if s.kind in ("reduce_scatter", "all_to_all", "all_reduce")]
        params = [p for _, some in self._parts() for p in some]
        groups: list[tuple[str, str, list[nn.Parameter], list[Sent]]] = [("all", level.comm, params, gradients)]
        if level.vectors is not None:
            in_fp8 = [s for s in gradients if s.dtype == torch.uint8]
            others = [s for s in gradients if s.dtype != torch.uint8]
            groups = [
                ("matrices", level.comm, [p for p in params if p.dim() > 1], in_fp8),
                ("vectors", level.vectors, [p for p in params if p.dim() < 2], others),
            ]
        for part, declared, some, messages in groups:
            names = {"fp8" if s.dtype == torch.uint8 else format_of(s.dtype) for s in messages}
            size = sum(s.bytes for s in messages)
            found = "+".join(sorted(names)) or "–"
            yield Finding("Comm", part, declared, found, size / sum(p.numel() for p in some)), size


def _weight(param: nn.Parameter) -> Any:
    data: Tensor | None = getattr(param, "_data", None)  # of Transformer Engine's Float8Tensor
    return as_stored(param) if data is None else Stored("fp8", data.nbytes + 4, data.numel())


@contextmanager
def _watch_te(seen: set[str]) -> Iterator[None]:
    """Note the formats of the operands that Transformer Engine's linear layers hand to its GEMM."""

    def watched(gemm: Any) -> Any:
        @wraps(gemm)
        def call(a: Any, b: Any, *args: Any, **kwargs: Any) -> Any:
            seen.update(map(_operand, (a, b)))
            return gemm(a, b, *args, **kwargs)

        return call

    modules: list[Any] = [importlib.import_module(name) for name in _GEMMS]
    originals = [module.general_gemm for module in modules]
    for module in modules:
        module.general_gemm = watched(module.general_gemm)
    try:
        yield
    finally:
        for module, original in zip(modules, originals, strict=True):
            module.general_gemm = original


def _operand(tensor: Any) -> str:
    kind = type(tensor).__name__
    formats = {"Float8": "fp8", "MXFP8": "mxfp8", "NVFP4": "nvfp4"}
    return next((name for prefix, name in formats.items() if kind.startswith(prefix)), None) or format_of(tensor.dtype)
