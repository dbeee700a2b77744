"""The FP8 recipe: which formats and scales the operands of a linear layer's three GEMMs get.

    fprop   output      [M, N] = input [M, K] @ weight [N, K].T
    dgrad   grad_input  [M, K] = grad_output [M, N] @ weight [N, K]
    wgrad   grad_weight [N, K] = grad_output [M, N].T @ input [M, K]

Argument names are NeMo's (``fp8``, ``fp8_margin``, ...) and Accelerate's (``interval``,
``override_linear_precision``).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from nemo_lowprec.chart import PrecisionLevel
from nemo_lowprec.compute.weight_scales import WeightScales
from nemo_lowprec.formats.block import MX_32, NVFP4_ROW_16, NVFP4_SQUARE_16, ROW_128, SQUARE_128, BlockLayout
from nemo_lowprec.formats.delayed import DelayedScaling, Slot
from nemo_lowprec.formats.floats import E4M3, E5M2, FloatFormat

__all__ = ["FEATURE_MULTIPLE", "OPERANDS", "Operand", "Recipe"]

OPERANDS = ("input", "weight", "grad_output")

# in_features and out_features must be multiples of this; rows are padded.
FEATURE_MULTIPLE = {"delayed": 16, "current": 16, "blockwise": 16, "mxfp8": 32, "nvfp4": 32}

_ALGOS = ("max", "most_recent")
_FP8_FORMATS = ("hybrid", "e4m3")

# E4M3 has 2**17 between its largest and its smallest number. A margin of 8 leaves half of these powers, one of -1
# clamps what is above half of the amax; beyond, results are zeros or clamped throughout.
_MARGINS = (-1, 8)
_LONGEST_HISTORY = 2**16  # entries of each operand, 4 bytes each

# What each way of scaling takes beside override_linear_precision, with its default. A recipe takes an argument only
# if it has an effect there.
_ARGUMENTS: dict[str, dict[str, Any]] = {
    "delayed": {
        "fp8": "hybrid",
        "fp8_margin": 0,
        "fp8_amax_history_len": 1024,
        "fp8_amax_compute_algo": "max",
        "interval": 1,
    },
    "current": {"fp8": "hybrid", "fp8_margin": 0},
    "blockwise": {"fp8": "e4m3"},
    "mxfp8": {"fp8": "e4m3"},
    "nvfp4": {},
}

_LAYOUTS: dict[str, dict[str, BlockLayout]] = {
    "blockwise": {"input": ROW_128, "weight": SQUARE_128, "grad_output": ROW_128},
    "mxfp8": {"input": MX_32, "weight": MX_32, "grad_output": MX_32},
    "nvfp4": {"input": NVFP4_ROW_16, "weight": NVFP4_SQUARE_16, "grad_output": NVFP4_ROW_16},
}


@dataclass
class Operand:
    """How one operand of a layer's GEMMs is quantized.

    Attributes:
        kind: ``input``, ``weight`` or ``grad_output``.
        scaling: the recipe's way of scaling.
        fmt: the 8-bit format (NVFP4 elements are E2M1 whatever this says).
        margin: per-tensor scales are divided by 2**margin.
        layout: the blocks, where scales are per block.
        slot: amax history and scale, for delayed scaling; a weight's is a ``WeightScale``.
    """

    kind: str
    scaling: str
    fmt: FloatFormat
    margin: int = 0
    layout: BlockLayout | None = None
    slot: Any = None


@dataclass(frozen=True)
class Recipe:
    """Arguments of a level's low-precision GEMMs, checked.

    Args:
        scaling: ``delayed``, ``current``, ``blockwise``, ``mxfp8`` or ``nvfp4``.
        fp8: ``hybrid`` (E4M3, output gradients E5M2) or ``e4m3``.
        fp8_margin: per-tensor scales are divided by 2**fp8_margin, from -1 to 8.
        fp8_amax_history_len: steps in the amax history, at most 65536.
        fp8_amax_compute_algo: ``max`` over the history or its ``most_recent`` entry.
        fp8_params: weights of converted layers stored in FP8, scaled by their own amax at every refresh.
        interval: steps between two computations of the scales.
        override_linear_precision: (fprop, dgrad, wgrad): True runs that GEMM in half precision.
    """

    scaling: str
    fp8: str = "hybrid"
    fp8_margin: int = 0
    fp8_amax_history_len: int = 1024
    fp8_amax_compute_algo: str = "max"
    fp8_params: bool = False
    interval: int = 1
    override_linear_precision: tuple[bool, bool, bool] = field(default=(False, False, False))

    def __post_init__(self) -> None:
        if self.fp8 not in _FP8_FORMATS:
            raise ValueError(f"fp8={self.fp8!r} is no FP8 format. Choose one of: {', '.join(_FP8_FORMATS)}.")
        if self.scaling == "mxfp8" and self.fp8 == "hybrid":
            raise ValueError("fp8='hybrid' diverges with MXFP8 scaling (E5M2 gradients). Use fp8='e4m3'.")
        if self.fp8_amax_compute_algo not in _ALGOS:
            raise ValueError(
                f"fp8_amax_compute_algo={self.fp8_amax_compute_algo!r} is unknown. Choose one of: {', '.join(_ALGOS)}."
            )
        for name, low, high in (
            ("fp8_margin", *_MARGINS),
            ("fp8_amax_history_len", 1, _LONGEST_HISTORY),
            ("interval", 1, None),
        ):
            value = getattr(self, name)
            whole = isinstance(value, int) and not isinstance(value, bool)
            if not whole or value < low or (high is not None and value > high):
                wanted = f"an integer of at least {low}" + (f" and at most {high}" if high is not None else "")
                raise ValueError(f"{name}={value!r} must be {wanted}.")
        if not isinstance(self.fp8_params, bool):
            raise ValueError(f"fp8_params={self.fp8_params!r} must be True or False.")
        flags = self.override_linear_precision
        if isinstance(flags, str) or not hasattr(flags, "__len__") or len(flags) != 3:
            raise ValueError(
                f"override_linear_precision={flags!r} must be three booleans: (fprop, dgrad, wgrad) in half precision."
            )
        if not all(isinstance(f, bool) for f in flags):
            raise ValueError(f"override_linear_precision={tuple(flags)!r} must hold booleans only.")
        object.__setattr__(self, "override_linear_precision", tuple(flags))

    @staticmethod
    def arguments(level: PrecisionLevel) -> dict[str, Any]:
        """The FP8 arguments that ``level`` takes, with their defaults; empty for a level without FP8."""
        if level.scaling is None:
            return {}
        args = dict(_ARGUMENTS[level.scaling])
        if level.fp8_params:
            args["fp8_params"] = False
        args["override_linear_precision"] = (False, False, False)
        return args

    def operand(self, kind: str, slot: Slot | None = None) -> Operand:
        """How the operand ``kind`` of a layer is quantized."""
        fmt = E5M2 if kind == "grad_output" and self.fp8 == "hybrid" else E4M3
        layout = _LAYOUTS[self.scaling][kind] if self.scaling in _LAYOUTS else None
        return Operand(kind, self.scaling, fmt, self.fp8_margin, layout, slot)

    def histories(self) -> DelayedScaling | None:
        """A new table of amax histories, for delayed scaling. Weights have none."""
        if self.scaling != "delayed":
            return None
        return DelayedScaling(
            self.fp8_amax_history_len,
            self.fp8_amax_compute_algo,  # type: ignore[arg-type]
            self.fp8_margin,
            self.interval,
        )

    def weight_scales(self) -> WeightScales | None:
        """A new table of the scales of weights, for delayed scaling."""
        return WeightScales(self.operand("weight").fmt, self.fp8_margin) if self.scaling == "delayed" else None
