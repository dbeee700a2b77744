"""SGD with low-bit momentum: a subclass of torch's with another step and other storage of the momentum.

Source: torch.optim.SGD (the update and the arguments).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch import Tensor

from nemo_lowprec.optim.low_bit import LowBitStates
from nemo_lowprec.optim.reference import Rule
from nemo_lowprec.optim.storage import StateFormat, StateFormats


class SgdStates(LowBitStates):
    """What SGD and the user's subclasses of torch's SGD have in common."""

    def rule(self, group: dict[str, Any]) -> Rule:
        return "sgd"

    def moments(self, group: dict[str, Any]) -> tuple[str, ...]:
        return ("momentum_buffer",) if group["momentum"] else ()


class SGD(SgdStates, torch.optim.SGD):  # type: ignore[override]
    """``torch.optim.SGD`` with the momentum in the format asked for.

    Args:
        params: parameters or groups, as torch takes them.
        momentum_dtype: ``fp32``, ``bf16``, ``fp16`` or ``fp8``, as ``exp_avg_dtype`` of ``Adam`` here.
        master_weight_dtype, stochastic_rounding, seed: as in ``Adam`` here.
        options: torch's arguments. ``differentiable`` is refused; ``foreach`` and ``fused`` change nothing.

    Raises:
        ValueError, RuntimeError: as ``Adam`` here.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        *,
        momentum_dtype: StateFormat = "fp8",
        master_weight_dtype: Literal["fp16", "fp32"] | None = None,
        stochastic_rounding: bool = False,
        seed: int = 0,
        **options: Any,
    ) -> None:
        formats = StateFormats(momentum_dtype, "fp32", master_weight_dtype, stochastic_rounding, seed)
        super().__init__(params, lr, **options)  # type: ignore[arg-type]
        self._setup(formats)
