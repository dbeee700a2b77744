"""Adam and AdamW with low-bit states: subclasses of torch's with another step and other storage of states.

Source: torch.optim.Adam (the update and the arguments).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch import Tensor

from nemo_lowprec.optim.low_bit import LowBitStates
from nemo_lowprec.optim.reference import Rule
from nemo_lowprec.optim.storage import StateFormat, StateFormats


class AdamStates(LowBitStates):
    """What Adam and AdamW have in common."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        *,
        exp_avg_dtype: StateFormat = "fp8",
        exp_avg_sq_dtype: StateFormat = "fp16",
        master_weight_dtype: Literal["fp16", "fp32"] | None = None,
        stochastic_rounding: bool = False,
        seed: int = 0,
        **options: Any,
    ) -> None:
        formats = StateFormats(exp_avg_dtype, exp_avg_sq_dtype, master_weight_dtype, stochastic_rounding, seed)
        super().__init__(params, lr, **options)  # type: ignore[arg-type]
        self._setup(formats)

    def rule(self, group: dict[str, Any]) -> Rule:
        return "adam"

    def moments(self, group: dict[str, Any]) -> tuple[str, ...]:
        return "exp_avg", "exp_avg_sq"


class Adam(AdamStates, torch.optim.Adam):  # type: ignore[override]
    """``torch.optim.Adam`` with states in the formats asked for.

    Args:
        params: parameters or groups, as torch takes them.
        exp_avg_dtype, exp_avg_sq_dtype: ``fp32``, ``bf16``, ``fp16`` or ``fp8``; the last two are stored in blocks of
            128 elements of a row with power-of-two scales. Parameters of fewer than two dimensions keep FP32 states.
        master_weight_dtype: master weights of parameters below FP32: ``fp32``, ``fp16`` (in blocks) or None.
        stochastic_rounding: round the updated weight (or FP16 master) stochastically.
        seed: of stochastic rounding. A moment whose 1 - beta is less than half a step of its format is always rounded
            stochastically, since it would never decay otherwise (BF16 at 0.999, FP8 at 0.95).
        options: torch's arguments. ``amsgrad`` and ``differentiable`` are refused; ``foreach``, ``fused`` and
            ``capturable`` choose among torch's implementations and change nothing here: on CUDA the step is one
            fused pass that a CUDA graph can capture.

    Gradients may be FP32, BF16, FP16 or ``GradientTensor``.

    Raises:
        ValueError: a format that does not exist, amsgrad, differentiable, or a complex parameter.
        RuntimeError: at ``step``, a sparse gradient.
    """


class AdamW(AdamStates, torch.optim.AdamW):  # type: ignore[override]
    """``torch.optim.AdamW`` with states in the formats asked for; arguments are those of ``Adam`` here."""
