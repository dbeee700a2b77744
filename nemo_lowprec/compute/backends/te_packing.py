"""Transformer Engine's quantized operands as lists of plain tensors, for compiled graphs; on Hopper and Ada.

Data are bytes, as Transformer Engine has them. Columnwise data are the transpose.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nemo_lowprec.compute.backends.base import Packing
from nemo_lowprec.compute.operands import Operand


class PerTensor(Packing):
    """With a scale per tensor: [data [rows, features], data.T, scale_inv].

    Args:
        storage: Transformer Engine's class.
        dtype: Transformer Engine's name of the format.
    """

    def __init__(self, storage: Any, dtype: Any) -> None:
        self._storage, self._dtype = storage, dtype

    def pack(self, operand: Any) -> list[Tensor]:
        parts = operand.get_metadata()
        return _there(parts, "data", "data_transpose", "fp8_scale_inv")

    def unpack(self, tensors: list[Tensor], rowwise: bool, columnwise: bool) -> Any:
        *data, scale_inv = tensors
        return self._storage(
            data=data[0] if rowwise else None, data_transpose=data[-1] if columnwise else None,
            fp8_scale_inv=scale_inv, fp8_dtype=self._dtype,
        )  # fmt: skip

    def like(self, values: Tensor, operand: Operand, rowwise: bool, columnwise: bool) -> list[Tensor]:
        rows, features = values.shape
        shapes = [(rows, features)] * rowwise + [(features, rows)] * columnwise
        data = [values.new_empty(shape, dtype=torch.uint8) for shape in shapes]
        return [*data, values.new_empty(1, dtype=torch.float32)]

    def columnwise(self, tensors: list[Tensor], rowwise: bool) -> list[Tensor]:
        return tensors[1:] if rowwise else tensors


class InBlocks(Packing):
    """In blocks of 128 values: [data [rows, features], scale_inv, data.T, scale_inv].

    Args:
        storage, dtype: see ``PerTensor``.
        quantizer: Transformer Engine's, which knows the shapes of scales.
    """

    def __init__(self, storage: Any, dtype: Any, quantizer: Any) -> None:
        self._storage, self._dtype, self._quantizer = storage, dtype, quantizer

    def pack(self, operand: Any) -> list[Tensor]:
        parts = operand.get_metadata()
        return _there(parts, "rowwise_data", "rowwise_scale_inv", "columnwise_data", "columnwise_scale_inv")

    def unpack(self, tensors: list[Tensor], rowwise: bool, columnwise: bool) -> Any:
        row = tensors[:2] if rowwise else (None, None)
        col = tensors[-2:] if columnwise else (None, None)
        in_squares = self._quantizer.block_scaling_dim == 2
        return self._storage(*row, *col, self._dtype, self._quantizer, in_squares)

    def like(self, values: Tensor, operand: Operand, rowwise: bool, columnwise: bool) -> list[Tensor]:
        tensors: list[Tensor] = []
        for wanted, transposed in ((rowwise, False), (columnwise, True)):
            if wanted:
                shape = values.shape[::-1] if transposed else values.shape
                scales = self._quantizer.get_scale_shape(values.shape, transposed)
                tensors += [values.new_empty(shape, dtype=torch.uint8), values.new_empty(scales, dtype=torch.float32)]
        return tensors

    def columnwise(self, tensors: list[Tensor], rowwise: bool) -> list[Tensor]:
        return tensors[2:] if rowwise else tensors


def _there(parts: dict[str, Any], *names: str) -> list[Tensor]:
    """Those of ``parts`` with these names that are there."""
    return [parts[name] for name in names if parts[name] is not None]
