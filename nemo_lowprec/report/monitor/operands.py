"""Errors of the operands of all GEMMs of a model, and of the gradients that are stored in FP8."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from nemo_lowprec.compute.backends.base import Orientation
from nemo_lowprec.observers import Observer
from nemo_lowprec.report.monitor.table import ErrorTable
from nemo_lowprec.tensors import QuantizedTensor

KINDS = ("input", "weight", "grad_output")


class OperandErrors(Observer):
    """Adds up the errors of the operands while it observes.

    Args:
        layers: names of the layers, in the order of the model.
        device: of the model.

    Attributes:
        rows: (layer, operand) of each row of the table.
        table: the sums.
    """

    capturable = True

    def __init__(self, layers: Sequence[str], device: torch.device) -> None:
        self.rows = [(layer, kind) for layer in layers for kind in KINDS]
        self._at = {row: i for i, row in enumerate(self.rows)}
        self.table = ErrorTable(len(self.rows), device)
        self._one = torch.ones(1, device=device, dtype=torch.float32)

    def quantized(self, layer: str, kind: str, values: Tensor, operand: Any, backend: Any) -> None:
        row = self._at.get((layer, kind))
        if row is None:
            return
        if isinstance(operand, Tensor):  # a GEMM in half precision
            if operand.dtype == values.dtype:
                return
            part, columnwise = Orientation(operand, self._one, None), False
        else:
            part, columnwise = backend.stored(operand)
        if isinstance(values, QuantizedTensor):  # a weight in low-bit storage: compared with its master, if it has one
            values = values.exact_storage()
        values = values.reshape(-1, values.shape[-1])
        if columnwise:
            values = values.t()
        self.table.add(row, values, part._replace(data=part.data.reshape(values.shape)))


class GradientErrors(Observer):
    """Adds up the errors of gradients that are stored in FP8 while it observes.

    Args:
        params: of the optimizers, a row each; None for a parameter that another process has.
        device: of the model.

    Attributes:
        table: the sums.
    """

    capturable = True

    def __init__(self, params: Sequence[Tensor | None], device: torch.device) -> None:
        self._at = {id(param): i for i, param in enumerate(params) if param is not None}
        self._owners: Mapping[int, Tensor] = {}
        self.table = ErrorTable(len(params), device)

    def begin(self, owners: Mapping[int, Tensor]) -> None:
        """Empty the table. ``owners`` has sharded parameters by the ids of their gathered matrices."""
        self.table.clear()
        self._owners = owners

    def gradient(self, param: Tensor, stored: Any, values: Tensor | None) -> None:
        row = self._at.get(id(self._owners.get(id(param), param)))
        if row is not None and values is not None:
            self.table.add_gradient(row, values, stored)
