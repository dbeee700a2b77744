"""The parameters of a model, in the parts that a level of the chart stores, updates and sends in the same formats.

The parts are ``converted`` weights (all linear weights at a level that converts none), ``kept FP32`` for parameters
that torch computes with in FP32 only (batch norms, parametrizations; at the MS-AMP levels RNNs), the ``rest``, and
``vectors`` (fewer than two dimensions) at a level that has a format of their own for them. Parameters that are not
trained are ``frozen in FP8`` or ``frozen``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from nemo_lowprec.chart import PrecisionLevel
from nemo_lowprec.compute import Conversion, linear_weights
from nemo_lowprec.optim.storage import MOMENTS
from nemo_lowprec.tensors.quantized_tensor import MASTER
from nemo_lowprec.weights import is_frozen_fp8

LEFT = "too small"  # converted weights whose layers convert="auto" has left; GEMMs only
CONVERTED, KEPT, REST, VECTORS = "converted", "kept FP32", "rest", "vectors"
FROZEN, FROZEN_FP8 = "frozen", "frozen in FP8"
Parts = dict[str, list[nn.Parameter]]  # by name, each parameter once


def states_of(states: Iterable[Mapping[str, Any]]) -> tuple[list[Tensor], list[Tensor]]:
    """The tensors in states of parameters, but for single numbers: first, and second moments.

    The states of optimizers with states of their own kind count as first moments.
    """
    first: list[Tensor] = []
    second: list[Tensor] = []
    for state in states:
        for name, value in state.items():
            # Numbers are counts, but for moments of parameters that are one number.
            if isinstance(value, Tensor) and (value.dim() or name in MOMENTS) and name != MASTER:
                (second if name == "exp_avg_sq" else first).append(value)
    return first, second


def converted_weights(model: nn.Module, level: PrecisionLevel, conversion: Conversion) -> list[nn.Parameter]:
    """The weights of the layers that ``level`` has converted; of all linear layers at a level without FP8."""
    if level.has_fp8:
        return [model.get_parameter(name) for name in conversion.weights]
    return list(linear_weights(model).values())


def parts_of(
    level: PrecisionLevel,
    params: Iterable[nn.Parameter],
    converted: Iterable[nn.Parameter],
    kept: Collection[int] = (),
) -> Parts:
    """Cut ``params`` into all four parts, of which some may be empty.

    Args:
        converted: see ``converted_weights``; those that are not among ``params`` are in no part.
        kept: ids of parameters that are kept in FP32; a vector among them is one of the vectors.
    """
    found: Parts = {name: [] for name in (CONVERTED, KEPT, REST, VECTORS)}
    weights = set(map(id, converted))
    for param in dict.fromkeys(params):
        if id(param) in weights:
            name = CONVERTED
        elif level.vectors is not None and param.dim() < 2:
            name = VECTORS
        else:
            name = KEPT if id(param) in kept else REST
        found[name].append(param)
    return found


def frozen_part(param: nn.Parameter) -> str:
    """The part of a parameter that is not trained."""
    return FROZEN_FP8 if is_frozen_fp8(param) else FROZEN
