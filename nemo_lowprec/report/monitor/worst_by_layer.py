"""The worst operand of each layer in each sample so far, thinned where a run is long."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from nemo_lowprec.report.monitor.sample import Sample

_COLUMNS = 200
_LAYERS = 1000
LOWEST_IS_WORST = {"sqnr": True, "underflow": False, "saturation": False}  # of the metrics that are kept


class WorstByLayer:
    """Numbers by layer and sample.

    From 200 columns on a column stands for twice as many samples as before, and has the worst of them. Of more than
    1000 layers, neighbours share a row in the same way.

    Attributes:
        steps: of each column the first sampled step.
    """

    def __init__(self) -> None:
        self._places: dict[str, int] = {}  # of layers
        self.steps: list[int] = []
        self._columns: dict[str, list[Tensor]] = {metric: [] for metric in LOWEST_IS_WORST}  # FP64 [layers] each
        self._samples = 1  # of a column
        self._in_last = 0  # samples in the last column

    @property
    def layers(self) -> list[str]:
        """Names in the order of the model."""
        return list(self._places)

    def add(self, sample: Sample) -> None:
        """Note one sample."""
        places = [self._places.setdefault(layer, len(self._places)) for layer, _ in sample.rows]
        rows = torch.tensor(places, dtype=torch.int64, device="cpu")
        begins = self._in_last % self._samples == 0
        if begins and len(self.steps) == _COLUMNS:
            self._halve()
        if begins:
            self.steps.append(sample.step)
            self._in_last = 0
        self._in_last += 1
        for metric, columns in self._columns.items():
            column = self._worst_operands(metric, rows, sample.operands[metric])
            if begins:
                columns.append(column)
            else:
                columns[-1] = _worst(metric, _padded(columns[-1], len(column)), column)

    def table(self, metric: str) -> tuple[list[str], Tensor]:
        """Names of at most 1000 rows, and their numbers FP64 [rows, columns]; NaN where there is none."""
        layers = self.layers
        columns = [_padded(column, len(layers)) for column in self._columns[metric]]
        whole = torch.stack(columns, dim=1) if columns else torch.zeros(0, 0, dtype=torch.float64, device="cpu")
        size = -(-len(layers) // _LAYERS) or 1
        parts = [_worst_of(metric, part) for part in whole.split(size)] if columns else []
        return layers[::size], torch.stack(parts) if parts else whole

    def _worst_operands(self, metric: str, rows: Tensor, numbers: Tensor) -> Tensor:
        """The worst number of each layer; NaN where a layer has none."""
        lowest = LOWEST_IS_WORST[metric]
        none = math.inf if lowest else -math.inf
        column = torch.full((len(self._places),), none, dtype=torch.float64, device="cpu")
        known = torch.where(numbers.isnan(), none, numbers)
        column.scatter_reduce_(0, rows, known, "amin" if lowest else "amax")
        return torch.where(column == none, torch.nan, column)

    def _halve(self) -> None:
        """Merge each column with the next one."""
        for metric, columns in self._columns.items():
            padded = [_padded(column, len(self._places)) for column in columns]
            columns[:] = [_worst(metric, *pair) for pair in zip(padded[::2], padded[1::2], strict=True)]
        self.steps = self.steps[::2]
        self._samples *= 2


def _worst(metric: str, a: Tensor, b: Tensor) -> Tensor:
    return torch.fmin(a, b) if LOWEST_IS_WORST[metric] else torch.fmax(a, b)  # a number where the other one is NaN


def _worst_of(metric: str, rows: Tensor) -> Tensor:
    worst = rows[0]
    for row in rows[1:]:
        worst = _worst(metric, worst, row)
    return worst


def _padded(column: Tensor, length: int) -> Tensor:
    """``column`` with NaN for layers that came later."""
    return torch.nn.functional.pad(column, (0, length - len(column)), value=torch.nan)
