"""Errors of a layer's operands under each way of scaling, by the definitions of ``formats``.

The operands are those of one forward and backward pass in half precision, so that no operand has the errors of others.

Delayed scaling takes its scale from earlier tensors. Here these are the first seven eighths of a tensor's rows: their
amax scales the last eighth, as a history of seven micro-batches scales the next one. Rows are the samples of a batch
one after the other, or the tokens of a single sample. A drift of amaxes from step to step is not in these errors.
Weights have no history, and are scaled by their own amax. Rowwise and blockwise scaling round an operand along its rows
for one GEMM and along its columns for another one, and both count.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nemo_lowprec.chart.recipe import Recipe
from nemo_lowprec.compat.autograd import current_backward
from nemo_lowprec.compute.operands import operand_of
from nemo_lowprec.formats import (
    FloatFormat,
    cast,
    compute_amax,
    compute_scale,
    decode,
    dequantize_blocks,
    quantize_blocks,
)
from nemo_lowprec.formats.errors import Errors, add_errors, clipped_beyond, new_sums
from nemo_lowprec.observers import Observer
from nemo_lowprec.report.bounds import PER_TENSOR
from nemo_lowprec.tensors import QuantizedTensor

SCALINGS = (*PER_TENSOR, "rowwise", "blockwise")  # whose errors are looked at
_PARTS = 8  # of a tensor's rows, of which all but the last one make up the history of delayed scaling
_ELEMENTS = 2**24  # of which errors are added at a time


class Rounded(NamedTuple):
    """One operand of one layer under one way of scaling.

    Attributes:
        layer: name of the layer in ``Conversion``.
        kind: ``input``, ``weight`` or ``grad_output``.
        scaling: of ``way_of``.
    """

    layer: str
    kind: str
    scaling: str


def way_of(recipe: Recipe) -> str:
    """The way in which a recipe scales, in words: "delayed", or with options that change errors "delayed, margin 1"."""
    words = [recipe.scaling]
    if recipe.scaling in PER_TENSOR:
        words += [f"margin {recipe.fp8_margin}"] * (recipe.fp8_margin != 0) + ["e4m3"] * (recipe.fp8 == "e4m3")
    return ", ".join(words)


class OperandErrors(Observer):
    """Subscriber that adds up the errors of every operand under each of several recipes.

    Args:
        recipes: of the ways of scaling, by ``way_of``.
        layers: the names of the layers to look at.
    """

    def __init__(self, recipes: Mapping[str, Recipe], layers: Iterable[str]) -> None:
        self._recipes, self._layers = recipes, set(layers)
        self._sums: dict[Rounded, tuple[Tensor, Tensor]] = {}

    def quantized(self, layer: str, kind: str, values: Tensor, operand: Any, backend: Any) -> None:
        if layer not in self._layers or self._was_there(layer, kind):
            return
        values = values.dequantize(torch.float32) if isinstance(values, QuantizedTensor) else values.detach().float()
        values = values.reshape(-1, values.shape[-1])
        for way, recipe in self._recipes.items():
            sums, extremes = self._of(Rounded(layer, kind, way), values.device)
            _add(sums[0], extremes[0], values, kind, recipe)

    def read(self) -> dict[Rounded, Errors]:
        """The errors so far, by operand."""
        if not self._sums:
            return {}
        sums = torch.cat([sums for sums, _ in self._sums.values()]).tolist()
        extremes = torch.cat([extremes for _, extremes in self._sums.values()]).tolist()
        return {key: Errors.read(*row) for key, row in zip(self._sums, zip(sums, extremes, strict=True), strict=True)}

    def _was_there(self, layer: str, kind: str) -> bool:
        """Whether this pass has announced the operand before: a weight for another GEMM, an input in forward."""
        if kind == "weight":
            return any(Rounded(layer, kind, way) in self._sums for way in self._recipes)
        return kind == "input" and current_backward() != -1

    def _of(self, key: Rounded, device: torch.device) -> tuple[Tensor, Tensor]:
        if key not in self._sums:
            self._sums[key] = new_sums(1, device)
        return self._sums[key]


def _add(sums: Tensor, extremes: Tensor, values: Tensor, kind: str, recipe: Recipe) -> None:
    """Add the errors of ``values`` FP32 [rows, features] under ``recipe``."""
    how = operand_of(recipe, kind)
    limit = clipped_beyond(how.fmt)
    if how.layout is not None:
        for matrix in (values, values.t()):
            rounded = quantize_blocks(matrix, how.fmt, how.layout)
            ones = replace(rounded, data=torch.ones_like(rounded.data, dtype=torch.float32))
            _add_parts(sums, extremes, matrix, dequantize_blocks(rounded), dequantize_blocks(ones), limit)
        return
    earlier, rows = values, len(values) * (_PARTS - 1) // _PARTS
    if recipe.scaling == "delayed" and kind != "weight" and rows:
        earlier, values = values[:rows], values[rows:]
    scale = _scale(earlier, values, how.fmt, how.margin)
    stored = decode(cast(values * scale, how.fmt)) / scale
    _add_parts(sums, extremes, values, stored, scale.reciprocal().expand(values.shape), limit)


def _add_parts(
    sums: Tensor, extremes: Tensor, values: Tensor, stored: Tensor, scale_inv: Tensor, limit: float
) -> None:  # fmt: skip
    """Add the errors of one part of the rows after the other, so that FP64 copies stay small."""
    rows = max(1, _ELEMENTS // values.shape[1])
    for parts in zip(values.split(rows), stored.split(rows), scale_inv.split(rows), strict=True):
        add_errors(sums, extremes, *parts, limit)


def _scale(earlier: Tensor, values: Tensor, fmt: FloatFormat, margin: int) -> Tensor:
    """The scale that ``earlier`` gives, FP32 scalar; without an amax of ``earlier``, as without a history, its own."""
    own = compute_scale(compute_amax(values), fmt.max, margin)
    return compute_scale(compute_amax(earlier), fmt.max, margin, previous=own)


def by_scaling(errors: Mapping[Rounded, Errors], scaling: str) -> dict[Rounded, Errors]:
    """The errors under one way of scaling."""
    return {key: found for key, found in errors.items() if key.scaling == scaling}
