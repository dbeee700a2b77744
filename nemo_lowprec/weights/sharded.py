"""Weights under FSDP2: the shard is the master, and the tensor gathered for a layer's computation is the weight.

The model's parameters are FSDP2's DTensors. At levels with FP32 masters FSDP2 itself gathers them in half precision. At
the MS-AMP levels, and with ``fp8_params``, the local shards are of the classes of ``tensors/shards.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, MutableMapping
from dataclasses import dataclass, field
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from nemo_lowprec.compat.distributed import forget_unreduced_grad, fsdp_units, set_local_tensor, unreduced_grad
from nemo_lowprec.tensors import BlockShard, Fp8Gathered, FullShard, HalfShard, PlainShard, Shard
from nemo_lowprec.tensors.dtensor import as_dtensor_like, is_sharded, local_shard
from nemo_lowprec.tensors.gradient import DETACHED_GRADS
from nemo_lowprec.weights.fp32_modules import kept_in_fp32
from nemo_lowprec.weights.low_bit import is_stored
from nemo_lowprec.weights.memory import check_memory
from nemo_lowprec.weights.store import WeightStore
from nemo_lowprec.weights.widened import HALVES


class ShardedWeights(WeightStore):
    """The sharded parameters of one model.

    Args:
        low_bit: whether the level is one of the MS-AMP levels.
        reads_as: dtype that gathered weights read as.
        fp8: names of the parameters that are gathered in FP8.
        margin: FP8 scales are divided by 2**margin.
        grad_dtype: dtype of gradients of whole parameters where FSDP2 gathers half parameters; else None.
        reduce_amax: replaces amaxes by their maxima over the processes that share a model, in place.
        when_written: called after something else than a step has written the shards.
        check: the ``check`` of the store that would hold the whole parameters.

    Attributes:
        when_gathered: functions that are called with whole parameters when the store first sees the parameters.
    """

    is_sharded = True

    def __init__(
        self,
        low_bit: bool,
        reads_as: torch.dtype,
        fp8: Callable[[], list[str]],
        margin: int,
        grad_dtype: torch.dtype | None,
        reduce_amax: Callable[[Tensor], None],
        when_written: Callable[[], None],
        check: Callable[[nn.Module, torch.device, bool], None],
    ) -> None:
        super().__init__()
        self.low_bit, self.reads_as, self.margin = low_bit, reads_as, margin
        self.grad_dtype = grad_dtype
        self.when_gathered: list[Callable[[list[Tensor]], None]] = []
        self._fp8 = fp8
        self._reduce_amax, self._when_written, self._check = reduce_amax, when_written, check
        # By module (weakly, so that a module which the model has lost is freed) and by name in the module.
        self._sharded: MutableMapping[nn.Module, dict[str, Any]] = WeakIdKeyDictionary()
        self._whole: MutableMapping[nn.Module, dict[str, Tensor]] = WeakIdKeyDictionary()
        self._unit_of: MutableMapping[nn.Module, _Unit] = WeakIdKeyDictionary()
        self._versions: list[int] = []

    def check(self, model: nn.Module, device: torch.device, training: bool) -> None:
        self._check(model, device, training)
        if training:
            check_memory(model)

    @torch.no_grad()
    def settle(self) -> None:
        """Store the local shards of a model that was sharded and is on its device."""
        model = self.model
        assert model is not None
        # Noted before the first forward, in which whole parameters take the places of sharded parameters.
        for module in model.modules():
            own = {n: p for n, p in module._parameters.items() if p is not None and is_sharded(p)}
            if own:
                self._sharded[module] = own
        in_fp8 = {id(model.get_parameter(name)) for name in self._fp8()}
        in_fp32 = kept_in_fp32(model, self.low_bit)
        for param in self.named().values():
            local = local_shard(param)
            if id(param) in in_fp8 and (param.requires_grad or (not self.low_bit and param.dtype == torch.float32)):
                kind = BlockShard.of if self.low_bit else PlainShard
                set_local_tensor(param, kind(local, self.reads_as, self.margin))
            elif id(param) in in_fp32:
                if self.grad_dtype is not None and param.dtype == torch.float32:
                    set_local_tensor(param, FullShard(local))
            elif self.low_bit and param.dim() > 1 and param.dtype == torch.float32:
                set_local_tensor(param, HalfShard(local.to(torch.float16), self.reads_as))
        self.renew_scales()
        self._unit_of = _units(model)
        before = torch.compiler.disable(self._before_module)  # as FSDP2's own hooks, so that fullgraph=True holds
        for module in model.modules():
            has_own = any(p is not None for p in module._parameters.values())
            unit = self._unit_of[module]
            is_first = unit.modules[0]() is module
            if has_own or is_first:
                hook = self._hooks.enter_context(module.register_forward_pre_hook(before))
                unit.inner_hooks += [] if is_first else [hook]
            if has_own:
                self._hooks.enter_context(module.register_state_dict_post_hook(_emit_values))

    def before_forward(self) -> None:
        """Raise ValueError where a half parameter was unfrozen; renew the scales where shards were written."""
        for name, param in self._params():
            if param.requires_grad and param.dtype in HALVES:
                raise ValueError(
                    f"A frozen parameter {name!r} that came in {str(param.dtype).removeprefix('torch.')} was unfrozen "
                    "after it was sharded: its shards would take their updates in 16 bits. Unfreeze it before the "
                    "Trainer starts, or call model.float()."
                )
        # DTensors are written on all processes together, so all processes enter the collectives.
        if self._versions != self._current_versions():
            self.were_written()

    def were_written(self) -> None:
        """Compute the FP8 scales of weights that something else than a step has written, on all processes."""
        self.renew_scales()
        self._when_written()

    def after_step(self, skipped: bool | Tensor) -> None:
        if skipped is not True:
            self.renew_scales()

    def _before_module(self, module: nn.Module, args: Any) -> None:
        unit = self._unit_of[module]
        if self._meet([module]) or not unit.complete:
            # The whole unit is gathered at once: a module may read the parameters of another that it does not call.
            others = [other for held in unit.modules if (other := held()) is not None]
            self._meet(others)
            if not any(is_sharded(p) for other in others for p in other._parameters.values() if p is not None):
                unit.complete = True
                for hook in unit.inner_hooks:  # at which torch.compile would break its graphs
                    hook.remove()
                unit.inner_hooks.clear()

    def meet_root(self) -> None:
        self._before_module(self.model, None)

    def _meet(self, modules: Iterable[nn.Module]) -> bool:
        """Prepare the parameters of ``modules`` that were gathered for the first time; whether there were any."""
        new: list[Tensor] = []
        for module in modules:
            for name, param in module._parameters.items():
                if param is None or is_sharded(param) or self._whole.get(module, {}).get(name) is param:
                    continue
                self._whole.setdefault(module, {})[name] = param
                new.append(param)
                if self.low_bit and self.is_matrix(param):
                    param.grad_dtype = None
                elif self.grad_dtype is not None and param.is_floating_point():
                    param.grad_dtype = self.grad_dtype
        if new:
            for meet in self.when_gathered:
                meet(new)
        return bool(new)

    def sharded(self, module: nn.Module, name: str) -> Tensor | None:
        """The sharded parameter ``name`` of ``module``, also while the whole parameter is in the module."""
        return self._sharded.get(module, {}).get(name)

    def named(self) -> dict[str, Any]:
        """The sharded parameters by name, each once, also while whole parameters are in the modules."""
        found: dict[int, tuple[str, Any]] = {}
        for path, module in self.model.named_modules():
            for name, param in self._sharded.get(module, {}).items():
                found.setdefault(id(param), (f"{path}.{name}" if path else name, param))
        return dict(found.values())

    def unreduced(self) -> dict[int, Tensor]:
        found = {id(s): grad for whole, s in self.gathered() if (grad := DETACHED_GRADS.get(whole)) is not None}
        for unit in self._fsdp_params():
            grad = unreduced_grad(unit)
            if grad is not None:
                found[id(unit.sharded_param)] = grad
        return found

    def _fsdp_params(self) -> Iterator[Any]:
        for _, unit in fsdp_units(self.model):
            yield from unit.params()

    def is_matrix(self, param: Tensor) -> bool:
        return self.low_bit and is_stored(local_shard(param))

    def gathered(self) -> list[tuple[Tensor, Tensor]]:
        """(whole, sharded) of every parameter that was gathered so far, each once, in the model's order."""
        found: dict[int, tuple[Tensor, Tensor]] = {}
        for module in self.model.modules():
            for name, whole in self._whole.get(module, {}).items():
                sharded = self.sharded(module, name)
                if sharded is not None:
                    found.setdefault(id(whole), (whole, sharded))
        return list(found.values())

    def gathered_matrices(self) -> list[tuple[Tensor, Tensor]]:
        """(whole, sharded) of every matrix that was gathered so far, used by its module's forward or not."""
        self._meet(self.model.modules())
        return [(whole, sharded) for whole, sharded in self.gathered() if self.is_matrix(whole)]

    @torch.no_grad()
    def renew_scales(self) -> None:
        """Compute the scales of FP8 weights from the amaxes of their present shards over all processes."""
        params = {id(p): p for _, p in self._params()}.values()
        shards = [shard for p in params if isinstance(shard := local_shard(p), Fp8Gathered)]
        if shards:
            amax = torch.stack([shard.local_amax() for shard in shards])
            self._reduce_amax(amax)
            Fp8Gathered.set_scales(shards, amax)
        self._versions = self._current_versions()

    def _current_versions(self) -> list[int]:
        return [param._version for _, param in self._params()]

    def _params(self) -> Iterator[tuple[str, Any]]:
        """(name in its module, sharded parameter), as often as modules have it."""
        return (named for own in self._sharded.values() for named in own.items())

    @torch.no_grad()
    def remove(self) -> None:
        """Give the shards their values back as plain FP32."""
        for unit in self._fsdp_params():  # of a step that was not made
            forget_unreduced_grad(unit)
        for _, param in self._params():
            local = local_shard(param)
            param.grad = None
            if isinstance(local, Shard):
                set_local_tensor(param, local.dequantize(torch.float32).clone())
        self._whole.clear()
        self._sharded.clear()
        self._unit_of.clear()
        self.when_gathered.clear()
        super().remove()


@dataclass
class _Unit:
    """Modules whose parameters FSDP2 gathers together.

    Attributes:
        modules: held weakly; the first is the module that ``fully_shard`` was called on.
        inner_hooks: before the forward passes of modules but the first, until the unit is complete.
        complete: whether all of the modules' parameters were gathered.
    """

    modules: list[ReferenceType[nn.Module]] = field(default_factory=list)
    inner_hooks: list[RemovableHandle] = field(default_factory=list)
    complete: bool = False


def _units(model: nn.Module) -> MutableMapping[nn.Module, _Unit]:
    from torch.distributed.fsdp import FSDPModule

    units: MutableMapping[nn.Module, _Unit] = WeakIdKeyDictionary()

    def walk(module: nn.Module, unit: _Unit) -> None:
        if module in units:
            return
        unit = _Unit() if isinstance(module, FSDPModule) else unit
        unit.modules.append(ref(module))
        units[module] = unit
        for child in module.children():
            walk(child, unit)

    walk(model, _Unit())
    return units


def _emit_values(module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
    """Put the values of the shards of ``module`` into ``state_dict``, as DTensors of plain tensors."""
    for name, param in module._parameters.items():
        local = local_shard(param) if param is not None else None
        if isinstance(local, Shard) and prefix + name in state_dict:
            values = local.data_fp16 if isinstance(local, HalfShard) else local.dequantize(torch.float32)
            state_dict[prefix + name] = as_dtensor_like(values, param)
