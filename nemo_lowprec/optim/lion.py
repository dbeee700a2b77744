"""Lion, whose states are FP32 or low-bit.

Source: "Symbolic Discovery of Optimization Algorithms", arXiv:2302.06675, algorithm 2.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from torch import Tensor

from nemo_lowprec.optim.low_bit import LowBitStates
from nemo_lowprec.optim.reference import Rule
from nemo_lowprec.optim.storage import StateFormat, StateFormats


class Lion(LowBitStates):
    """The sign of an interpolation between momentum and gradient, with decoupled weight decay.

    One state a parameter, ``exp_avg``. Every element moves by ``lr``: take a learning rate 3 to 10 times smaller than
    AdamW's, and a weight decay as many times larger. At the MS-AMP levels the state takes the format of the row.

    Args:
        params: parameters or groups, as torch's optimizers take them.
        lr: learning rate, a number or a tensor of one element.
        betas: (beta1, beta2): the update is the sign of ``beta1 * exp_avg + (1 - beta1) * grad``; ``exp_avg`` decays
            with beta2.
        weight_decay: weights are multiplied by ``1 - lr * weight_decay``.
        maximize: maximize the objective.
        exp_avg_dtype: ``fp32``, ``bf16``, ``fp16`` or ``fp8``, as in ``Adam`` here.
        master_weight_dtype, stochastic_rounding, seed: as in ``Adam`` here.

    Raises:
        ValueError: a number out of range, a format that does not exist, or a complex parameter.
        RuntimeError: at ``step``, a sparse gradient.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        exp_avg_dtype: StateFormat = "fp32",
        master_weight_dtype: Literal["fp16", "fp32"] | None = None,
        stochastic_rounding: bool = False,
        seed: int = 0,
    ) -> None:
        formats = StateFormats(exp_avg_dtype, "fp32", master_weight_dtype, stochastic_rounding, seed)
        if not lr >= 0.0:
            raise ValueError(f"lr={lr!r} must be at least 0.")
        if not all(0.0 <= beta < 1.0 for beta in betas):
            raise ValueError(f"betas={betas!r} must be at least 0 and less than 1.")
        if not weight_decay >= 0.0:
            raise ValueError(f"weight_decay={weight_decay!r} must be at least 0.")
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, defaults)
        self._setup(formats)

    def rule(self, group: dict[str, Any]) -> Rule:
        return "lion"

    def moments(self, group: dict[str, Any]) -> tuple[str, ...]:
        return ("exp_avg",)
