"""The worst numbers of a sample, for a Trainer's loggers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from nemo_lowprec.report.monitor.operands import KINDS
from nemo_lowprec.report.monitor.sample import Sample

_WORST = {"sqnr": "min", "underflow": "max", "saturation": "max", "lost": "max"}  # SQNR of other names: min


def scalars_of(sample: Sample) -> dict[str, float]:
    """The numbers by name: the worst layer's for each operand, and the worst parameter's.

    ``monitor/sqnr_min/input``, ``monitor/underflow_max/grad_output``, ``monitor/saturation_max/weight``, and so on;
    ``monitor/lost_max``, ``monitor/weight_sqnr_min``, ``monitor/gradient_sqnr_min``, ``monitor/first_sqnr_min``,
    ``monitor/second_sqnr_min``; ``monitor/wire_sqnr``.
    """
    found = {"wire_sqnr": sample.wire_sqnr}
    for kind in KINDS:
        at = [i for i, (_, operand) in enumerate(sample.rows) if operand == kind]
        for metric in ("sqnr", "underflow", "saturation"):
            found[f"{metric}_{_WORST[metric]}/{kind}"] = _worst(metric, sample.operands[metric][at])
    for metric, numbers in sample.params.items():
        found[f"{metric}_{_WORST.get(metric, 'min')}"] = _worst(metric, numbers)
    return {f"monitor/{name}": value for name, value in found.items() if value == value}  # without NaN


def _worst(metric: str, numbers: Tensor) -> float:
    """The largest or the smallest number; NaN for none."""
    known = numbers[~numbers.isnan()]
    if not known.numel():
        return float("nan")
    return float(known.max() if _WORST.get(metric) == "max" else known.min())


def log_sample(loggers: Sequence[Any], sample: Sample) -> None:
    """Write the scalars of a sample to ``loggers``."""
    scalars = scalars_of(sample)
    for logger in loggers:
        logger.log_metrics(scalars, step=sample.step)
