"""Arguments of a level's low-precision GEMMs.

Argument names are NeMo's (``fp8``, ``fp8_margin``, ...) and Accelerate's (``interval``,
``override_linear_precision``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from annotated_types import Ge, Le

from nemo_lowprec.arguments import AtLeast1, check_value
from nemo_lowprec.chart.rows import PrecisionLevel

_ALGOS = ("max", "most_recent")
_FP8_FORMATS = ("hybrid", "e4m3")

# E4M3 has 18 powers of two, 2**-9 to 2**8. A margin of 8 leaves ten of them, and a margin of -1 clamps values above
# half of the amax. Margins beyond these two give zeros or clamped values throughout.
_Margin = Annotated[int, Ge(-1), Le(8), "an integer of at least -1 and at most 8"]
# Entries of each operand, 4 bytes each.
_HistoryLength = Annotated[int, Ge(1), Le(2**16), "an integer of at least 1 and at most 65536"]

# The arguments of each way of scaling, with their defaults; every way also takes override_linear_precision. An argument
# is listed only where the argument has an effect.
_ARGUMENTS: dict[str, dict[str, Any]] = {
    "delayed": {
        "fp8": "hybrid",
        "fp8_margin": 0,
        "fp8_amax_history_len": 1024,
        "fp8_amax_compute_algo": "max",
        "interval": 1,
        "fast_accum": False,
    },
    "current": {"fp8": "hybrid", "fp8_margin": 0, "fast_accum": False},
    "rowwise": {"fp8": "e4m3", "fast_accum": False},
    "blockwise": {"fp8": "e4m3"},
    "mxfp8": {"fp8": "e4m3"},
    "nvfp4": {},
}


@dataclass(frozen=True)
class Recipe:
    """Arguments of a level's low-precision GEMMs, checked.

    Args:
        scaling: ``delayed``, ``current``, ``rowwise``, ``blockwise``, ``mxfp8`` or ``nvfp4``.
        fp8: ``hybrid`` (E4M3, output gradients E5M2) or ``e4m3``.
        fp8_margin: per-tensor scales are divided by 2**fp8_margin, from -1 to 8.
        fp8_amax_history_len: steps in the amax history, at most 65536.
        fp8_amax_compute_algo: ``max`` over the history or its ``most_recent`` entry.
        fp8_params: whether weights of converted layers are stored in FP8, scaled by their own amax at every refresh.
        interval: steps between two computations of the scales.
        fast_accum: whether backward GEMMs may sum in the tensor cores alone, as forward GEMMs do. Hopper's tensor cores
            keep fewer bits than FP32, and take less time so. Other GPUs, and the reference backend, sum in FP32.
        override_linear_precision: (fprop, dgrad, wgrad): True runs that GEMM in half precision.
    """

    scaling: str
    fp8: str = "hybrid"
    fp8_margin: int = 0
    fp8_amax_history_len: int = 1024
    fp8_amax_compute_algo: str = "max"
    fp8_params: bool = False
    interval: int = 1
    fast_accum: bool = False
    override_linear_precision: tuple[bool, bool, bool] = (False, False, False)

    def __post_init__(self) -> None:
        if self.fp8 not in _FP8_FORMATS:
            raise ValueError(f"fp8={self.fp8!r} is no FP8 format. Choose one of: {', '.join(_FP8_FORMATS)}.")
        if self.scaling == "mxfp8" and self.fp8 == "hybrid":
            raise ValueError("fp8='hybrid' diverges with MXFP8 scaling (E5M2 gradients). Use fp8='e4m3'.")
        if self.fp8_amax_compute_algo not in _ALGOS:
            raise ValueError(
                f"fp8_amax_compute_algo={self.fp8_amax_compute_algo!r} is unknown. Choose one of: {', '.join(_ALGOS)}."
            )
        check_value("fp8_margin", self.fp8_margin, _Margin)
        check_value("fp8_amax_history_len", self.fp8_amax_history_len, _HistoryLength)
        check_value("interval", self.interval, AtLeast1)
        check_value("fast_accum", self.fast_accum, bool)
        check_value("fp8_params", self.fp8_params, bool)
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
