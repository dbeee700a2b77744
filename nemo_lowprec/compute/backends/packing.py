"""Quantized operands as lists of plain tensors: the values of a compiled graph.

No tensor of a list is a view of another one, and all are contiguous, as the compiler expects of an operator's results.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nemo_lowprec.compute.backends.base import Orientation, Packing, QuantizedOperand
from nemo_lowprec.compute.operands import Operand
from nemo_lowprec.formats.gemm_block_scaling import BlockLayout, scales_shape


class SharedData(Packing):
    """One tensor in both orientations, with a scale per tensor: [data [rows, features], scale_inv]."""

    def pack(self, operand: Any) -> list[Tensor]:
        data = operand.columnwise.data.t() if operand.rowwise is None else operand.rowwise.data
        return [data.contiguous(), (operand.rowwise or operand.columnwise).scale_inv]

    def unpack(self, tensors: list[Tensor], rowwise: bool, columnwise: bool) -> Any:
        data, scale_inv = tensors
        return QuantizedOperand(
            Orientation(data, scale_inv, None) if rowwise else None,
            Orientation(data.t(), scale_inv, None) if columnwise else None,
        )

    def like(self, values: Tensor, operand: Operand, rowwise: bool, columnwise: bool) -> list[Tensor]:
        return [values.new_empty(values.shape, dtype=operand.fmt.dtype), _fp32(values, 1)]

    def columnwise(self, tensors: list[Tensor], rowwise: bool) -> list[Tensor]:
        return tensors


class TwoCopies(Packing):
    """A copy for each orientation, with a scale per tensor: [data [rows, features], data.T, scale_inv]."""

    def pack(self, operand: Any) -> list[Tensor]:
        parts = [part for part in (operand.rowwise, operand.columnwise) if part is not None]
        return [*(part.data for part in parts), parts[0].scale_inv]

    def unpack(self, tensors: list[Tensor], rowwise: bool, columnwise: bool) -> Any:
        *data, scale_inv = tensors
        return QuantizedOperand(
            Orientation(data[0], scale_inv, None) if rowwise else None,
            Orientation(data[-1], scale_inv, None) if columnwise else None,
        )

    def like(self, values: Tensor, operand: Operand, rowwise: bool, columnwise: bool) -> list[Tensor]:
        rows, features = values.shape
        shapes = [(rows, features)] * rowwise + [(features, rows)] * columnwise
        return [*(values.new_empty(shape, dtype=operand.fmt.dtype) for shape in shapes), _fp32(values, 1)]

    def columnwise(self, tensors: list[Tensor], rowwise: bool) -> list[Tensor]:
        return tensors[1:] if rowwise else tensors


class Blocks(Packing):
    """Data and scales for each orientation: [data [rows, features], scale_inv, data [rows, features], scale_inv].

    Columnwise data are stored as they come out of quantization: transposed but for formats of E2M1.
    """

    def __init__(self, layout: BlockLayout) -> None:
        self.layout = layout
        self._transposed = layout.scale != "e4m3"

    def pack(self, operand: Any) -> list[Tensor]:
        tensors: list[Tensor] = []
        if operand.rowwise is not None:
            tensors += [operand.rowwise.data, operand.rowwise.scale_inv]
        if operand.columnwise is not None:
            data = operand.columnwise.data
            tensors += [data.t() if self._transposed else data, operand.columnwise.scale_inv]
        return [tensor.contiguous() for tensor in tensors]

    def unpack(self, tensors: list[Tensor], rowwise: bool, columnwise: bool) -> Any:
        row = Orientation(tensors[0], tensors[1], self.layout) if rowwise else None
        data, scale_inv = tensors[-2:]
        data = data.t() if self._transposed else data
        return QuantizedOperand(row, Orientation(data, scale_inv, self.layout) if columnwise else None)

    def like(self, values: Tensor, operand: Operand, rowwise: bool, columnwise: bool) -> list[Tensor]:
        rows, features = values.shape
        dtype = operand.fmt.dtype if self._transposed else torch.float32
        tensors: list[Tensor] = []
        if rowwise:
            tensors += [values.new_empty((rows, features), dtype=dtype), self._scales(values, rows, features)]
        if columnwise:
            shape = (rows, features) if self._transposed else (features, rows)
            tensors += [values.new_empty(shape, dtype=dtype), self._scales(values, features, rows)]
        return tensors

    def _scales(self, values: Tensor, rows: int, cols: int) -> Tensor:
        return _fp32(values, *self.layout.grid(rows, cols))

    def columnwise(self, tensors: list[Tensor], rowwise: bool) -> list[Tensor]:
        return tensors[2:] if rowwise else tensors


class TwoCopiesInBlocks(Packing):
    """A copy for each orientation, with scales as a GPU's GEMMs read them: [data, scale_inv, data.T, scale_inv]."""

    def __init__(self, layout: BlockLayout) -> None:
        self.layout = layout

    def pack(self, operand: Any) -> list[Tensor]:
        parts = [part for part in (operand.rowwise, operand.columnwise) if part is not None]
        return [tensor for part in parts for tensor in (part.data, part.scale_inv)]

    def unpack(self, tensors: list[Tensor], rowwise: bool, columnwise: bool) -> Any:
        return QuantizedOperand(
            Orientation(tensors[0], tensors[1], self.layout) if rowwise else None,
            Orientation(tensors[-2], tensors[-1], self.layout) if columnwise else None,
        )

    def like(self, values: Tensor, operand: Operand, rowwise: bool, columnwise: bool) -> list[Tensor]:
        rows, features = values.shape
        tensors: list[Tensor] = []
        for shape in [(rows, features)] * rowwise + [(features, rows)] * columnwise:
            layout = self.layout
            grid = scales_shape(layout.rows > 1, *shape) if layout.for_cublas else layout.grid(*shape)
            tensors += [values.new_empty(shape, dtype=operand.fmt.dtype), _fp32(values, *grid)]
        return tensors

    def columnwise(self, tensors: list[Tensor], rowwise: bool) -> list[Tensor]:
        return tensors[2:] if rowwise else tensors


def _fp32(values: Tensor, *shape: int) -> Tensor:
    return values.new_empty(shape, dtype=torch.float32)
