"""An audit's look at the package's own engine: a model that each process holds whole, or shards of it.

Of a whole model, gradients are read right after backward. Of a sharded one, weights are read while they are gathered,
and gradients before they are reduced onto the shards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from nemo_lowprec.compat.distributed import bytes_of_buckets
from nemo_lowprec.engine import Engine
from nemo_lowprec.report.look import Held, Look
from nemo_lowprec.report.parts import Parts, converted_weights, frozen_part, parts_of, states_of
from nemo_lowprec.report.tensor_storage import Bytes, Stored, as_stored
from nemo_lowprec.report.traffic import Sent
from nemo_lowprec.tensors.dtensor import local_shard
from nemo_lowprec.weights import ShardedWeights, kept_in_fp32, master_of


class EngineLook(Look):
    """Looks at a model that ``engine`` has converted, and that each process holds whole."""

    def __init__(self, engine: Engine, trainer: pl.Trainer, module: nn.Module) -> None:
        self._engine, self._trainer = engine, trainer
        super().__init__(engine, engine.options, module)

    def after_backward(self) -> None:
        self.take_gradients(lambda param: param.grad)

    def parts(self) -> Parts:
        level, model = self.level, self.model
        kept = kept_in_fp32(model, level.is_low_bit) if level.has_half_weights else set()
        trained = [p for p in model.parameters() if p.requires_grad]
        return parts_of(level, trained, converted_weights(model, level, self.conversion), kept)

    def frozen(self) -> Parts:
        found: Parts = {}
        for param in self.model.parameters():
            if not param.requires_grad:
                found.setdefault(frozen_part(param), []).append(param)
        return found

    def held(self, params: Sequence[nn.Parameter]) -> Held:
        optimizers = self._trainer.optimizers
        found = [Bytes(tensors) for tensors in states_of(o.state.get(p, {}) for o in optimizers for p in params)]
        states = [one if one.total else None for one in found]
        masters = Bytes(master_of(p) for p in params if p.requires_grad)
        return Held(Bytes(params), masters, states, sum(local_shard(p).numel() for p in params))

    def sent_gradients(self) -> list[Sent] | None:
        return [s for s in self.traffic.sent if s.kind != "broadcast"] if self._trainer.world_size > 1 else None

    def further_bytes(self) -> dict[str, int]:
        """Bytes of what frozen weights held before, and of the copies of gradients that torch's DDP holds.

        The copies count where gradients are no views of them.
        """
        before = Bytes(master_of(p) for p in self.model.parameters() if not p.requires_grad).total
        found = {"Frozen weights as they came, on the CPU": before} if before else {}
        ddp = self._trainer.strategy.model
        if isinstance(ddp, DistributedDataParallel) and not ddp.gradient_as_bucket_view:
            found["DDP's buckets, beside the gradients"] = bytes_of_buckets(ddp)
        return found


class ShardedLook(EngineLook):
    """Looks at a model whose shards FSDP2 gathers."""

    places = {
        "Weight": "while it is gathered",
        "Master weight": "its shard, after the step",
        "Weight gradient": "before it is reduced",
        "Optimizer states": "their shards, after the step",
    }
    is_sharded = True

    def begin(self) -> None:
        # What whole parameters, and their gradients, are stored as; both by the id of the sharded parameter.
        self._whole: dict[int, Stored] = {}
        self._unreduced: dict[int, Stored] = {}
        self._sharded: dict[int, int] = {}  # by the id of the whole parameter
        for module in self.model.modules():
            self.stack.callback(module.register_forward_pre_hook(self._before_forward).remove)

    def _before_forward(self, module: nn.Module, args: Any) -> None:
        shards = self._engine.columns.weights
        assert isinstance(shards, ShardedWeights)
        for name, param in module._parameters.items():
            sharded = shards.sharded(module, name)
            if param is None or sharded is None or param is sharded:
                continue
            self._whole[id(sharded)] = as_stored(param)
            if param.requires_grad and id(param) not in self._sharded:
                self._sharded[id(param)] = id(sharded)
                self.stack.callback(param.register_post_accumulate_grad_hook(self._note_gradient).remove)

    def _note_gradient(self, whole: Tensor) -> None:
        if whole.grad is not None:  # else it is stored in FP8, and announced
            self.gradient(whole, whole.grad, None)

    def gradient(self, param: Tensor, stored: Tensor, values: Tensor | None) -> None:
        self._unreduced[self._sharded[id(param)]] = as_stored(stored)

    def after_backward(self) -> None:
        self.take_gradients(lambda param: self._unreduced.get(id(param)))

    def held(self, params: Sequence[nn.Parameter]) -> Held:
        whole = [self._whole.get(id(p)) for p in params]
        pairs = zip(whole, params, strict=True)
        shards = [as_stored(p) for one, p in pairs if one is not None and p.requires_grad and _differ(one, p)]
        return replace(super().held(params), weights=Bytes(whole), masters=Bytes(shards))

    def sent_gradients(self) -> list[Sent] | None:
        sent = super().sent_gradients()
        return None if sent is None else [s for s in sent if not (self._is_weight(s) or s.by_optimizer)]

    def _is_weight(self, sent: Sent) -> bool:
        """Whether a message gathers weights: of one copy of the model, among the processes that hold it."""
        sharding = self._engine.sharding
        assert sharding is not None
        group = sharding.shards or dist.group.WORLD
        return not sent.by_optimizer and sent.kind == "all_gather" and sent.group == group.group_name  # type: ignore[union-attr]

    def further_bytes(self) -> dict[str, int]:
        sent = self.traffic.sent
        further = {
            "Comm, gathered weights": sum(s.bytes for s in sent if self._is_weight(s)),
            "Comm, matrices that Muon orthogonalizes": sum(s.bytes for s in sent if s.by_optimizer),
            "Shards of frozen weights": Bytes(p for p in self.model.parameters() if not p.requires_grad).total,
        }
        return {name: size for name, size in further.items() if size}


def _differ(whole: Stored, param: nn.Parameter) -> bool:
    """Whether the shard of ``param`` has another format than the weight that is gathered."""
    return whole.format != as_stored(param).format
