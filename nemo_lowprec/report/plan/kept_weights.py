"""The quantized weights that layers keep from step to step, made of tensors without values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from torch import Tensor, nn

from nemo_lowprec.compute import LowPrecisionConv1D, gemm_plans
from nemo_lowprec.compute.backends import Backend
from nemo_lowprec.compute.backends.base import QuantizedOperand
from nemo_lowprec.compute.gemm_plan import GemmPlan
from nemo_lowprec.tensors import Fp8Weight, QuantizedTensor, stored_data


def kept_operands(
    model: nn.Module, backend: Backend | None = None
) -> Iterator[tuple[GemmPlan, Tensor, QuantizedOperand]]:
    """(plan, weight, quantized weight) of each layer of a converted ``model`` that keeps its quantized weight.

    An operand has the orientations that the recipe's GEMMs read. A layer whose input takes no gradient keeps one
    orientation less, and one that multiplies with parts of its weight (attention over another sequence) keeps none.

    Args:
        backend: quantizes the weights; None for the layers' own.
    """
    for module in model.modules():
        transposed = isinstance(module, LowPrecisionConv1D)
        for name, plan in gemm_plans(module).items():
            if plan.weight is not None and plan.weight.keeps and any(plan.fp8[:2]):
                weight = module._parameters[name]
                assert weight is not None
                yield plan, weight, _operand(weight.detach(), transposed, plan, backend or plan.backend)


def _operand(weight: Tensor, transposed: bool, plan: GemmPlan, backend: Backend) -> QuantizedOperand:
    rowwise, columnwise, _ = plan.fp8
    if isinstance(weight, Fp8Weight):
        weight = weight.transposed() if transposed else weight
        weight = weight if weight.dim() == 2 else weight.matrix()
        return backend.from_storage(weight, rowwise=rowwise, columnwise=columnwise)  # type: ignore[no-any-return]
    values, operand = stored_data(weight).flatten(1), replace(plan.operands["weight"], slot=None)
    return backend.quantize(  # type: ignore[no-any-return]
        values.t() if transposed else values, operand, rowwise=rowwise, columnwise=columnwise, record=False
    )


def parts_of_operand(operand: QuantizedOperand) -> list[Tensor]:
    """Data and scales of all orientations, data first."""
    parts = [part for part in (operand.rowwise, operand.columnwise) if part is not None]
    return [part.data for part in parts] + [part.scale_inv for part in parts]


def parts_of_tensor(tensor: Tensor) -> tuple[Tensor, ...]:
    """The plain tensors that ``tensor`` is stored in."""
    return tensor.parts() if isinstance(tensor, QuantizedTensor) else (tensor,)
