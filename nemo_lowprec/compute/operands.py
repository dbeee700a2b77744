"""Formats and scales of the operands of a linear layer's three GEMMs (``backends/base.py``), by the recipe."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from nemo_lowprec.chart.recipe import Recipe
from nemo_lowprec.formats.delayed import AmaxSlot, DelayedScaling
from nemo_lowprec.formats.floats import E4M3, E5M2, FloatFormat
from nemo_lowprec.formats.gemm_block_scaling import (
    MX_32,
    NVFP4_ROW_16,
    NVFP4_SQUARE_16,
    ROW_128,
    SQUARE_128,
    WHOLE_ROW,
    BlockLayout,
)
from nemo_lowprec.formats.scale import compute_scale

OPERANDS = ("input", "weight", "grad_output")

# in_features and out_features must be multiples of this; rows are padded.
FEATURE_MULTIPLE = {"delayed": 16, "current": 16, "rowwise": 16, "blockwise": 16, "mxfp8": 32, "nvfp4": 32}

_LAYOUTS: dict[str, dict[str, BlockLayout]] = {
    "rowwise": {"input": WHOLE_ROW, "weight": WHOLE_ROW, "grad_output": WHOLE_ROW},
    "blockwise": {"input": ROW_128, "weight": SQUARE_128, "grad_output": ROW_128},
    "mxfp8": {"input": MX_32, "weight": MX_32, "grad_output": MX_32},
    "nvfp4": {"input": NVFP4_ROW_16, "weight": NVFP4_SQUARE_16, "grad_output": NVFP4_ROW_16},
}


@dataclass
class Operand:
    """How one operand of a layer's GEMMs is quantized.

    Attributes:
        kind: ``input``, ``weight`` or ``grad_output``.
        scaling: the recipe's scaling.
        fmt: the 8-bit format. NVFP4 ignores it: its elements are E2M1.
        margin: per-tensor scales are divided by 2**margin.
        layout: the blocks of a block scaling; None for scales per tensor.
        slot: for delayed scaling, the amax history and scale: an ``AmaxSlot``, for a weight a ``WeightScale``.
        expected, direct: of an output gradient: whether a module has said that the gradient comes from it, and whether
            the gradient came from it as it was, without a hook or another module's gradient (see ``GradReader``).
        offered: whether the last gradient was handed over, or announced, by the module that it came from.
    """

    kind: str
    scaling: str
    fmt: FloatFormat
    margin: int = 0
    layout: BlockLayout | None = None
    slot: Any = None
    expected: bool = field(default=False, compare=False, repr=False)
    direct: bool = field(default=True, compare=False, repr=False)
    offered: bool = field(default=False, compare=False, repr=False)

    def scale(self, amax: Tensor, record: bool) -> Tensor:
        """The scale per tensor, FP32 [1], for a tensor with ``amax``, which ``record`` enters into the history."""
        if self.slot is None:
            return compute_scale(amax.reshape(1), self.fmt.max, self.margin)
        if record:
            self.slot.record(amax)
        return self.slot.current_scale(amax)  # type: ignore[no-any-return]


def operand_of(recipe: Recipe, kind: str, slot: AmaxSlot | None = None) -> Operand:
    """How the operand ``kind`` of a layer is quantized, with delayed scaling by the history in ``slot``."""
    fmt = E5M2 if kind == "grad_output" and recipe.fp8 == "hybrid" else E4M3
    layout = _LAYOUTS[recipe.scaling][kind] if recipe.scaling in _LAYOUTS else None
    return Operand(kind, recipe.scaling, fmt, recipe.fp8_margin, layout, slot)


def new_histories(recipe: Recipe) -> DelayedScaling | None:
    """An empty table of amax histories, for delayed scaling; weights have none."""
    if recipe.scaling != "delayed":
        return None
    return DelayedScaling(
        recipe.fp8_amax_history_len,
        recipe.fp8_amax_compute_algo,  # type: ignore[arg-type]
        recipe.fp8_margin,
        recipe.interval,
    )
