"""The worst numbers of a sample, and heatmaps of all samples, for a Trainer's loggers."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor

from nemo_lowprec.report.monitor.heatmap_image import SCALES, as_pixels, heatmap_image
from nemo_lowprec.report.monitor.operands import KINDS
from nemo_lowprec.report.monitor.sample import Sample
from nemo_lowprec.report.monitor.worst_by_layer import WorstByLayer

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


class LoggedHeatmaps:
    """Layers over steps as images, for TensorBoard and for loggers with Lightning's ``log_image``, as Weights & Biases.

    Without Pillow there are no images.

    Args:
        loggers: of the Trainer; others than these get no images.
    """

    def __init__(self, loggers: Sequence[Any]) -> None:
        self._loggers = [
            logger for logger in loggers if isinstance(logger, TensorBoardLogger) or hasattr(logger, "log_image")
        ]
        self._worst = WorstByLayer()
        self._is_new = False

    def add(self, sample: Sample) -> None:
        """Note a sample for the next images."""
        if self._loggers and sample.rows:
            self._worst.add(sample)
            self._is_new = True

    def log(self, step: int) -> None:
        """Write one image for each metric, unless nothing was sampled since the last ones."""
        if not self._is_new or find_spec("PIL") is None:
            return
        self._is_new = False
        for metric, scale in SCALES.items():
            names, numbers = self._worst.table(metric)
            image = heatmap_image(names, self._worst.steps, numbers, scale)
            for logger in self._loggers:
                if isinstance(logger, TensorBoardLogger):
                    pixels = as_pixels(image)
                    logger.experiment.add_image(f"monitor/{metric}", pixels, step, dataformats="HWC")
                else:
                    logger.log_image(f"monitor/{metric}", [image], step=step)
