"""Declared beside observed: look into one real training step and report the formats found in every column.

``Audit`` is a callback. It watches the second optimizer step (the first one allocates), and looks

* at the GEMM operands as the layers hand them to the backend, in forward and backward,
* at the gradients right after backward, before they are unscaled or clipped,
* at weights, masters and optimizer states after the step,
* at what is sent to other processes in all of this.

On Megatron-core see ``megatron_audit``.

Of a sharded model: at weights while they are gathered, at gradients before they are reduced, and at the rest on the
shards of this process.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from nemo_lowprec.compute import linear_weights
from nemo_lowprec.plugins import LowPrecision
from nemo_lowprec.report.findings import AuditReport, Finding
from nemo_lowprec.report.gathered import Gathered
from nemo_lowprec.report.gemms import watch_gemms
from nemo_lowprec.report.megatron_audit import MegatronLook
from nemo_lowprec.report.tensor_storage import Bytes, as_stored, format_of
from nemo_lowprec.report.traffic import Sent, Traffic
from nemo_lowprec.strategies import MegatronStrategy
from nemo_lowprec.tensors.dtensor import local_shard
from nemo_lowprec.weights import kept_in_fp32, master_of

__all__ = ["Audit", "AuditReport", "Finding"]

_KEPT = "kept FP32"
_AT_SHARDED = {
    "Weight": "while it is gathered",
    "Master weight": "its shard, after the step",
    "Weight gradient": "before it is reduced",
    "Optimizer states": "their shards, after the step",
}


class Audit(pl.Callback):
    """Watches one step of a run at a level of this package; ``report`` holds the result afterwards."""

    STEP = 1

    def __init__(self) -> None:
        self.report: AuditReport | None = None
        self._gemms: Any = None
        self._traffic: Traffic | None = None
        self._gathered: Gathered | None = None
        self._seen: dict[str, set[str]] = {}
        self._gradients: dict[str, Bytes] = {}
        self._megatron: MegatronLook | None = None

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not isinstance(trainer.precision_plugin, LowPrecision):
            raise ValueError("Audit needs a Trainer with a level of nemo_lowprec among its plugins.")
        self.report = None

    def _watching(self, trainer: pl.Trainer) -> bool:
        return self.report is None and trainer.global_step == self.STEP

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, i: int) -> None:
        if isinstance(trainer.strategy, MegatronStrategy):
            if self._watching(trainer) and self._megatron is None:
                self._megatron = MegatronLook(trainer.strategy.engine, pl_module)
        elif self._watching(trainer) and self._gemms is None:
            self._seen = defaultdict(set)
            self._gemms = watch_gemms(pl_module, self._seen)
            self._gemms.__enter__()
            engine = _plugin(trainer).engine
            if engine.columns.weights.is_sharded:
                self._gathered = Gathered(pl_module, engine)
                self._gathered.__enter__()
            if trainer.world_size > 1:
                self._traffic = Traffic(lambda tensor: tensor.numel() == 1)  # a norm, or a number that is logged
                self._traffic.__enter__()

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._gemms is not None and self._gathered is None:
            self._gradients = {part: Bytes(p.grad for p in ps) for part, ps in _parts(trainer, pl_module)}

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        if self._megatron is not None:
            self._megatron.take_gradients()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, i: int
    ) -> None:
        if self._megatron is not None and trainer.global_step > self.STEP:
            self.report, self._megatron = self._megatron.report(), None
        if self._gemms is None or trainer.global_step <= self.STEP:
            return
        if self._traffic is not None:
            self._traffic.__exit__(None, None, None)
        self._gemms.__exit__(None, None, None)
        self._gemms = None
        if self._gathered is not None:
            self._gathered.__exit__()
            found = self._gathered.gradients
            self._gradients = {
                part: Bytes(found.get(id(p)) for p in ps) for part, ps in _parts(trainer, pl_module)
            }  # fmt: skip
        self.report = self._report(trainer, pl_module)
        self._gathered = None

    def _report(self, trainer: pl.Trainer, module: pl.LightningModule) -> AuditReport:
        plugin = _plugin(trainer)
        level, recipe = plugin.level, plugin.engine.recipe
        report = AuditReport(level, places=_AT_SHARDED if self._gathered is not None else {})
        totals: dict[str, int] = defaultdict(int)
        stored_fp8 = recipe is not None and recipe.fp8_params
        for part, params in _parts(trainer, module):
            converted = part == "converted"
            if not params:
                if converted:  # a level that converts nothing does not do what it declares
                    report.findings.append(Finding("Computation (GEMM)", part, _declared_gemm(plugin), "–", None))
                continue
            half_weight = level.weight if level.has_half_weights else "fp32"
            plain = "fp32" if part == _KEPT else None
            gradient = (
                None if plugin.engine.sharding is not None and not level.is_low_bit else plain
            )  # FSDP2 reduces it
            vectors = level.vectors if part == "vectors" else None
            count = sum(p.numel() for p in params)  # of whole parameters
            held = sum(local_shard(p).numel() for p in params)  # by this process
            if converted:
                # At a level that overrides a GEMM, or keeps layers in half precision, both formats are found.
                observed = "+".join(sorted(self._seen["converted"])) or "–"
                report.findings.append(Finding("Computation (GEMM)", part, _declared_gemm(plugin), observed, None))
            columns: list[tuple[str, str | None, Bytes, int]] = [
                (
                    "Weight",
                    ("fp8" if stored_fp8 else half_weight) if converted else plain or vectors or level.rest,
                    Bytes(map(self._weight, params)),
                    count,
                ),
                (
                    "Master weight",
                    level.master_weight if converted or not (level.is_low_bit or plain) else None,
                    Bytes(map(self._master, params)),
                    held,
                ),
                ("Weight gradient", gradient or vectors or level.weight_grad, self._gradients[part], count),
            ]
            for column, declared, found, over in columns:
                report.findings.append(Finding(column, part, declared or "–", found.formats, found.per_param(over)))
                totals[column] += found.total
            for index, key in enumerate(("exp_avg", "exp_avg_sq")):
                found = Bytes(_states(trainer, params, key))
                if found.total:
                    declared = vectors or level.optimizer_states[index]
                    size = found.per_param(held)
                    report.findings.append(Finding("Optimizer states", part, declared, found.formats, size))
                    totals["Optimizer states"] += found.total
        if self._traffic is not None:
            weights, gradients = _split(self._traffic.sent, plugin)
            for finding, size in _sent(gradients, trainer, module):
                report.findings.append(finding)
                totals["Comm"] += size
            if weights:
                totals["Comm, gathered weights"] = sum(s.bytes for s in weights)
            self._traffic = None
        buckets = _ddp_buckets(trainer)
        if buckets is not None:
            totals["DDP's buckets, beside the gradients"] = buckets
        report.total_bytes = dict(totals)
        return report

    def _weight(self, param: nn.Parameter) -> Any:
        return param if self._gathered is None else self._gathered.weights.get(id(param))

    def _master(self, param: nn.Parameter) -> Any:
        """The master weight; a shard is one where what is gathered of it has another format."""
        if self._gathered is None:
            return master_of(param) if param.requires_grad else None  # a frozen one's values wait on the CPU
        weight, shard = self._gathered.weights.get(id(param)), as_stored(param)
        return None if weight is None or weight.format == shard.format else shard


def _plugin(trainer: pl.Trainer) -> LowPrecision:
    plugin = trainer.precision_plugin
    assert isinstance(plugin, LowPrecision)
    return plugin


def _parts(trainer: pl.Trainer, module: nn.Module) -> Iterator[tuple[str, list[nn.Parameter]]]:
    plugin = _plugin(trainer)
    if plugin.level.has_fp8:
        weights = [module.get_parameter(name) for name in plugin.engine.columns.computation.conversion.weights]
    else:
        weights = list(linear_weights(module).values())
    converted = {id(w): w for w in weights if w.requires_grad}
    yield "converted", list(converted.values())
    kept = _kept(plugin, module)
    yield _KEPT, kept
    met = {*converted, *map(id, kept)}
    rest = [p for p in module.parameters() if p.requires_grad and id(p) not in met]
    if plugin.level.vectors is None:
        yield "rest", rest
        return
    yield "rest", [p for p in rest if p.dim() > 1]
    yield "vectors", [p for p in rest if p.dim() < 2]


def _kept(plugin: LowPrecision, module: nn.Module) -> list[nn.Parameter]:
    """Parameters that torch wants in FP32, such as a batch norm's, at a level with half weights."""
    level = plugin.level
    ids = kept_in_fp32(module, level.is_low_bit) if level.has_half_weights else set()
    apart = level.vectors is not None  # where a vector counts as such
    return [p for p in module.parameters() if p.requires_grad and id(p) in ids and not (apart and p.dim() < 2)]


def _split(sent: list[Sent], plugin: LowPrecision) -> tuple[list[Sent], list[Sent]]:
    """Weights that are gathered (of a sharded model), and gradients."""
    sent = [s for s in sent if s.kind != "broadcast"]
    sharding = plugin.engine.sharding
    if sharding is None:
        return [], sent
    group = (sharding.shards or dist.group.WORLD).group_name  # type: ignore[union-attr]
    weights = [s for s in sent if s.kind == "all_gather" and s.group == group]
    return weights, [s for s in sent if s not in weights]


def _sent(sent: list[Sent], trainer: pl.Trainer, module: nn.Module) -> Iterator[tuple[Finding, int]]:
    """Findings about the gradients on the wire, and their bytes. Those in FP8 travel as uint8."""
    level, kept = _plugin(trainer).level, _kept(_plugin(trainer), module)
    ids = {id(p) for p in kept}
    trained = [p for p in module.parameters() if p.requires_grad and id(p) not in ids]
    parts = [("all", level.comm, trained, sent)]
    if level.vectors is not None:
        in_fp8 = [s for s in sent if s.dtype == torch.uint8]
        others = [p for p in trained if p.dim() < 2] + kept
        parts = [
            ("matrices", level.comm, [p for p in trained if p.dim() > 1], in_fp8),
            ("vectors", level.vectors, others, [s for s in sent if s not in in_fp8]),
        ]
    elif kept and level.comm != "fp32" and _plugin(trainer).engine.sharding is None:
        plain = [s for s in sent if s.dtype == torch.float32]
        parts = [("all", level.comm, trained, [s for s in sent if s not in plain]), (_KEPT, "fp32", kept, plain)]
    elif kept:
        parts = [("all", level.comm, trained + kept, sent)]
    for part, declared, params, messages in parts:
        if params:
            names = {"fp8" if s.dtype == torch.uint8 else format_of(s.dtype) for s in messages}
            size = sum(s.bytes for s in messages)
            per_param = size / sum(p.numel() for p in params)
            yield Finding("Comm", part, declared, "+".join(sorted(names)) or "–", per_param), size


def _ddp_buckets(trainer: pl.Trainer) -> int | None:
    """Bytes of the copies of gradients that torch's DDP holds; None without it, or where gradients are views of it."""
    ddp = trainer.strategy.model
    if not isinstance(ddp, DistributedDataParallel) or ddp.gradient_as_bucket_view:
        return None
    data = ddp._get_ddp_logging_data()
    sizes = data.get("rebuilt_bucket_sizes") or data["bucket_sizes"]
    return sum(int(size) for size in sizes.split(","))


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
