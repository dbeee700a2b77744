"""The worst operand of each layer in each sample so far, thinned where a run is long."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nemo_lowprec.report.monitor.sample import Row, Sample

_COLUMNS = 200
_LAYERS = 1000
LOWEST_IS_WORST = {"sqnr": True, "underflow": False, "saturation": False}  # of the metrics that are kept


class WorstByLayer:
    """Numbers by layer and sample.

    From 200 columns on a column stands for twice as many samples as before, and has the worst of them. Of more than
    1000 layers, neighbours share a row in the same way.

    Attributes:
        layers: names in the order of the model.
        steps: of each column the first sampled step.
    """

    def __init__(self) -> None:
        self.layers: list[str] = []
        self.steps: list[int] = []
        self._columns: dict[str, list[Tensor]] = {metric: [] for metric in LOWEST_IS_WORST}  # FP64 [layers] each
        self._samples = 1  # of a column
        self._in_last = 0  # samples in the last column

    def add(self, sample: Sample) -> None:
        """Note one sample."""
        rows = self._rows_of(sample.rows)
        begins = self._in_last % self._samples == 0
        if begins and len(self.steps) == _COLUMNS:
            self._halve()
        if begins:
            self.steps.append(sample.step)
            self._in_last = 0
        self._in_last += 1
        for metric, columns in self._columns.items():
            column = torch.full((len(self.layers),), torch.nan, dtype=torch.float64, device="cpu")
            for row, number in zip(rows, sample.operands[metric], strict=True):
                column[row] = _worst(metric, column[row], number)
            if begins:
                columns.append(column)
            else:
                columns[-1] = _worst(metric, _padded(columns[-1], len(column)), column)

    def table(self, metric: str) -> tuple[list[str], Tensor]:
        """Names of at most 1000 rows, and their numbers FP64 [rows, columns]; NaN where there is none."""
        columns = [_padded(column, len(self.layers)) for column in self._columns[metric]]
        whole = torch.stack(columns, dim=1) if columns else torch.zeros(0, 0, dtype=torch.float64, device="cpu")
        size = -(-len(self.layers) // _LAYERS) or 1
        parts = [_worst_of(metric, part) for part in whole.split(size)] if columns else []
        return self.layers[::size], torch.stack(parts) if parts else whole

    def _rows_of(self, rows: Sequence[Row]) -> list[int]:
        for layer, _ in rows:
            if layer not in self.layers:
                self.layers.append(layer)
        places = {layer: i for i, layer in enumerate(self.layers)}
        return [places[layer] for layer, _ in rows]

    def _halve(self) -> None:
        """Merge each column with the next one."""
        for metric, columns in self._columns.items():
            padded = [_padded(column, len(self.layers)) for column in columns]
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
