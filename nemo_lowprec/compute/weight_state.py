"""Which weights were written since they were quantized, and the quantized weights, which the layers keep.

A weight changes once a step, so that its quantized form is made once a step, at the first forward pass after it: all
weights in one launch, where there are Triton kernels. Backward, later micro-batches and evaluation read the kept form.
The cost is memory: 2 bytes a parameter on a GPU, whose FP8 GEMMs read each orientation of a weight in its own copy; 1
byte for weights that are stored in FP8.

Where the kept form is made anew in place, it has the meaning of the weight that ``nn.Linear`` saves for backward:
autograd refuses a backward pass of a graph that was made before the weight was written. Without such a kernel (on CPUs,
with scales of blocks, on the ``te`` backend) the graph reads the form that it has saved.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import count
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn

from nemo_lowprec.compute.backends.base import QuantizedOperand, is_whole
from nemo_lowprec.formats import AmaxSlot
from nemo_lowprec.formats.gemm_block_scaling import CUBLAS_SQUARE_128, WHOLE_ROW
from nemo_lowprec.kernels.loader import weight_kernels
from nemo_lowprec.tensors import Fp8Weight, Fp16Weight, QuantizedTensor, stored_data
from nemo_lowprec.tensors.dtensor import is_sharded, local_shard
from nemo_lowprec.tensors.marks import has_number, number_of, take_stepped

_numbers = count()


class _Job(NamedTuple):
    """What ``WeightCast`` takes to make a kept operand anew.

    Attributes:
        number: of this job alone.
        address: of the weight's elements.
        scale: of the weight.
        tensors: the job; None where there is no kernel for the weight.
    """

    number: int
    address: int
    scale: Tensor | None
    tensors: tuple[Tensor, Tensor | None, Tensor, Tensor | None, Tensor | None] | None


class WeightState:
    """Whether the weight of one layer was written since it was quantized, and the quantized weight, which is kept.

    Attributes:
        layer: the module that holds the weight, held weakly; None once the module is gone.
        name: the weight's name in ``layer``.
        histories: the columns of the layer's other operands.
        is_whole: whether the kept operand ``is_whole``.
        gathered: whether the weight is gathered from shards for each computation. Its address and version then change
            at every gathering, and only ``WeightStates.forget`` says that it was written.
        table: the model's; None for the layers of a copied model, which keep no quantized weights.
    """

    __slots__ = (
        "_built", "_form", "_has_own_memory", "_kept", "_kept_as", "_layer", "_left", "_measured", "_seen", "gathered",
        "histories", "is_whole", "name", "table",
    )  # fmt: skip

    def __init__(
        self, layer: nn.Module, name: str, histories: Sequence[AmaxSlot] = (), table: WeightStates | None = None
    ) -> None:
        self.layer, self.name, self.histories, self.table = layer, name, histories, table
        self.gathered = self.is_whole = False
        self._kept: Any = None  # the weight as a quantized operand of the layer's backend
        self._has_own_memory = False  # of ``_kept``
        self._built: Any = None  # the ``_Job`` for ``_kept``
        self._form = (False, False, False)  # of ``_kept``: rowwise, columnwise, whether of the weight's transpose
        # The state at which the weight was measured, and the one of which ``_kept`` was made: the same object, as long
        # as ``_kept`` is the present weight.
        self._measured: Any = None
        self._kept_as: Any = None
        # The number of the tensor that was measured: another one may get its address, and has its version. None for a
        # gathered weight.
        self._seen: int | None = None
        self._left: Any = None

    def __getstate__(self) -> tuple[None, dict[str, Any]]:
        # The weights of a copied model have the same values: measured anew, without new histories.
        names = [name for cls in type(self).__mro__ for name in getattr(cls, "__slots__", ())]
        state = {name: getattr(self, name) for name in names if hasattr(self, name)}
        del state["_layer"]
        forgotten = dict.fromkeys(("_measured", "_kept_as", "_left", "_kept", "_built", "_seen", "table"))
        return None, {**state, "layer": self.layer, **forgotten}

    @property
    def layer(self) -> nn.Module | None:
        return self._layer() if self._layer is not None else None

    @layer.setter
    def layer(self, layer: nn.Module | None) -> None:
        self._layer = ref(layer) if layer is not None else None

    @property
    def weight(self) -> Tensor | None:
        """The layer's weight; None where it is computed anew for each forward (pruned, parametrized)."""
        return None if self.layer is None else self.layer._parameters.get(self.name)

    def follow(self, weight: Tensor, training: bool) -> None:
        """Measure ``weight`` [out_features, in_features] unless it was measured with its present values.

        The first evaluation after training, and after each ``eval()``, measures again: a weight can be written without
        a trace (``.data``).
        """
        if self.table is not None and self.table.capturing:
            return  # ``weight`` is a twin of the parameter, which was measured before the capture
        state = (training,) if self.gathered else (training, *_state_of(weight))
        # Two comparisons, in every forward of every layer.
        if state != self._measured or not (self.gathered or has_number(weight, self._seen)):
            self._measure(weight, state)

    @torch.no_grad()
    def _measure(self, weight: Tensor, state: tuple[int, ...]) -> None:
        if self._measured is not None and state[1:] != self._measured[1:] and self.weight is not None:
            self.restart()
        self._see(weight, state)
        take_amax_of_step(weight)

    def look_again(self) -> None:
        """Measure the weight when its layer runs next, since it may have been written without a trace."""
        if self._measured is not None:
            self._measured = (None, *self._measured[1:])  # the rest still tells whether the weight was written

    def measure(self, weight: Tensor, training: bool) -> None:
        """Measure ``weight``, and start no new histories: a captured graph measures again whenever it runs."""
        self._measured = None
        self._measure(weight, (training,) if self.gathered else (training, *_state_of(weight)))

    def _rescaled(self) -> None:
        """The weight's scale has changed, not the weight: what is kept is made anew."""
        if self._measured is not None:
            self._measured = tuple(list(self._measured))  # a new object

    def note(self, weight: Tensor) -> None:
        """Note that the present values of ``weight`` were measured."""
        # A new object, also where the state is the same: ``.data`` may have been written.
        self._see(weight, (True,) if self.gathered else (True, *_state_of(weight)))

    def _see(self, weight: Tensor, state: tuple[int, ...]) -> None:
        number = None if self.gathered else number_of(weight)
        if number != self._seen:
            self.drop()  # graphs of the other tensor, as of ``functional_call``, keep its operand
        self._measured, self._seen = state, number

    def keeps_of(self, storage: Tensor) -> bool:
        """Whether the layer keeps its quantized weight, and ``storage`` is the weight's."""
        weight = self.weight
        return self.keeps and weight is not None and stored_data(weight).data_ptr() == storage.data_ptr()

    @property
    def keeps(self) -> bool:
        """Whether the layer keeps its quantized weight."""
        table = self.table
        if table is None or not table.keeps:
            return False
        if not table.keeps_frozen and isinstance(weight := self.weight, Fp8Weight) and weight.is_frozen:
            return False
        return not table.capturing or self.in_place is not None

    def kept(self, rowwise: bool, columnwise: bool) -> Any:
        """The quantized operand that is kept, if it is the present weight's and has these orientations; else None."""
        if self._kept is None or self.table is None or self._form[0] < rowwise or self._form[1] < columnwise:
            return None
        if self._kept_as is not self._measured and self._is_cast_in_place:
            self.table.cast()
        if self._kept_as is not self._measured:
            self.drop()  # the layer makes another one, which may take its memory
        return self._kept

    def keep(self, operand: Any, rowwise: bool, columnwise: bool, transposed: bool) -> None:
        """Keep ``operand``, which was made of the weight as it was measured, or of the weight's transpose."""
        self._kept, self._kept_as, self._form = operand, self._measured, (rowwise, columnwise, transposed)
        self._has_own_memory, self.is_whole, self._built = _has_own_memory(operand), is_whole(operand), None

    def refresh(self) -> None:
        """Make the kept operand anew, in place, where the weight was measured since."""
        if self._kept is not None and self._kept_as is not self._measured and self.table is not None:
            self.table.cast()

    @property
    def in_place(self) -> Any:
        """The kept operand, if it is the present weight's and is made anew in the same memory; else None."""
        return self._kept if self._kept_as is self._measured and self._is_cast_in_place else None

    @property
    def _is_cast_in_place(self) -> bool:
        """Whether ``WeightCast`` can make the kept operand anew: whether ``cast`` is worth its look at all weights."""
        if self._kept is None or not self._has_own_memory or weight_kernels() is None:
            return False
        return self._scale() is not None or _is_in_blocks(self._kept) or isinstance(self.weight, Fp8Weight)

    def drop(self) -> None:
        """Keep nothing."""
        self._kept = self._kept_as = self._built = None

    def _job(self) -> _Job | None:
        """What makes ``_kept`` anew in place; None where nothing needs that, or nothing can."""
        kept, measured, built = self._kept, self._measured, self._built
        if kept is None or self._kept_as is measured or measured is None or measured[0] is None:
            return None  # where the first is None its layer measures first
        if built is not None and built.address == measured[-1] and built.scale is self._scale():
            # The weight may have been written, or replaced, since it was measured: its layer notices when it runs.
            return built if built.tensors is not None else None
        weight = self.weight
        if weight is None or not self._has_own_memory or not has_number(weight, self._seen):
            return None
        state = _state_of(weight)
        if measured[1:] != state:
            return None
        tensors = self._tensors(weight, kept)
        takes = tensors is not None and _kernel_takes(tensors[0])
        self._built = _Job(next(_numbers), state[-1], self._scale(), tensors if takes else None)
        return self._built if takes else None

    def _tensors(self, weight: Tensor, kept: Any) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None, Any] | None:
        """A job of ``WeightCast`` that makes ``kept`` anew; None where no job does."""
        parts = (kept.columnwise, kept.rowwise) if self._form[2] else (kept.rowwise, kept.columnwise)
        source = _matrix(weight, *(part and part.data for part in parts))
        if _is_in_blocks(kept):
            return source, parts[0].scale_inv, parts[1].scale_inv, parts[0].data, parts[1].data
        row, col = (part.data if part is not None else None for part in parts)
        scale_inv = next(part.scale_inv for part in parts if part is not None)
        scale = self._scale()
        if not isinstance(weight, Fp8Weight):
            return None if scale is None else (source, scale, scale_inv, row, col)
        if col is None or (row is not None and row.data_ptr() != source.data_ptr()):
            return None
        return source, None, scale_inv, None, col

    def _was_written(self) -> bool:
        """Whether the weight was written since ``_kept`` was made; asked once."""
        weight = self.weight
        stepped = weight is not None and take_stepped(weight)
        return stepped or self._kept_as[1:] != self._measured[1:]  # type: ignore[no-any-return]

    def _scale(self) -> Tensor | None:
        """The weight's scale, FP32 [1]; None where it is not known before the weight is read."""
        return None

    def restart(self) -> None:
        """Start new histories for the layer's other operands."""
        for slot in self.histories:
            slot.restart()

    def forget(self) -> None:
        """Measure the weight when its layer runs next. The histories of the layer's other operands stay."""
        self._measured = None
        if self.weight is not None:
            take_amax_of_step(local_shard(self.weight))

    def leave(self) -> None:
        """Note the state of the weight when its layer is reverted."""
        self.drop()
        self._measured, self._left = None, self._state()

    def come_back(self, layer: nn.Module, histories: Sequence[AmaxSlot]) -> None:
        """Follow a layer that is converted again. Its histories stay where the weight was not written in between."""
        self.layer, self.histories = layer, histories
        if self._left is None or self._left != self._state():
            self.restart()
        self._measured = self._left = None

    def _state(self) -> tuple[int, ...] | None:
        weight = self.weight
        return None if weight is None or weight.is_meta else _state_of(weight)


class WeightStates:
    """The states of all weights of one model, and whether their quantized forms are kept from step to step.

    Attributes:
        keeps: whether the layers keep their quantized weights until the weights are written.
        keeps_frozen: whether that holds for frozen weights in FP8, too, of which a GPU keeps the transpose.
        capturing: whether a CUDA graph is captured, which reads only what stays in its place.
        states: by the layers' names.
        halves: of layers in half precision that keep the half form of a low-bit weight, by name.
    """

    def __init__(self) -> None:
        self.keeps = self.keeps_frozen = self.capturing = False
        self.states: dict[str, Any] = {}
        self.halves: dict[str, WeightState] = {}
        self._out: dict[str, Any] = {}
        self._caster: Any = None

    def add(self, key: str, layer: nn.Module, name: str, histories: Sequence[AmaxSlot]) -> Any:
        """The state of the weight ``name`` of ``layer``; a layer that is converted again gets its earlier one."""
        if key in self.states:
            self.states[key].come_back(layer, histories)
        else:
            self.states[key] = self._new(layer, name, histories)
        return self.states[key]

    def leave_out(self, keys: Iterable[str] = ()) -> None:
        """Neither measure nor keep these weights from now on, but all others; ``settle`` has to follow."""
        keys = list(keys)
        self.states |= self._out
        self._out = {key: self.states.pop(key) for key in keys if key in self.states}
        self.halves = {key: state for key, state in self.halves.items() if key in keys}
        for state in self._out.values():
            state.drop()

    def keep_half(self, key: str, layer: nn.Module, name: str) -> WeightState:
        """The state of a weight that a layer in half precision reads, which is not scaled."""
        self.halves[key] = WeightState(layer, name, (), self)
        return self.halves[key]

    def _new(self, layer: nn.Module, name: str, histories: Sequence[AmaxSlot]) -> WeightState:
        return WeightState(layer, name, histories, self)

    def settle(self, device: torch.device, gathered_as: torch.dtype | None = None) -> None:
        """The model is on ``device``; every weight is measured anew. See ``AmaxState.settle``."""
        for state in (*self.states.values(), *self.halves.values()):
            state.gathered = gathered_as is not None
            state.drop()
        self.forget()

    def forget(self) -> None:
        """Measure every weight when its layer runs next."""
        for state in (*self.states.values(), *self.halves.values()):
            state.forget()

    def restart(self) -> None:
        """Measure every weight when its layer runs next, and start all histories anew."""
        for state in self.states.values():
            state.forget()
            state.restart()

    def refresh(self) -> None:
        """Measure weights that were written, and make their kept operands anew, for graphs that do neither."""
        for state in self.states.values():
            weight = state.weight
            if weight is not None:
                state.follow(weight, True)
                state.refresh()

    def cast(self) -> None:
        """Make the kept operands anew of all weights that were measured since, in one launch and in place.

        Operands for which there is no kernel are left: their layers quantize the weights themselves.
        """
        kernels = weight_kernels()
        if kernels is None:
            return
        jobs = [(state, job) for state in self.states.values() if (job := state._job()) is not None]
        if not jobs:
            return
        if self._caster is None:
            self._caster = kernels.WeightCast()
        self._caster.cast([job.tensors for _, job in jobs], [job.number for _, job in jobs])
        # A step of another optimizer of the model may have written other weights: graphs of this one live on.
        written = [job.tensors for state, job in jobs if state._was_written()]
        # Not that of the weight's own storage, which may be an orientation, and has not been written here.
        torch.autograd.graph.increment_version([t for job in written for t in job[3:] if t is not None])
        for state, _ in jobs:
            state._kept_as = state._measured

    def leave(self) -> None:
        """Note the states of all weights when the model is reverted."""
        self.halves.clear()
        for state in self.states.values():
            state.leave()

    def renew(self) -> None:
        """After a step: all weights may have been written."""
        self._note_all()

    def _note_all(self) -> list[tuple[Tensor | None, Tensor | None]]:
        """Note that all weights may have been written.

        Returns:
            of each weight: this process's shard, and the amax that the optimizer's step has left. None for a weight
            that a parametrization computes for each forward.
        """
        for half in self.halves.values():
            half.forget()
        found: list[tuple[Tensor | None, Tensor | None]] = []
        for state in self.states.values():
            weight = state.weight
            if weight is None:
                state.forget()
                found.append((None, None))
            else:
                state.note(weight)
                local = local_shard(weight)
                found.append((local, take_amax_of_step(local)))
        return found


def _has_own_memory(operand: Any) -> bool:
    """Whether each orientation is a tensor by itself. The reference backend's columnwise data are a view."""
    if not isinstance(operand, QuantizedOperand):
        return False
    return all(part is None or part.data.stride(-1) == 1 for part in (operand.rowwise, operand.columnwise))


def _matrix(weight: Tensor, row: Tensor | None, col: Tensor | None) -> Tensor:
    """The elements of ``weight``, where possible as the matrix whose operand is ``row``, or transposed ``col``.

    A weight of more dimensions, as those of patches and of experts, is a matrix for its layer.
    """
    data = stored_data(weight)
    if data.dim() == 2 or not data.is_contiguous():
        return data
    like = col.t() if row is None else row  # type: ignore[union-attr]
    return data.data.view(like.shape)  # no view of the parameter, whose users autograd would count


def _is_in_blocks(operand: Any) -> bool:
    """Whether both orientations are there, with a scale for 128x128 elements, as cuBLASLt reads it, or for a row."""
    parts = (operand.rowwise, operand.columnwise)
    return all(part is not None and part.layout in (CUBLAS_SQUARE_128, WHOLE_ROW) for part in parts)


def _kernel_takes(weight: Tensor) -> bool:
    return weight.is_cuda and weight.is_contiguous()


def _state_of(weight: Tensor) -> tuple[int, ...]:
    """Versions and address of ``weight`` and of its storage, which change when the weight is written."""
    if type(weight) is nn.Parameter or not (isinstance(weight, QuantizedTensor) or is_sharded(weight)):
        return _version_of(weight), weight.data_ptr()
    data = stored_data(weight if type(weight) in (Fp8Weight, Fp16Weight) else local_shard(weight))
    return _version_of(weight), _version_of(data), data.data_ptr()


def _version_of(tensor: Tensor) -> int:
    try:
        return tensor._version
    except RuntimeError:  # an inference tensor has no version
        return -1


def take_amax_of_step(local: Tensor) -> Tensor | None:
    """The weight's ``amax_of_step`` (FP32 scalar), removed from the weight; None where no kernel has left an amax."""
    left: Tensor | None = local.__dict__.pop("amax_of_step", None)
    return left
