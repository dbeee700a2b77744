"""The worst numbers of a sample, for a Trainer's loggers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from nemo_lowprec.report.monitor.operands import KINDS
from nemo_lowprec.report.monitor.sample import PARAM_METRICS, Sample


def scalars_of(sample: Sample) -> dict[str, float]:
    """The numbers by name: the worst layer's for each operand, and the worst parameter's.

    ``monitor/sqnr_min/input``, ``monitor/underflow_max/grad_output``, ``monitor/saturation_max/weight``, and so on;
    ``monitor/lost_max``, ``monitor/weight_sqnr_min``, ``monitor/gradient_sqnr_min``, ``monitor/first_sqnr_min``,
    ``monitor/second_sqnr_min``; ``monitor/wire_sqnr``.
    """
    found: dict[str, float | None] = {"wire_sqnr": sample.wire_sqnr}
    for kind in KINDS:
        errors = [each for (_, operand), each in sample.operands.items() if operand == kind]
        found[f"sqnr_min/{kind}"] = _end(min, (each.sqnr for each in errors))
        found[f"underflow_max/{kind}"] = _end(max, (each.underflow for each in errors))
        found[f"saturation_max/{kind}"] = _end(max, (each.saturation for each in errors))
    for i, metric in enumerate(PARAM_METRICS):
        of, end = (max, "max") if metric == "lost" else (min, "min")
        found[f"{metric}_{end}"] = _end(of, (numbers[i] for numbers in sample.params.values()))
    return {f"monitor/{name}": value for name, value in found.items() if value is not None}


def _end(of: Any, numbers: Iterable[float | None]) -> float | None:
    return of((number for number in numbers if number is not None), default=None)  # type: ignore[no-any-return]


def log_sample(loggers: Sequence[Any], sample: Sample) -> None:
    """Write the scalars of a sample to ``loggers``."""
    scalars = scalars_of(sample)
    for logger in loggers:
        logger.log_metrics(scalars, step=sample.step)
