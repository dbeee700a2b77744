"""Weights under FSDP2: the shard is the master, and what is gathered for a layer's computation is the weight.

The model's parameters are FSDP2's; at levels whose masters are FP32 nothing is changed but the dtype of what is
gathered, which is FSDP2's own work. At the MS-AMP levels, and with ``fp8_params``, shards are of the classes of
``formats.shards``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from nemo_lowprec.formats import BlockShard, Fp8Gathered, HalfShard, PlainShard, Shard
from nemo_lowprec.formats.local import as_shard_of, is_sharded, local_of

__all__ = ["ShardedWeights"]


class ShardedWeights:
    """The sharded parameters of one model.

    Args:
        low_bit: whether the level is one of MS-AMP's.
        reads_as: dtype that gathered weights read as.
        fp8: names of the parameters that are gathered in FP8.
        margin: FP8 scales are divided by 2**margin.
        grad_dtype: of gradients of whole parameters; None for the dtype that is gathered.
        reduce_amax: makes amaxes the maxima over the processes that share a model, in place.
        gathered: called with whole parameters when they are first seen.
    """

    def __init__(
        self,
        low_bit: bool,
        reads_as: torch.dtype,
        fp8: Iterable[str],
        margin: int,
        grad_dtype: torch.dtype | None,
        reduce_amax: Callable[[Tensor], None],
        gathered: Callable[[list[Tensor]], None],
    ) -> None:
        self.low_bit, self.reads_as, self.margin = low_bit, reads_as, margin
        self.grad_dtype = grad_dtype
        self._fp8 = list(fp8)
        self._reduce_amax, self._gathered = reduce_amax, gathered
        self._sharded: dict[tuple[int, str], Any] = {}
        self._model: nn.Module | None = None
        self._handles: list[Any] = []
        self._whole: dict[tuple[int, str], Tensor] = {}

    @torch.no_grad()
    def settle(self, model: nn.Module) -> None:
        """Once ``model`` is sharded and on its device: store the shards."""
        self._model = model
        # Noted now: while a module computes, the whole parameter is in the sharded one's place.
        self._sharded = {
            (id(module), name): param
            for module in model.modules()
            for name, param in module._parameters.items()
            if param is not None and is_sharded(param)
        }
        paths = (name.rpartition(".") for name in self._fp8)
        in_fp8 = {(id(model.get_submodule(module)), own) for module, _, own in paths}
        for place, param in self._sharded.items():
            local = local_of(param)
            if isinstance(local, Shard):
                continue  # tied to one that was met before
            if place in in_fp8:
                kind = BlockShard.of if self.low_bit else PlainShard
                param._local_tensor = kind(local, self.reads_as, self.margin)
            elif self.low_bit and param.dim() > 1 and param.dtype == torch.float32:
                param._local_tensor = HalfShard(local.to(torch.float16), self.reads_as)
        self.renew_scales()
        for module in model.modules():
            if any(p is not None for p in module._parameters.values()):
                self._handles.append(module.register_forward_pre_hook(self._before_forward))
                self._handles.append(module.register_state_dict_post_hook(_emit_values))

    def _before_forward(self, module: nn.Module, args: Any) -> None:
        self._meet(module)

    def _meet(self, module: nn.Module) -> None:
        new: list[Tensor] = []
        for name, param in module._parameters.items():
            if param is None or is_sharded(param) or self._whole.get((id(module), name)) is param:
                continue
            self._whole[id(module), name] = param
            new.append(param)
            if self.low_bit and self.is_matrix(param):
                param.grad_dtype = None
            elif self.grad_dtype is not None and param.is_floating_point():
                param.grad_dtype = self.grad_dtype
        if new:
            self._gathered(new)

    def meet_all(self) -> None:
        """Look at the parameters that are gathered by now, also those that their module's forward did not use."""
        assert self._model is not None
        for module in self._model.modules():
            self._meet(module)

    def sharded(self, module: nn.Module, name: str) -> Tensor | None:
        """The sharded parameter ``name`` of ``module``, also while a whole one is in its place."""
        return self._sharded.get((id(module), name))

    def is_matrix(self, param: Tensor) -> bool:
        """Whether the gradient of a whole parameter is stored in FP8."""
        return self.low_bit and param.dim() > 1

    def matrices(self) -> list[tuple[Tensor, Tensor]]:
        """(whole, sharded) of every matrix that was gathered so far, each once and in the model's order."""
        assert self._model is not None
        found: dict[int, tuple[Tensor, Tensor]] = {}
        for module in self._model.modules():
            for name in module._parameters:
                whole = self._whole.get((id(module), name))
                if whole is not None and self.is_matrix(whole):
                    found.setdefault(id(whole), (whole, self._sharded[id(module), name]))
        return list(found.values())

    @torch.no_grad()
    def renew_scales(self) -> None:
        """After the shards have changed: the scales of FP8 weights, from the largest magnitude on all processes."""
        params = {id(p): p for p in self._sharded.values()}.values()
        shards = [shard for p in params if isinstance(shard := local_of(p), Fp8Gathered)]
        if shards:
            amax = torch.stack([shard.local_amax() for shard in shards])
            self._reduce_amax(amax)
            Fp8Gathered.set_scales(shards, amax)

    @torch.no_grad()
    def remove(self) -> None:
        """Give the shards their values back as plain FP32."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for param in self._sharded.values():
            local = local_of(param)
            param.grad = None
            if isinstance(local, Shard):
                param._local_tensor = local.dequantize(torch.float32).clone()  # type: ignore[attr-defined]
        self._whole.clear()
        self._sharded.clear()


def _emit_values(module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
    """Sharded plain tensors of the values that the shards of ``module`` stand for."""
    for name, param in module._parameters.items():
        local = local_of(param) if param is not None else None
        if isinstance(local, Shard) and prefix + name in state_dict:
            values = local.data_fp16 if isinstance(local, HalfShard) else local.dequantize(torch.float32)
            state_dict[prefix + name] = as_shard_of(values, param)
