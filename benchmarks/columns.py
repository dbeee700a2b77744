"""The bytes that a model's training takes, by column of the precision chart, as ``Audit`` finds them in a real step."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl

from benchmarks.measure import DEVICE, stay_on_gpu
from nemo_lowprec.plugins import LEVELS
from nemo_lowprec.report import Audit

__all__ = ["bytes_by_column"]

_COLUMNS = ("Weight", "Master weight", "Weight gradient", "Optimizer states")


def bytes_by_column(model: pl.LightningModule, level: str, **options: Any) -> dict[str, Any]:
    """Train two steps at a level. Returns the bytes that the audit finds in the second step, by column, a parameter."""
    audit = Audit()
    options |= {} if DEVICE.type == "cuda" else {"backend": "reference"}
    model.on_train_end = lambda: stay_on_gpu(model.trainer, model)  # type: ignore[method-assign]
    pl.Trainer(
        accelerator="auto", devices=1, max_steps=2, plugins=LEVELS[level](**options), callbacks=[audit],
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    ).fit(model)  # fmt: skip
    assert audit.report is not None
    count = sum(p.numel() for p in model.parameters())
    found = {column: audit.report.total_bytes.get(column, 0) / count for column in _COLUMNS}
    return {
        "parameters": count, "agrees": audit.report.agrees, "bytes_per_param": round(sum(found.values()), 4),
        "by_column": {k: round(v, 4) for k, v in found.items()},
    }  # fmt: skip
