"""Declared beside observed: look into one real training step and report the formats found in every column.

``Audit`` is a callback. It watches the second optimizer step (the first one allocates), and looks

* at the GEMM operands as the layers hand them to the backend, in forward and backward,
* at the gradients right after backward, before they are unscaled or clipped,
* at weights, masters and optimizer states after the step,
* at what is sent to other processes in all of this.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import torch
from rich.table import Table
from torch import Tensor, nn

from nemo_lowprec.chart import PrecisionLevel
from nemo_lowprec.formats import BlockTensor, ScaledTensor, StoredTensor
from nemo_lowprec.plugins import LowPrecision
from nemo_lowprec.report.gemms import watch_gemms
from nemo_lowprec.report.traffic import Traffic
from nemo_lowprec.weights import master_of

__all__ = ["Audit", "AuditReport", "Finding"]

_NAMES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
_AT = {
    "Computation (GEMM)": "operands, forward and backward",
    "Comm": "gradients sent in a step",
    "Weight": "after the step",
    "Master weight": "after the step",
    "Weight gradient": "after backward, before unscaling",
    "Optimizer states": "after the step",
}


@dataclass
class Finding:
    """One column: what the level declares and what was found.

    Attributes:
        column: title as in the chart.
        part: ``converted`` weights (all linear weights at a level that converts none), the ``rest``, and
            ``vectors`` (fewer than two dimensions) at a level that keeps these apart. For gradients on the wire,
            ``matrices`` and ``vectors``, or ``all``.
        declared, observed: formats, ``+`` between several, ``–`` for none.
        bytes_per_param: bytes found over the parameters of this part; None where nothing is stored. On the wire, bytes
            that each process sends in a step.
    """

    column: str
    part: str
    declared: str
    observed: str
    bytes_per_param: float | None

    @property
    def agrees(self) -> bool:
        """Whether the observation is what was declared."""
        return self.declared == self.observed


@dataclass
class AuditReport:
    """All columns of one level."""

    level: PrecisionLevel
    findings: list[Finding] = field(default_factory=list)
    total_bytes: dict[str, int] = field(default_factory=dict)

    @property
    def agrees(self) -> bool:
        """Whether every column is what the chart says."""
        return bool(self.findings) and all(f.agrees for f in self.findings)

    def table(self) -> Table:
        """The report for people."""
        table = Table(title=f"Audit of {self.level.name}", title_justify="left")
        for title in ("Column", "Of", "Declared", "Observed", "Bytes/param", "Looked at", ""):
            table.add_column(title)
        for f in self.findings:
            size = "–" if f.bytes_per_param is None else f"{f.bytes_per_param:.2f}"
            mark = "ok" if f.agrees else "DIFFERS"
            table.add_row(f.column, f.part, f.declared.upper(), f.observed.upper(), size, _AT[f.column], mark)
        for name, total in self.total_bytes.items():
            table.add_row(f"{name}, all", "", "", "", f"{total / 2**20:,.1f} MiB", "", "")
        return table


class Audit(pl.Callback):
    """Watches one step of a run at a level of this package; ``report`` holds the result afterwards."""

    STEP = 1

    def __init__(self) -> None:
        self.report: AuditReport | None = None
        self._gemms: Any = None
        self._traffic: Traffic | None = None
        self._seen: dict[str, set[str]] = {}
        self._gradients: dict[str, _Bytes] = {}

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not isinstance(trainer.precision_plugin, LowPrecision):
            raise ValueError("Audit needs a Trainer with a level of nemo_lowprec among its plugins.")
        if trainer.precision_plugin.engine.sharding is not None:
            raise ValueError("Audit does not look into lowprec_sharded so far. Use strategy='lowprec_ddp'.")
        self.report = None

    def _watching(self, trainer: pl.Trainer) -> bool:
        return self.report is None and trainer.global_step == self.STEP

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, i: int) -> None:
        if self._watching(trainer) and self._gemms is None:
            self._seen = defaultdict(set)
            self._gemms = watch_gemms(pl_module, self._seen)
            self._gemms.__enter__()
            if trainer.world_size > 1:
                self._traffic = Traffic(lambda tensor: _is_bookkeeping(tensor, trainer))
                self._traffic.__enter__()

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._gemms is not None:
            self._gradients = {part: _Bytes(p.grad for p in ps) for part, ps in _parts(trainer, pl_module)}

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, i: int
    ) -> None:
        if self._gemms is None or trainer.global_step <= self.STEP:
            return
        if self._traffic is not None:
            self._traffic.__exit__(None, None, None)
        self._gemms.__exit__(None, None, None)
        self._gemms = None
        self.report = self._report(trainer, pl_module)

    def _report(self, trainer: pl.Trainer, module: pl.LightningModule) -> AuditReport:
        plugin = trainer.precision_plugin
        assert isinstance(plugin, LowPrecision)
        level, recipe = plugin.level, plugin.engine.recipe
        report = AuditReport(level)
        totals: dict[str, int] = defaultdict(int)
        stored_fp8 = recipe is not None and recipe.fp8_params
        for part, params in _parts(trainer, module):
            converted = part == "converted"
            if not params:
                if converted:  # a level that converts nothing does not do what it declares
                    report.findings.append(Finding("Computation (GEMM)", part, _declared_gemm(plugin), "–", None))
                continue
            half_weight = level.weight if level.has_half_weights else "fp32"
            vectors = level.vectors if part == "vectors" else None
            count = sum(p.numel() for p in params)
            if converted:
                # At a level that overrides a GEMM, or keeps layers in half precision, both formats are found.
                observed = "+".join(sorted(self._seen["converted"])) or "–"
                report.findings.append(Finding("Computation (GEMM)", part, _declared_gemm(plugin), observed, None))
            columns: list[tuple[str, str | None, _Bytes]] = [
                (
                    "Weight",
                    ("fp8" if stored_fp8 else half_weight) if converted else vectors or level.rest,
                    _Bytes(params),
                ),
                (
                    "Master weight",
                    level.master_weight if converted or not level.is_low_bit else None,
                    _Bytes(master_of(p) for p in params),
                ),
                ("Weight gradient", vectors or level.weight_grad, self._gradients[part]),
            ]
            for column, declared, found in columns:
                report.findings.append(Finding(column, part, declared or "–", found.formats, found.per_param(count)))
                totals[column] += found.total
            for index, key in enumerate(("exp_avg", "exp_avg_sq")):
                found = _Bytes(_states(trainer, params, key))
                if found.total:
                    declared = vectors or level.optimizer_states[index]
                    size = found.per_param(count)
                    report.findings.append(Finding("Optimizer states", part, declared, found.formats, size))
                    totals["Optimizer states"] += found.total
        if self._traffic is not None:
            for finding, size in _sent(self._traffic, trainer, module):
                report.findings.append(finding)
                totals["Comm"] += size
            self._traffic = None
        report.total_bytes = dict(totals)
        return report


class _Bytes:
    """Formats and bytes of some tensors."""

    def __init__(self, tensors: Iterable[Tensor | None]) -> None:
        self.total = 0
        names: set[str] = set()
        for tensor in tensors:
            if tensor is None:
                continue
            if isinstance(tensor, StoredTensor):
                dtype = tensor.fmt.dtype if isinstance(tensor, ScaledTensor | BlockTensor) else torch.float16
                names.add(_NAMES.get(dtype, "fp8"))
                self.total += tensor.stored_bytes()
            else:
                names.add(_NAMES.get(tensor.dtype, str(tensor.dtype).removeprefix("torch.")))
                self.total += tensor.nbytes
        self.formats = "+".join(sorted(names)) or "–"

    def per_param(self, count: int) -> float | None:
        return self.total / count if self.total else None


def _parts(trainer: pl.Trainer, module: nn.Module) -> Iterator[tuple[str, list[nn.Parameter]]]:
    plugin = trainer.precision_plugin
    assert isinstance(plugin, LowPrecision)
    if plugin.level.has_fp8:
        layers = [module.get_submodule(name) for name in plugin.engine.conversion.low]
    else:
        layers = [m for m in module.modules() if isinstance(m, nn.Linear)]
    converted = {id(m.weight): m.weight for m in layers if m.weight.requires_grad}
    yield "converted", list(converted.values())  # type: ignore[arg-type]
    rest = [p for p in module.parameters() if p.requires_grad and id(p) not in converted]
    if plugin.level.vectors is None:
        yield "rest", rest
        return
    yield "rest", [p for p in rest if p.dim() > 1]
    yield "vectors", [p for p in rest if p.dim() < 2]


def _is_bookkeeping(tensor: Tensor, trainer: pl.Trainer) -> bool:
    """Amaxes, flags and logged numbers: what is sent beside gradients."""
    plugin = trainer.precision_plugin
    assert isinstance(plugin, LowPrecision)
    histories = plugin.engine.histories
    is_amax = histories is not None and tensor.data_ptr() == histories.amax.data_ptr()
    return is_amax or tensor.dtype == torch.int8 or tensor.numel() == 1


def _sent(traffic: Traffic, trainer: pl.Trainer, module: nn.Module) -> Iterator[tuple[Finding, int]]:
    """Findings about the gradients on the wire, and their bytes. Those in FP8 travel as uint8."""
    plugin = trainer.precision_plugin
    assert isinstance(plugin, LowPrecision)
    level = plugin.level
    trained = [p for p in module.parameters() if p.requires_grad]
    sent = [s for s in traffic.sent if s.kind != "broadcast"]
    parts = [("all", level.comm, trained, sent)]
    if level.vectors is not None:
        in_fp8 = [s for s in sent if s.dtype == torch.uint8]
        parts = [
            ("matrices", level.comm, [p for p in trained if p.dim() > 1], in_fp8),
            ("vectors", level.vectors, [p for p in trained if p.dim() < 2], [s for s in sent if s not in in_fp8]),
        ]
    for part, declared, params, messages in parts:
        if params:
            names = {"fp8" if s.dtype == torch.uint8 else _NAMES.get(s.dtype, str(s.dtype)) for s in messages}
            size = sum(s.bytes for s in messages)
            per_param = size / sum(p.numel() for p in params)
            yield Finding("Comm", part, declared, "+".join(sorted(names)) or "–", per_param), size


def _states(trainer: pl.Trainer, params: list[nn.Parameter], key: str) -> Iterator[Tensor | None]:
    for optimizer in trainer.optimizers:
        for param in params:
            yield optimizer.state.get(param, {}).get(key)


def _declared_gemm(plugin: LowPrecision) -> str:
    recipe = plugin.engine.recipe
    formats = {plugin.level.compute}
    if recipe is not None and any(recipe.override_linear_precision):
        formats = {plugin.level.autocast} if all(recipe.override_linear_precision) else formats | {
            plugin.level.autocast
        }  # fmt: skip
    return "+".join(sorted(formats))
