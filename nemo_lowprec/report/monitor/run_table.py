"""The numbers of a run's samples by row, in arrays."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Row = tuple[str, ...]  # (layer, operand), or (parameter,)
Array = npt.NDArray[np.float64]


class ByRow(Mapping[Row, list[float | None]]):
    """The numbers of one metric: row to a list of one number for each sample, None where there is none.

    A list is made when it is asked for, and is a copy: Python's floats take four times the memory of the array.

    Args:
        places: the index of each row in ``values``.
        values: [rows, samples]; NaN where there is no number.
    """

    def __init__(self, places: Mapping[Row, int], values: Array) -> None:
        self._places, self._values = places, values

    def __getitem__(self, row: Row) -> list[float | None]:
        return [None if value != value else value for value in self._values[self._places[row]].tolist()]

    def __setitem__(self, row: Row, numbers: Sequence[float | None]) -> None:
        self._values[self._places[row]] = np.array(numbers, dtype=np.float64)

    def __iter__(self) -> Iterator[Row]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def matrix(self, rows: Sequence[Row]) -> Array:
        """The numbers of ``rows`` [rows, samples], a copy; NaN where there is none."""
        return self._values[[self._places[row] for row in rows]]


@dataclass
class Table:
    """Numbers by row and sample.

    Attributes:
        rows: in the order of the model.
        metrics: metric to the numbers of each row, one for each of ``Run.steps``; None where there is none. Empty
            without rows.
    """

    rows: list[Row] = field(default_factory=list)
    metrics: dict[str, ByRow] = field(default_factory=dict)

    def of(self, metric: str, row: Row) -> list[float | None]:
        """The numbers of one row."""
        return self.metrics[metric][row]

    def matrix(self, metric: str) -> Array:
        """The numbers of all rows [rows, samples]; NaN where there is none."""
        return self.metrics[metric].matrix(self.rows)


class Sampled(NamedTuple):
    """The numbers of one sample.

    Attributes:
        rows: of the sample.
        metrics: metric to its numbers [rows]; NaN where there is none.
    """

    rows: Sequence[Row]
    metrics: dict[str, Array]


def sampled(rows: Sequence[Row], numbers: Mapping[str, Sequence[float | None]]) -> Sampled:
    """The numbers of one sample: of each metric one for each of ``rows``, None where there is none."""
    return Sampled(rows, {metric: np.array(v, dtype=np.float64).reshape(len(rows)) for metric, v in numbers.items()})


def table_of(samples: Sequence[Sampled]) -> Table:
    """The samples as one table, with a row for each row of any sample."""
    rows = list(dict.fromkeys(row for sample in samples for row in sample.rows if sample.metrics))
    if not rows:
        return Table()
    places = {row: place for place, row in enumerate(rows)}
    names = dict.fromkeys(metric for sample in samples for metric in sample.metrics)
    found = {metric: np.full((len(rows), len(samples)), np.nan) for metric in names}
    for index, sample in enumerate(samples):
        at = np.array([places[row] for row in sample.rows], dtype=np.intp)
        for metric, numbers in sample.metrics.items():
            found[metric][at, index] = numbers
    return Table(rows, {metric: ByRow(places, values) for metric, values in found.items()})
