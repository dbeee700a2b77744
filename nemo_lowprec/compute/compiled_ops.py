"""The operators by which a converted layer computes in a compiled graph.

An operator finds the layer's plan by its tag, follows the weight, and calls the backend as ``LinearFunction`` does.
It reads scales and writes amaxes of which the compiler does not know. That is right for these reasons:

* Scales change between steps only, outside of any graph, so that no order among the operators of a pass matters.
* An amax is a maximum: recorded twice, by a recomputed operator, it is the same.
* An operator of equal arguments has equal results, so that the compiler may call it once for two.

A weight ``stored`` is the layer's own: the tensors are those of its storage, and the operator uses what ``WeightState``
keeps of it. No result is kept memory: the compiler may write other values into a result that is read no more.

``mode="reduce-overhead"`` runs an operator twice, the second time to record its kernels in a CUDA graph, and from then
on replays the kernels alone. What an operator decides on the host must hold for all replays, or end them:

* Scales, amaxes, tables and kept weights stay in their places. Where they move (``Computation.settle``), and where an
  operand's history begins or is started anew, the layer gets another tag: a graph is replayed only with the tensors it
  was recorded with, so that the compiler records again.
* A kept weight is read where it is made anew in its place, which ``Computation.before_forward`` has done before each
  forward pass that trains, as before our own graphs. In evaluation, before which nobody may ask us, and where nothing
  is kept so, the graph itself measures and quantizes the weight.
* Layers that share an input, once noted in ``DelayedScaling.share``, stay noted.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from nemo_lowprec.compute.autocast import AutocastOff
from nemo_lowprec.compute.gemm_plan import GemmPlan
from nemo_lowprec.compute.graph_entry import GraphEntry, kind_of, plan_of
from nemo_lowprec.compute.linear_function import new_weight_operand
from nemo_lowprec.formats import E4M3, E5M2
from nemo_lowprec.tensors import Fp8Weight, stored_data

_FORMATS = {fmt.dtype: fmt for fmt in (E4M3, E5M2)}

_WEIGHT = "Tensor[] weight, bool rowwise, bool columnwise, bool stored, bool transposed"
_PLAN = "Tensor tag, str signature"
_RESULT = "SymInt[] shape, ScalarType dtype) -> Tensor"
torch.library.define(
    "nemo_lowprec::quantize",
    f"(Tensor values, {_PLAN}, str kind, bool rowwise, bool columnwise, bool record, bool training, bool sums)"
    " -> Tensor[]",
)
torch.library.define(
    "nemo_lowprec::fprop",
    f"(Tensor[] x, bool x_columnwise, Tensor? values, Tensor? maker, {_WEIGHT}, Tensor? bias, {_PLAN}, bool training,"
    f" {_RESULT}",
)
torch.library.define(
    "nemo_lowprec::dgrad",
    f"(Tensor[] dy, bool dy_columnwise, {_WEIGHT}, {_PLAN}, bool training, {_RESULT}",
)
torch.library.define(  # has no result: the compiler would take the memory of ``total`` for that of a new tensor
    "nemo_lowprec::add_dgrad",
    f"(Tensor[] dy, bool dy_columnwise, {_WEIGHT}, {_PLAN}, bool training, Tensor(a!) total) -> ()",
)
torch.library.define("nemo_lowprec::wgrad", f"(Tensor[] dy, bool dy_rowwise, Tensor[] x, {_PLAN}, {_RESULT}")


@torch.library.impl("nemo_lowprec::quantize", "default")
def _quantize(
    values: Tensor, tag: Tensor, signature: str, kind: str, rowwise: bool, columnwise: bool, record: bool,
    training: bool, sums: bool,
) -> list[Tensor]:  # fmt: skip
    """The packed operand; behind it, where ``sums`` says so, the sums of the columns of ``values``."""
    plan = plan_of(tag)
    operand = plan.operands[kind]
    how = {"rowwise": rowwise, "columnwise": columnwise, "record": record}
    with AutocastOff(values.device.type):
        if kind != "grad_output":
            _follow(plan, training, values if kind == "weight" else None)
        if operand.slot is not None and kind != "weight" and _captures(values):
            operand.slot.captured = plan.entry.renew
        if kind == "grad_output":
            quantized, added = plan.backend.quantize_grad(values, operand, **how, sums=sums)
        else:
            quantized, added = plan.backend.quantize(values, operand, **how), None
        if plan.observers.quantized:
            plan.announce(kind, values, quantized)
        packed: list[Tensor] = plan.backend.packing(operand).pack(quantized)
        return packed if added is None else [*packed, added]


@torch.library.impl("nemo_lowprec::fprop", "default")
def _fprop(
    x: list[Tensor], x_columnwise: bool, values: Tensor | None, maker: Tensor | None, weight: list[Tensor],
    rowwise: bool, columnwise: bool, stored: bool, transposed: bool, bias: Tensor | None, tag: Tensor, signature: str,
    training: bool, shape: Any, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    plan = plan_of(tag)
    if plan.calls is not None and training:
        ins = weight[0].shape[0] if transposed else weight[0].shape[1]
        plan.calls.see_traced(plan.name, shape[0], ins, shape[1], maker is None)
    with AutocastOff(x[0].device.type):
        x8 = _unpack(plan, "input", x, True, x_columnwise)
        if maker is not None:
            _share(plan, plan_of(maker), training)
            if plan.observers.quantized:
                plan.announce("input", values, x8)
        if stored:
            _follow(plan, training, weight[0])
        w8 = _weight(plan, weight, rowwise, columnwise, stored, transposed, training)
        return plan.backend.fprop(x8, w8, bias, dtype)  # type: ignore[no-any-return]


def _input_gradient(call: tuple[Any, ...], dtype: torch.dtype, total: Tensor | None = None) -> Tensor:
    dy, dy_columnwise, weight, rowwise, columnwise, stored, transposed, tag, _, training = call
    plan = plan_of(tag)
    with AutocastOff(dy[0].device.type):
        if stored and _other_weight(plan, weight[0]) is not None:  # whose scale may be another one's by now
            _follow(plan, training, weight[0])
        w8 = _weight(plan, weight, rowwise, columnwise, stored, transposed, training)
        dy8 = _unpack(plan, "grad_output", dy, True, dy_columnwise)
        return plan.backend.dgrad(dy8, w8, dtype, total)  # type: ignore[no-any-return]


@torch.library.impl("nemo_lowprec::dgrad", "default")
def _dgrad(*args: Any) -> Tensor:
    return _input_gradient(args[:-2], args[-1])


@torch.library.impl("nemo_lowprec::add_dgrad", "default")
def _add_dgrad(*args: Any) -> None:
    total = args[-1]
    found = _input_gradient(args[:-1], total.dtype, total)
    if found is not total:
        total.copy_(found)


@torch.library.impl("nemo_lowprec::wgrad", "default")
def _wgrad(
    dy: list[Tensor], dy_rowwise: bool, x: list[Tensor], tag: Tensor, signature: str, shape: Any, dtype: torch.dtype
) -> Tensor:
    plan = plan_of(tag)
    with AutocastOff(dy[0].device.type):
        dy8, x8 = _unpack(plan, "grad_output", dy, dy_rowwise, True), _unpack(plan, "input", x, False, True)
        return plan.backend.wgrad(dy8, x8, dtype)  # type: ignore[no-any-return]


def _unpack(plan: GemmPlan, kind: str, tensors: list[Tensor], rowwise: bool, columnwise: bool) -> Any:
    packing = plan.backend.packing(plan.operands[kind])
    assert packing is not None
    return packing.unpack(tensors, rowwise, columnwise)


def _other_weight(plan: GemmPlan, storage: Tensor) -> Tensor | None:
    """The weight of a ``functional_call``, where ``storage`` is such a weight's and not the layer's; else None."""
    own = None if plan.weight is None else plan.weight.weight
    if own is None or own.numel() != storage.numel() or stored_data(own).data_ptr() == storage.data_ptr():
        return None
    return storage


def _follow(plan: GemmPlan, training: bool, storage: Tensor | None = None) -> None:
    """Measure the weight with this storage; None for the layer's own."""
    state = plan.weight
    other = None if storage is None else _other_weight(plan, storage)
    weight = state.weight if state is not None and other is None else other
    if state is None or weight is None:
        return
    if not _captures(weight):
        state.follow(weight, training)
    elif not training or state.in_place is None:
        state.measure(weight, training)


def _share(plan: GemmPlan, maker: GemmPlan, training: bool) -> None:
    """Count the amaxes of an input that ``maker`` has quantized for ``plan``, too."""
    own, first, histories = plan.operands["input"].slot, maker.operands["input"].slot, plan.inputs.histories
    if training and own is not None and first is not None and histories is not None:
        histories.share(own, first)


def _weight(
    plan: GemmPlan, tensors: list[Tensor], rowwise: bool, columnwise: bool, stored: bool, transposed: bool,
    training: bool,
) -> Any:  # fmt: skip
    if not stored:
        return _unpack(plan, "weight", tensors, rowwise, columnwise)
    weight = tensors[0]
    if len(tensors) > 1:
        in_fp8 = Fp8Weight(weight, tensors[1], _FORMATS[weight.dtype], plan.half)
        weight = in_fp8.transposed() if transposed else in_fp8
    elif transposed:
        weight = weight.t()
    # In backward the layer may have another weight: that of a later ``functional_call``.
    keeper = plan.weight if plan.weight is not None and plan.weight.keeps_of(tensors[0]) else None
    if keeper is not None and _captures(weight):
        w8, keeper = keeper.in_place if training else None, None
        if w8 is not None and (rowwise > (w8.rowwise is not None) or columnwise > (w8.columnwise is not None)):
            w8 = None
    else:
        w8 = None if keeper is None else keeper.kept(rowwise, columnwise)
    if w8 is None:
        with torch.inference_mode(False), torch.no_grad():  # what is kept is also read by a pass that trains
            w8 = new_weight_operand(weight, plan, rowwise=rowwise, columnwise=columnwise)
        if keeper is not None and not GraphEntry.recorded:
            keeper.keep(w8, rowwise, columnwise, transposed)
        elif keeper is not None and training:
            _missing[id(keeper)] = plan, keeper, rowwise, columnwise, transposed
    elif plan.observers.quantized:
        plan.announce("weight", weight, w8)
    return w8


# What compiled graphs with CUDA graphs have not found: made within one, it would be in the memory of the CUDA graph.
_missing: dict[int, tuple[GemmPlan, Any, bool, bool, bool]] = {}


def make_missing_weights() -> None:
    """Make the quantized weights that compiled graphs would read if they were kept."""
    for plan, keeper, rowwise, columnwise, transposed in _missing.values():
        weight = keeper.weight
        if weight is None or keeper.kept(rowwise, columnwise) is not None:
            continue
        keeper.follow(weight, True)
        values = weight if not transposed else weight.transposed() if isinstance(weight, Fp8Weight) else weight.t()
        with torch.inference_mode(False), torch.no_grad():
            w8 = new_weight_operand(values, plan, rowwise=rowwise, columnwise=columnwise)
        keeper.keep(w8, rowwise, columnwise, transposed)
    _missing.clear()


def _captures(tensor: Tensor) -> bool:
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def _quantize_like(
    values: Tensor, tag: Tensor, signature: str, kind: str, rowwise: bool, columnwise: bool, *how: bool
) -> Any:
    plan = kind_of(signature)[0]
    operand = plan.operands[kind]
    packed = plan.backend.packing(operand).like(values, operand, rowwise, columnwise)
    *_, sums = how
    return [*packed, values.new_empty(values.shape[1:], dtype=torch.float32)] if sums else packed


def _uninitialised(operand: list[Tensor], *how: Any) -> Tensor:
    *_, shape, dtype = how
    return operand[0].new_empty(shape, dtype=dtype)


@cache
def register_shapes() -> None:
    """Tell the compiler the shapes of the results; when layers are converted, as torch takes a while to register."""
    torch.library.register_fake("nemo_lowprec::quantize", _quantize_like)
    for gemm in ("fprop", "dgrad", "wgrad"):
        torch.library.register_fake(f"nemo_lowprec::{gemm}", _uninitialised)
    torch.library.register_fake("nemo_lowprec::add_dgrad", lambda *_: None)
