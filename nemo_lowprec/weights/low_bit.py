"""Weights without FP32 masters: the MS-AMP levels.

Matrices (parameters of two dimensions and more) are stored in FP16, without a second copy, and read as the level's
half dtype. At O3 the weights of converted layers are E4M3 with one scale, a power of two, written from FP16 masters in
blocks of 128 elements. Vectors (norms, biases) stay FP32: vectors are a thousandth of a model, and FP16 would swallow
updates below 0.0005 of a norm's weight of 1.

A frozen matrix has no master at any level: a BF16 matrix stays BF16, every other one is FP16, or E4M3 with one scale
(``frozen.py``). A frozen matrix that is unfrozen is stored as the trained matrices are. A frozen vector is saved and
given back in the dtype in which it came.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from weakref import getweakrefs

import torch
from torch import Tensor, nn

from nemo_lowprec.compat.tensors import use_count
from nemo_lowprec.formats import E4M3, FP16, compute_amax
from nemo_lowprec.tensors import BlockScaledTensor, Fp8Weight, Fp16Weight, QuantizedTensor
from nemo_lowprec.weights.chosen import ChosenParams
from nemo_lowprec.weights.fp32_modules import needs_plain_fp32
from nemo_lowprec.weights.frozen import FrozenInFp8, is_frozen_fp8
from nemo_lowprec.weights.half import FLOATS, HalfStore, is_lazy
from nemo_lowprec.weights.saved_form import MASTER, master_of
from nemo_lowprec.weights.swap import swap, swap_or_replace
from nemo_lowprec.weights.written import frozen_was_written, note_frozen

_ORIGINAL = "_lowprec_original"  # attribute of a parameter in an evaluation: its values before the rounding


class LowBitWeights(HalfStore):
    """The parameters of one model at an MS-AMP level.

    Args:
        reads_as: dtype that FP16 matrices read as.
        fp8: names of the parameters that are stored in FP8 with FP16 masters (O3).
        margin: FP8 scales are divided by 2**margin.
        frozen: stores frozen weights in FP8.
    """

    def __init__(
        self,
        reads_as: torch.dtype,
        fp8: Callable[[], list[str]] = list,
        margin: int = 0,
        frozen: FrozenInFp8 | None = None,
    ) -> None:
        super().__init__(fp8, margin, frozen)
        self.reads_as = reads_as
        self._matrices = ChosenParams(is_stored)

    @torch.no_grad()
    def check(self, model: nn.Module, device: torch.device, training: bool) -> None:
        """Raise ValueError where ``model`` cannot be stored in low precision.

        Raises:
            ValueError: a complex parameter, a trained FP64 parameter, a parameter with values beyond FP16's range, in
                a graph that is alive or with a weak reference to it, or an embedding with sparse gradients.
        """
        for path, module in model.named_modules():
            if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse and module.weight.requires_grad:
                raise ValueError(
                    f"{path} has sparse gradients, which have no low-bit form. Build it with sparse=False."
                )
            for own, param in module.named_parameters(recurse=False):
                if not is_lazy(param):
                    _check(f"{path}.{own}" if path else own, param, in_fp32=needs_plain_fp32(module))
        super().check(model, device, training)

    def _fp8_params(self) -> list[nn.Parameter]:
        params = map(self.model.get_parameter, self._fp8())
        return [param for param in params if param.requires_grad]

    def _store(self, param: nn.Parameter, module: nn.Module) -> None:
        if param.dtype not in FLOATS or is_lazy(param) or isinstance(param, QuantizedTensor):
            return
        if not _is_matrix(param) or needs_plain_fp32(module):
            self._widened.add(param)
            return
        storage = torch.float16
        if not param.requires_grad:
            self._add_frozen(param)
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
        """Store the parameters in low precision, and let their gradients have any dtype.

        ``install`` changes no parameter yet, since other columns may still refuse the model.
        """
        self._matrices.renew()
        in_fp8 = {id(param) for param in self._fp8_params()}
        for module, params in self._own_params():
            self._widened.add_statistics(module)
            for param in params:
                if id(param) not in in_fp8:
                    self._store(param, module)
                elif not isinstance(param, Fp8Weight):
                    self._to_fp8(param)
        for param in self.matrices():
            master = master_of(param)
            if master is not None and master.device != param.device:
                setattr(param, MASTER, master.to(param.device))
            if param.is_leaf and param.grad is None and param.grad_dtype is not None:
                param.grad_dtype = None

    @torch.no_grad()
    def before_forward(self) -> None:
        """Store parameters that were unfrozen as trained parameters are, and frozen ones that were written in FP32."""
        unfrozen = self._frozen_fp8.unfrozen(self.model)
        in_fp8 = {id(param) for param in self._fp8_params()} if unfrozen else set()
        for module, param in unfrozen:
            if id(param) in in_fp8:
                self._to_fp8(param)
            else:
                self._store(param, module)
            param.grad_dtype = None
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
        for _, param in self._frozen.of(self.model):
            note_frozen(param)

    def _before_storing(self, param: nn.Parameter) -> None:
        param.grad = None
        if not self._training:
            param.__dict__.setdefault(_ORIGINAL, param.data)

    def _to_fp8(self, param: nn.Parameter) -> None:
        self._before_storing(param)
        master = BlockScaledTensor.from_float(_values(param), FP16)
        stored = Fp8Weight.from_float(master.dequantize(), E4M3, self.reads_as, self._margin, power_of_two=True)
        swap(param, nn.Parameter(stored, requires_grad=param.requires_grad))
        setattr(param, MASTER, master)

    def matrices(self) -> list[nn.Parameter]:
        # Asked for before each forward pass: no walk through the model.
        return [param for _, param in self._matrices.of(self.model)]

    def stored(self) -> Iterator[nn.Parameter]:
        return (param for param in self.model.parameters() if is_stored(param) and not is_frozen_fp8(param))

    def is_matrix(self, param: Tensor) -> bool:
        return is_stored(param)

    def _give_back(self, param: nn.Parameter, replaced: dict[nn.Parameter, nn.Parameter]) -> None:
        master = master_of(param)
        values = _values(param if master is None else master).to(param.device)
        original = param.__dict__.pop(_ORIGINAL, None)
        if original is not None and torch.equal(_stored(original, master is not None).to(values), values):
            values = original.to(values.device)
        if param in self._came_as:
            values = values.to(self._came_as.get(param))
        if isinstance(param, QuantizedTensor):
            if master is not None:
                delattr(param, MASTER)
            swap_or_replace(self.model, param, nn.Parameter(values, requires_grad=param.requires_grad), replaced)
        else:
            param.data = values
            param.grad_dtype = param.dtype


def _check(name: str, param: nn.Parameter, in_fp32: bool) -> None:
    if param.is_complex():
        raise ValueError(f"{name} is complex, which has no low-bit form. Use a level with FP32 masters.")
    if param.dtype == torch.float64 and param.requires_grad:
        raise ValueError(f"{name} is FP64, which this level would train in FP32. Use model.float().")
    if not _is_matrix(param):
        return
    if param.numel() and not param.is_meta and float(compute_amax(param.detach())) > FP16.max:
        raise ValueError(
            f"{name} has values beyond {FP16.max:.0f}, the largest of FP16, in which this level keeps its weights. "
            "Use a level with FP32 masters, such as bf16_with_fp8_mixed."
        )
    if not in_fp32 and getweakrefs(param):
        raise ValueError(f"Somebody holds a weak reference to {name}, which cannot change its storage so.")
    # torch.utils.swap_tensors takes a parameter that is counted once, or twice after a forward pass of it.
    if not in_fp32 and use_count(param) > 2:
        raise ValueError(
            f"{name} is held by a view or the graph of an earlier forward pass, and cannot change its storage. "
            "Delete these first."
        )


def is_stored(param: Tensor) -> bool:
    """Whether a parameter is in low-bit storage: a tensor subclass, or a plain FP16 matrix."""
    if isinstance(param, QuantizedTensor):
        return True
    return not is_lazy(param) and param.dim() > 1 and param.dtype == torch.float16


def _values(tensor: Tensor) -> Tensor:
    return tensor.dequantize(torch.float32) if isinstance(tensor, QuantizedTensor) else tensor.detach().float()


def _stored(values: Tensor, as_master: bool) -> Tensor:
    """``values`` rounded as a weight is, or as an O3 master, in FP32."""
    return BlockScaledTensor.from_float(values, FP16).dequantize() if as_master else values.half().float()


def _is_matrix(param: Tensor) -> bool:
    return param.dim() > 1 and param.dtype in FLOATS


def _is_transformer_engine(module: nn.Module) -> bool:
    """Whether ``module`` is Transformer Engine's own: such a module reads the storage of its weights directly."""
    return type(module).__module__.startswith("transformer_engine.")
