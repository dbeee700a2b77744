"""Weights without FP32 masters: the MS-AMP levels.

Matrices (parameters of two dimensions and more) are stored in FP16, the only copy, and read as the level's half
dtype. At O3 the weights of converted layers are E4M3 with one scale, a power of two, written from FP16 masters in
blocks of 128 elements. Vectors (norms, biases) stay FP32: they are a thousandth of a model, and FP16 would swallow
updates below 0.0005 of a norm's weight of 1.

A frozen matrix is stored in 16 bits at every level, and without a master: in BF16 or FP16 if it came so, else in FP16.
It is stored as the others when it is unfrozen. A frozen vector is saved and given back in the dtype in which it came.

Parameters keep their identity: optimizer groups, tying and hooks stay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from weakref import getweakrefs

import torch
from torch import Tensor, nn

from nemo_lowprec.formats import E4M3, FP16, compute_amax
from nemo_lowprec.tensors import BlockScaledTensor, Fp8Weight, Fp16Weight, QuantizedTensor
from nemo_lowprec.tensors.marks import Marks
from nemo_lowprec.weights.averaging import average_masters, averages_in
from nemo_lowprec.weights.chosen import ChosenParams
from nemo_lowprec.weights.computed import computes_weight
from nemo_lowprec.weights.memory import check_memory
from nemo_lowprec.weights.saved_form import MASTER, cover_new_modules, install_hooks, master_of, remove_hooks
from nemo_lowprec.weights.store import WeightStore
from nemo_lowprec.weights.swap import swap, swap_or_replace
from nemo_lowprec.weights.widened import Widened
from nemo_lowprec.weights.written import frozen_was_written, note_frozen

_ORIGINAL = "_lowprec_original"  # on a parameter that is not trained: its values before they were rounded
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


class LowBitWeights(WeightStore):
    """The parameters of one model at an MS-AMP level.

    Args:
        reads_as: dtype that FP16 matrices read as.
        fp8: names of the parameters that are stored in FP8 with FP16 masters (O3).
        margin: FP8 scales are divided by 2**margin.
    """

    def __init__(self, reads_as: torch.dtype, fp8: Callable[[], list[str]] = list, margin: int = 0) -> None:
        super().__init__()
        self.reads_as = reads_as
        self._fp8, self._margin = fp8, margin
        self._keep = False  # what an evaluation must give back where nothing else was loaded
        self._came_as = Marks("frozen")  # dtypes of frozen parameters
        self._frozen = ChosenParams(self._came_as.__contains__)
        self._widened = Widened()
        self._handles: list[Any] = []

    def check(self, model: nn.Module, device: torch.device, training: bool) -> None:
        """Raise ValueError where ``model`` cannot be stored; see ``check_low_bit``."""
        check_low_bit(model)
        if training:
            check_memory(model)

    def install(self, model: nn.Module, training: bool) -> None:
        """Take charge of ``model``. Its parameters are stored by ``settle``, when all that may be refused was."""
        super().install(model, training)
        self._keep, self._widened = not training, Widened(training)
        average_masters()
        for module in model.modules():
            if any(p is not None for p in module._parameters.values()):
                install_hooks(module)
        self._handles += cover_new_modules(model)

    def _fp8_params(self) -> list[nn.Parameter]:
        assert self.model is not None
        params = map(self.model.get_parameter, self._fp8())
        return [param for param in params if param.requires_grad]

    def _store(self, param: nn.Parameter, module: nn.Module) -> None:
        if param.dtype not in _FLOATS or _is_lazy(param) or isinstance(param, QuantizedTensor):
            return
        if not _is_matrix(param) or needs_plain_fp32(module):
            self._widened.add(param)
            return
        storage = torch.float16
        if not param.requires_grad:
            self._came_as.add(param, param.dtype)
            self._frozen.renew()
            storage = param.dtype if param.dtype == torch.bfloat16 else storage
        self._before_storing(param)
        if _is_transformer_engine(module) or self.reads_as == storage == torch.float16:
            param.data = param.data.to(storage)
        else:
            stored = Fp16Weight.from_float(param.data, self.reads_as, storage)
            swap(param, nn.Parameter(stored, requires_grad=param.requires_grad))
        if not param.requires_grad:
            note_frozen(param)

    @torch.no_grad()
    def settle(self) -> None:
        """Once the model is on its device, before the first step: store parameters, free their gradients' dtype."""
        assert self.model is not None
        averages = averages_in(self.model)
        fp8 = {id(p): p for p in self._fp8_params() if id(p) not in averages}
        for module in self.model.modules():
            self._widened.add_statistics(module)
            for stored in module._parameters.values():
                if stored is not None and id(stored) not in fp8 and id(stored) not in averages:
                    self._store(stored, module)
        for param in fp8.values():
            if not isinstance(param, Fp8Weight):
                self._to_fp8(param)
        for param in self.matrices():
            master = master_of(param)
            if master is not None and master.device != param.device:
                setattr(param, MASTER, master.to(param.device))
            if param.is_leaf and param.grad is None and param.grad_dtype is not None:
                param.grad_dtype = None

    @torch.no_grad()
    def before_forward(self) -> None:
        """Store parameters that were unfrozen as the others are.

        A frozen one that somebody writes by hand, as averages of other weights are, becomes plain FP32: the next update
        would be too small for 16 bits.
        """
        for _, param in self._frozen.of(self.model):
            if param.requires_grad:
                self._came_as.discard(param)
                if any(param is p for p in self._fp8_params()):
                    self._to_fp8(param)
                elif isinstance(param, Fp16Weight):
                    param.data_fp16 = param.data_fp16.to(torch.float16)
                param.grad_dtype = None
            elif frozen_was_written(param):
                self._came_as.discard(param)
                if isinstance(param, QuantizedTensor):
                    swap(param, nn.Parameter(_values(param), requires_grad=False))
                else:
                    param.data = param.data.float()
        self._widened.follow()

    def note_frozen(self) -> None:
        """Frozen parameters are as they were stored."""
        for _, param in self._frozen.of(self.model):
            note_frozen(param)

    def _before_storing(self, param: nn.Parameter) -> None:
        param.grad = None
        if self._keep:
            param.__dict__.setdefault(_ORIGINAL, param.data)

    def _to_fp8(self, param: nn.Parameter) -> None:
        self._before_storing(param)
        master = BlockScaledTensor.from_float(_values(param), FP16)
        reads_as = self.reads_as
        stored = Fp8Weight.from_float(master.dequantize(), E4M3, reads_as, self._margin, power_of_two=True)
        swap(param, nn.Parameter(stored, requires_grad=param.requires_grad))
        setattr(param, MASTER, master)

    def matrices(self) -> Iterator[nn.Parameter]:
        """The model's parameters in low-bit storage, each once."""
        assert self.model is not None
        return (p for p in self.model.parameters() if self.is_matrix(p))

    def is_matrix(self, param: Tensor) -> bool:
        """Whether a parameter is in low-bit storage."""
        return is_stored(param)

    def remove(self) -> None:
        """Give the parameters their values back, in FP32 or in their original dtype where they were not trained."""
        replaced: dict[nn.Parameter, nn.Parameter] = {}
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        assert self.model is not None
        remove_hooks(self.model)
        with torch.no_grad():
            for param in list(self.matrices()):
                master = master_of(param)
                values = _values(param if master is None else master).to(param.device)
                original = param.__dict__.pop(_ORIGINAL, None)
                if original is not None and torch.equal(_stored(original, master is not None).to(values), values):
                    values = original.to(values.device)
                if param in self._came_as:
                    values = values.to(self._came_as.get(param))
                param.grad = None
                if isinstance(param, QuantizedTensor):
                    if master is not None:
                        delattr(param, MASTER)
                    plain = nn.Parameter(values, requires_grad=param.requires_grad)
                    swap_or_replace(self.model, param, plain, replaced)
                else:
                    param.data = values
                    param.grad_dtype = param.dtype
            self._widened.remove()
        self._came_as.clear()
        self.follow(replaced)
        super().remove()


@torch.no_grad()
def check_low_bit(model: nn.Module) -> None:
    """Whether ``model`` can be stored in low precision; changes nothing.

    Raises:
        ValueError: a complex or trained FP64 parameter, one with values beyond FP16's range, one in a graph that
            is alive or with a weak reference to it, or an embedding with sparse gradients.
    """
    plain: set[int] = set()
    for name, module in model.named_modules():
        if needs_plain_fp32(module):
            plain.update(map(id, module.parameters(recurse=False)))
        for own, param in module.named_parameters(recurse=False):
            if not needs_plain_fp32(module) and not _is_lazy(param) and _is_matrix(param) and getweakrefs(param):
                where = f"{name}.{own}" if name else own
                raise ValueError(f"Somebody holds a weak reference to {where}, which cannot change its storage so.")
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse and module.weight.requires_grad:
            raise ValueError(f"{name} has sparse gradients, which have no low-bit form. Build it with sparse=False.")
    for name, param in model.named_parameters():
        if _is_lazy(param):
            continue
        if param.is_complex():
            raise ValueError(f"{name} is complex, which has no low-bit form. Use a level with FP32 masters.")
        if param.dtype == torch.float64 and param.requires_grad:
            raise ValueError(f"{name} is FP64, which this level would train in FP32. Use model.float().")
        if _is_matrix(param) and param.numel() and not param.is_meta and float(compute_amax(param.detach())) > FP16.max:
            raise ValueError(
                f"{name} has values beyond {FP16.max:.0f}, the largest of FP16, in which this level keeps its "
                "weights. Use a level with FP32 masters, such as bf16_with_fp8_mixed."
            )
        # torch.utils.swap_tensors takes a parameter that is counted once, or twice after a forward pass of it.
        if _is_matrix(param) and id(param) not in plain and param._use_count() > 2:  # type: ignore[attr-defined]
            raise ValueError(
                f"{name} is held by a view or the graph of an earlier forward pass, and cannot change its storage. "
                "Delete these first."
            )


def is_stored(param: Tensor) -> bool:
    """Whether a parameter is in low-bit storage."""
    return isinstance(param, QuantizedTensor) or _is_fp16_matrix(param)


def _values(tensor: Tensor) -> Tensor:
    return tensor.dequantize(torch.float32) if isinstance(tensor, QuantizedTensor) else tensor.detach().float()


def _stored(values: Tensor, as_master: bool) -> Tensor:
    """What ``values`` are rounded to: as a weight, or as an O3 master."""
    return BlockScaledTensor.from_float(values, FP16).dequantize() if as_master else values.half().float()


def _is_lazy(param: Tensor) -> bool:
    """Whether the first batch will give the parameter its shape; it stays FP32."""
    return isinstance(param, nn.parameter.UninitializedParameter)


def _is_matrix(param: Tensor) -> bool:
    return param.dim() > 1 and param.dtype in _FLOATS


def _is_fp16_matrix(param: Tensor) -> bool:
    return not _is_lazy(param) and param.dim() > 1 and param.dtype == torch.float16


def needs_plain_fp32(module: nn.Module) -> bool:
    """RNNs hand the addresses of their weights to cuDNN; computed weights come of FP32 parameters."""
    return isinstance(module, nn.RNNBase) or computes_weight(module)


def _is_transformer_engine(module: nn.Module) -> bool:
    """Transformer Engine's own layers read the storage of their weights, which must be a plain tensor's."""
    return type(module).__module__.startswith("transformer_engine.")
