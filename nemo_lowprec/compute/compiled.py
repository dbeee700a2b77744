"""A converted layer while ``torch.compile`` traces it.

``LinearFunction`` runs as ever, but on tensors without values, and once: the compiler records the operations and
compiles them. What the recording must not do stands in the plan of a traced layer:

* The backend, ``TracedBackend``, calls the operators of ``compiled_ops.py``, which find the layer's real plan, with its
  histories and weights, when they run.
* The weight is followed, and its kept form found, by these operators (``_TracedWeight``).
* Layers that read one tensor share its quantized form and its gradient as they do eagerly, in a ``SharedInput`` that
  lives as long as the recording.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from nemo_lowprec.compat.compiler import records_cuda_graphs
from nemo_lowprec.compute import compiled_ops  # noqa: F401  (defines the operators)
from nemo_lowprec.compute.backends.base import Backend
from nemo_lowprec.compute.gemm_plan import GemmPlan
from nemo_lowprec.compute.graph_entry import GraphEntry, GraphParameter, kind_of
from nemo_lowprec.compute.operands import Operand
from nemo_lowprec.compute.shared_input import SharedInput
from nemo_lowprec.kernels.memory import keep_nothing
from nemo_lowprec.tensors import Fp8Weight

_inputs: Any = WeakIdKeyDictionary()  # by the models' tags, as the recording sees them


def has_own_weight(layer: nn.Module, name: str, entry: GraphEntry) -> bool:
    """Whether a traced layer computes with its own weight, and not with that of a ``functional_call``.

    Not known where Dynamo cannot look at the weight, which has a gradient of another dtype: the answer is yes.
    """
    own = entry.weight
    return own.data is None or not entry.shows() or getattr(layer, name) is own.param


def read_parameter(layer: nn.Module, name: str, param: GraphParameter) -> Tensor | None:
    """The parameter ``name`` of ``layer`` in the code that ``torch.compile`` traces; ``param`` is what it reads."""
    if param.data is None:
        return getattr(layer, name)  # type: ignore[no-any-return]
    return read_storage(sink_of(param), param.data, param.scale_inv, param.dtype)  # type: ignore[no-any-return]


def sink_of(param: GraphParameter) -> Tensor | None:
    """Where the parameter's gradient goes in the pass that is traced; None for no gradient."""
    return param.sink if param.trains and torch.is_grad_enabled() else None


@torch.compiler.allow_in_graph
def read_storage(sink: Tensor | None, data: Tensor, scale_inv: Tensor | None, dtype: torch.dtype) -> Tensor:
    """A parameter's values in ``dtype``, whose gradient goes to ``sink``.

    The compiler drops the reading where nothing computes with the values.
    """
    storage = [data] if scale_inv is None else [data, scale_inv]
    return _read(dtype, *storage) if sink is None else ReadParameter.apply(sink, dtype, *storage)  # type: ignore[no-any-return]


def _read(dtype: torch.dtype, data: Tensor, *scale_inv: Tensor) -> Tensor:
    return (data.float() * scale_inv[0] if scale_inv else data).to(dtype)


class ReadParameter(torch.autograd.Function):
    """(the sink of a parameter's gradient, a dtype, the parameter's storage) to the values in this dtype."""

    @staticmethod
    def forward(ctx: Any, sink: Tensor, dtype: torch.dtype, *storage: Tensor) -> Tensor:
        ctx.parts = len(storage)
        return _read(dtype, *storage)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, None, *(None,) * ctx.parts


def traced_plan(
    tag: Tensor, model: Tensor, signature: str, storage: list[Tensor], training: bool, transposed: bool, alone: bool
) -> GemmPlan:
    """The plan by which a layer is traced.

    Args:
        tag, model, signature: of the layer's ``GraphEntry``.
        storage: of the weight.
        training: whether the layer trains.
        transposed: whether the layer's weight is [in_features, out_features].
        alone: whether the layer must not share its input.
    """
    kind, keeps = kind_of(signature)
    if records_cuda_graphs() and not GraphEntry.recorded:
        GraphEntry.recorded = True
        keep_nothing()
    if kind.recipe is None:
        return kind
    backend = TracedBackend(kind, tag, signature, training)
    weight: Any = _TracedWeight(backend, storage, transposed, keeps)
    inputs = SharedInput() if alone else _inputs.setdefault(model, SharedInput())
    return replace(kind, backend=backend, weight=weight, inputs=inputs)


@dataclass
class Traced:
    """A quantized operand in the graph.

    Attributes:
        shape: [rows, features] of the values.
        tensors: as ``Packing`` has them; of a weight that is ``stored``, its storage.
        rowwise, columnwise: orientations.
        stored: whether the operators quantize, or find, the weight themselves.
        transposed: whether ``tensors`` are the weight's transpose.
        tag: of the plan that has made the operand.
        values: the values that were quantized; None in backward.
    """

    shape: tuple[int, ...]
    tensors: list[Tensor]
    rowwise: bool
    columnwise: bool
    stored: bool = False
    transposed: bool = False
    tag: Tensor | None = None
    values: Tensor | None = None


class _TracedWeight:
    """The ``WeightState`` of a traced layer: the operators follow the weight, and find what is kept of it."""

    keeps = True  # so that ``kept`` is asked for the operand, and not the values quantized

    def __init__(self, backend: TracedBackend, storage: list[Tensor], transposed: bool, kept: bool) -> None:
        self._backend, self._storage, self._transposed, self._kept = backend, storage, transposed, kept

    def follow(self, weight: Tensor, training: bool) -> None:
        """Left to the operators."""

    def kept(self, rowwise: bool, columnwise: bool) -> Traced:
        shape = self._storage[0].shape[::-1] if self._transposed else self._storage[0].shape
        if self._kept or len(self._storage) > 1:
            return Traced(tuple(shape), self._storage, rowwise, columnwise, True, self._transposed)
        data = self._storage[0].t() if self._transposed else self._storage[0]
        return self._backend.quantize_weight(data, rowwise, columnwise)


class TracedBackend(Backend):
    """Calls operators in the place of the passes of a plan's backend.

    Args:
        kind: a plan like the layer's.
        tag, signature: of the layer's plan.
        training: whether the layer trains.
    """

    name = "traced"

    def __init__(self, kind: GemmPlan, tag: Tensor, signature: str, training: bool) -> None:
        self._backend, self._operands, self._tag = kind.backend, kind.operands, tag
        self._of, self._training = (tag, signature), training
        self.row_multiple, self.ignores_autocast = kind.backend.row_multiple, kind.backend.ignores_autocast

    @classmethod
    def unavailable(cls, recipe: Any) -> str | None:
        return None

    def quantize(self, values: Tensor, operand: Operand, *, rowwise: bool, columnwise: bool, record: bool) -> Any:
        return self._quantize(values, operand, rowwise, columnwise, record, False)[0]

    def quantize_grad(
        self, values: Tensor, operand: Operand, *, rowwise: bool, columnwise: bool, record: bool, sums: bool
    ) -> tuple[Any, Tensor | None]:
        return self._quantize(values, operand, rowwise, columnwise, record, sums)

    def _quantize(
        self, values: Tensor, operand: Operand, rowwise: bool, columnwise: bool, record: bool, sums: bool
    ) -> tuple[Traced, Tensor | None]:
        how = operand.kind, rowwise, columnwise, record, self._training, sums
        tensors = torch.ops.nemo_lowprec.quantize(values, *self._of, *how)
        packed, added = (tensors[:-1], tensors[-1]) if sums else (tensors, None)
        return Traced(tuple(values.shape), packed, rowwise, columnwise, tag=self._tag, values=values), added

    def quantize_weight(self, data: Tensor, rowwise: bool, columnwise: bool) -> Traced:
        """The quantized weight [out_features, in_features]."""
        found: Traced = self.quantize(
            data, self._operands["weight"], rowwise=rowwise, columnwise=columnwise, record=False
        )
        return found

    def from_storage(self, weight: Fp8Weight, *, rowwise: bool, columnwise: bool) -> Any:
        raise NotImplementedError("A traced layer reads the storage of its weight by _TracedWeight.")

    def fprop(self, x: Any, weight: Any, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
        shared = x.tag is not self._tag
        return torch.ops.nemo_lowprec.fprop(  # type: ignore[no-any-return]
            x.tensors, x.columnwise, x.values if shared else None, x.tag if shared else None, *_of(weight),
            bias, *self._of, self._training, (x.shape[0], weight.shape[0]), out_dtype,
        )  # fmt: skip

    def dgrad(self, grad_output: Any, weight: Any, out_dtype: torch.dtype, total: Tensor | None = None) -> Tensor:
        call = grad_output.tensors, grad_output.columnwise, *_of(weight), *self._of, self._training
        if total is not None:
            torch.ops.nemo_lowprec.add_dgrad(*call, total)
            return total
        shape = grad_output.shape[0], weight.shape[1]
        return torch.ops.nemo_lowprec.dgrad(*call, shape, out_dtype)  # type: ignore[no-any-return]

    def wgrad(self, grad_output: Any, x: Any, out_dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
        return torch.ops.nemo_lowprec.wgrad(  # type: ignore[no-any-return]
            grad_output.tensors, grad_output.rowwise, x.tensors, *self._of,
            (grad_output.shape[1], x.shape[1]), out_dtype,
        )  # fmt: skip

    def matmul(self, a: Tensor, b: Tensor, out_dtype: torch.dtype) -> Tensor:
        return self._backend.matmul(a, b, out_dtype)

    def copy_operand(self, operand: Any) -> Any:
        return replace(operand)

    def save(self, operand: Any) -> tuple[list[Tensor | None], Any]:
        tensors = operand.tensors
        if not operand.stored:
            # Only inputs and weights are saved, whose layouts are alike where they have orientations of their own.
            packing = self._backend.packing(self._operands["input"])
            assert packing is not None
            tensors = packing.columnwise(tensors, operand.rowwise)
        return tensors, replace(operand, tensors=[], rowwise=False, columnwise=True, values=None, tag=None)

    def restore(self, tensors: list[Tensor | None], meta: Any) -> Any:
        return replace(meta, tensors=list(tensors))


def _of(weight: Traced) -> tuple[list[Tensor], bool, bool, bool, bool]:
    return weight.tensors, weight.rowwise, weight.columnwise, weight.stored, weight.transposed
