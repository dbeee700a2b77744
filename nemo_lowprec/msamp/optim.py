"""MS-AMP's optimizers by their names and arguments, as optimizers of ``nemo_lowprec.optim``.

They are for models that ``msamp.initialize`` has not converted; ``initialize`` takes torch's Adam and AdamW, and gives
them low-bit states itself. Parameters of fewer than two dimensions keep FP32 states, which MS-AMP stores in FP8, too.

Source: Azure/MS-AMP 0.4.0, ``msamp/optim`` (names, arguments and defaults).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn

import torch
from torch import Tensor

from nemo_lowprec.msamp.refused import WAYS_OUT, refuse
from nemo_lowprec.optim import Adam, AdamW, LowBitStates
from nemo_lowprec.optim.storage import StateFormat

__all__ = ["LBAdam", "LBAdamW", "LBAdamWBase", "LBOptimizer"]

LBOptimizer = LowBitStates

# MS-AMP's uint8 holds E4M3. Its int8 holds E5M2, which no state has here.
_FORMATS: dict[torch.dtype, StateFormat] = {torch.uint8: "fp8", torch.float16: "fp16", torch.float32: "fp32"}


class LBAdamW(AdamW):
    """``nemo_lowprec.optim.AdamW`` with MS-AMP's arguments.

    Args:
        params: parameters or groups, as torch takes them.
        lr, betas, eps, weight_decay, maximize: torch's.
        bias_correction: must be True.
        amsgrad: must be False.
        exp_avg_dtype, exp_avg_sq_dtype: ``torch.uint8`` (FP8), ``torch.float16`` or ``torch.float32``.
        tensor_scale: must be True: low-bit states always have scales.

    Raises:
        ValueError: a value that has no counterpart; the message names the argument.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        exp_avg_dtype: torch.dtype = torch.uint8,
        exp_avg_sq_dtype: torch.dtype = torch.float16,
        tensor_scale: bool = True,
    ) -> None:
        formats = _formats(bias_correction, tensor_scale, exp_avg_dtype, exp_avg_sq_dtype)
        settings = {"betas": betas, "eps": eps, "weight_decay": weight_decay, "amsgrad": amsgrad, "maximize": maximize}
        super().__init__(params, lr, **formats, **settings)  # type: ignore[arg-type]


LBAdamWBase = LBAdamW


class LBAdam(Adam):
    """``nemo_lowprec.optim.Adam`` with MS-AMP's arguments, which are those of ``LBAdamW`` in another order."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        maximize: bool = False,
        *,
        bias_correction: bool = True,
        exp_avg_dtype: torch.dtype = torch.uint8,
        exp_avg_sq_dtype: torch.dtype = torch.float16,
        tensor_scale: bool = True,
    ) -> None:
        formats = _formats(bias_correction, tensor_scale, exp_avg_dtype, exp_avg_sq_dtype)
        settings = {"betas": betas, "eps": eps, "weight_decay": weight_decay, "amsgrad": amsgrad, "maximize": maximize}
        super().__init__(params, lr, **formats, **settings)  # type: ignore[arg-type]


def _formats(
    bias_correction: bool, tensor_scale: bool, exp_avg_dtype: torch.dtype, exp_avg_sq_dtype: torch.dtype
) -> dict[str, StateFormat]:
    """The formats of ``nemo_lowprec.optim`` for MS-AMP's dtypes."""
    if not bias_correction:
        raise ValueError("bias_correction=False has no counterpart: Adam here corrects both moments. Leave it out.")
    if not tensor_scale:
        raise ValueError("tensor_scale=False has no counterpart: low-bit states have scales here. Leave it out.")
    given = {"exp_avg_dtype": exp_avg_dtype, "exp_avg_sq_dtype": exp_avg_sq_dtype}
    for name, dtype in given.items():
        if dtype not in _FORMATS:
            raise ValueError(f"{name}={dtype} must be one of: {', '.join(map(str, _FORMATS))}.")
    return {name: _FORMATS[dtype] for name, dtype in given.items()}


def __getattr__(name: str) -> NoReturn:
    if f"optim.{name}" in WAYS_OUT:
        refuse(f"optim.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
