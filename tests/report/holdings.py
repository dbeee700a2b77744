"""What a real run holds and sends: storages that are alive, by column of a plan, each counted once."""

from __future__ import annotations

import gc
import time
import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from nemo_lowprec.comm.buckets import Fp8ShardBucket
from nemo_lowprec.report.traffic import Traffic
from nemo_lowprec.tensors import Fp8Gathered, QuantizedTensor
from nemo_lowprec.tensors.dtensor import is_sharded, local_shard
from nemo_lowprec.tensors.gradient import DETACHED_GRADS
from nemo_lowprec.weights import master_of


def plain(tensor: Any) -> Iterator[Tensor]:
    """The plain tensors that a tensor, or what is in a container, is made of."""
    if isinstance(tensor, dict):
        tensor = list(tensor.values())
    if isinstance(tensor, (list, tuple)):
        for one in tensor:
            yield from plain(one)
    elif isinstance(tensor, Tensor):
        tensor = local_shard(tensor)
        if isinstance(tensor, QuantizedTensor):
            yield from tensor.parts()
        else:
            yield tensor


def storages(tensors: Iterable[Any]) -> dict[int, int]:
    """Bytes by storage."""
    found = {}
    for tensor in plain(list(tensors)):
        storage = tensor.untyped_storage()
        found[storage._cdata] = storage.nbytes()
    return found


def size(*tensors: Any) -> int:
    """Bytes of the storages of some tensors."""
    return sum(storages(tensors).values())


def everything() -> int:
    """Bytes of all tensors that Python knows of, but for those that are there since ``gc.freeze``."""
    if dist.is_initialized():  # gloo's threads let go of what they have sent
        dist.barrier()
        time.sleep(0.05)
    gc.collect()
    # Not isinstance, which asks proxies for a class of their own.
    found = [o for o in gc.get_objects() if issubclass(type(o), Tensor)]
    return sum(storages(t for t in found if not t.is_meta and t.layout == torch.strided).values())


def fsdp_params(model: nn.Module) -> list[Any]:
    """FSDP2's own record of each sharded parameter."""
    groups = [m._get_fsdp_state()._fsdp_param_group for m in model.modules() if isinstance(m, FSDPModule)]
    return [p for group in groups if group is not None for p in group.fsdp_params]


class Flat:
    """The flat buffers of FSDP2 that are alive, without those that become gradients."""

    def __init__(self) -> None:
        self._alive: list[weakref.ref[Tensor]] = []
        self._reduced = 0

    def __enter__(self) -> Flat:
        self._allocate = collectives.DefaultAllocMixin.allocate

        def allocate(comm: Any, *args: Any, **kwargs: Any) -> Tensor:
            tensor = self._allocate(comm, *args, **kwargs)
            if isinstance(comm, collectives.DefaultReduceScatter):
                self._reduced += 1
            if not isinstance(comm, collectives.DefaultReduceScatter) or self._reduced % 2:  # of input and output
                self._alive.append(weakref.ref(tensor))
            return tensor

        collectives.DefaultAllocMixin.allocate = allocate
        return self

    def __exit__(self, *_: Any) -> None:
        collectives.DefaultAllocMixin.allocate = self._allocate

    def bytes(self) -> int:
        self._alive = [r for r in self._alive if r() is not None]
        return size([r() for r in self._alive])


class Most(TorchDispatchMode):
    """Context that looks at what is in flight before each GEMM, whatever belongs to a collective, and where whole
    gradients are given away; and keeps the most of each."""

    def __init__(self, model: nn.Module, engine: Any, flat: Flat) -> None:
        super().__init__()
        self.model, self.engine, self.flat = model, engine, flat
        self.params = fsdp_params(model)
        self.found: dict[str, int] = defaultdict(int)

    def __enter__(self) -> Most:
        self._originals = {Fp8ShardBucket: Fp8ShardBucket.launch, FSDPParamGroup: FSDPParamGroup.post_backward}
        launch, post_backward = self._originals.values()

        def look_and_launch(bucket: Fp8ShardBucket) -> None:  # which takes the gradients out, as the next one does
            self.look_at_gradients()
            launch(bucket)

        def look_and_go_on(group: FSDPParamGroup, *args: Any) -> None:
            self.look_at_gradients()
            post_backward(group, *args)

        Fp8ShardBucket.launch, FSDPParamGroup.post_backward = look_and_launch, look_and_go_on
        super().__enter__()
        return self

    def __exit__(self, *exc_info: Any) -> None:
        Fp8ShardBucket.launch, FSDPParamGroup.post_backward = self._originals.values()
        super().__exit__(*exc_info)

    def _note(self, name: str, found: int) -> None:
        self.found[name] = max(self.found[name], found)

    def look_at_gradients(self) -> None:
        wholes = [p._unsharded_param for p in self.params if hasattr(p, "_unsharded_param")]
        added_up = [getattr(p, "unsharded_accumulated_grad", None) for p in self.params]
        apart = [DETACHED_GRADS.get(whole) for whole in wholes]
        self._note("Whole gradients", size([whole.grad for whole in wholes], added_up, apart))

    def look(self) -> None:
        self.look_at_gradients()
        self._note("Gathered weights", size([getattr(p, "all_gather_outputs", []) for p in self.params]))
        self._note("Communication buffers", self.flat.bytes() + size(in_exchange(self.engine.columns.comm.reducer)))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "fsdp") or func is torch.ops.aten.mm.default:
            self.look()
        return func(*args, **(kwargs or {}))


def in_exchange(reducer: Any) -> list[Any]:
    """Buffers of the buckets that are under way."""
    found = []
    for bucket in reducer._buckets if reducer is not None else []:
        exchanges = [getattr(bucket, "buffers", None), getattr(getattr(bucket, "_replicas", None), "_buffers", None)]
        for buffers in exchanges:
            found += [getattr(buffers, n, None) for n in ("_sent", "_received", "_mean", "_gathered")]
        found += [getattr(bucket, "_flat", None), getattr(bucket, "_mean", None)]
    return found


class Measure(Callback):
    """Measures the second step of a run.

    Attributes:
        found: bytes by column; ``everything`` is all that Python holds right after backward, but for the model's
            buffers and the batch.
        sent: bytes by kind of collective.
    """

    def __init__(self) -> None:
        self.found: dict[str, int] = {}
        self.sent: dict[str, int] = {}
        self._flat, self._most, self._traffic = Flat(), None, None

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self._flat.__enter__()

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
        if trainer.global_step == 1 and self._most is None:
            engine = trainer.precision_plugin.engine
            self._most = Most(module, engine, self._flat)
            self._traffic = Traffic(lambda t: is_bookkeeping(t, engine), engine.observers)
            self._traffic.__enter__()
            self._most.__enter__()

    def on_after_backward(self, trainer: Any, module: Any) -> None:
        if self._most is not None and (trainer.fit_loop._should_accumulate() is False):
            self.found["Weight gradient"] = size([p.grad for p in module.parameters()])
            rest = size(list(module.buffers()), trainer.callback_metrics)
            self.found["everything"] = everything() - rest

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
        if trainer.global_step != 2 or self._most is None:
            return
        self._most.__exit__(None, None, None)
        self._traffic.__exit__(None, None, None)
        self._flat.__exit__()
        engine = trainer.precision_plugin.engine
        params = list(module.parameters())
        # Unscaled for the step, they stay so until they are zeroed.
        if (wider := size([p.grad for p in params]) - self.found["Weight gradient"]) > 0:
            self.found["Unscaled gradients"] = wider
        held = [p for p in params if not is_master(p, engine)]
        masters = [p for p in params if is_master(p, engine)]
        self.found |= {
            **self._most.found,
            # What FSDP2 keeps of a shard beside the parameter is the same storage, or counts.
            "Weight": size(held, [p._sharded_param_data for p in fsdp_params(module) if not is_master(p, engine)]),
            "Master weight": size(masters, list(map(master_of, params)), [
                p._sharded_param_data for p in fsdp_params(module) if is_master(p, engine)
            ]),
            "Optimizer states": size(*[
                [s["exp_avg"], s["exp_avg_sq"]] for o in trainer.optimizers for s in o.state.values()
            ]),
        }  # fmt: skip
        if engine.amaxes.histories is not None:
            table = engine.amaxes.histories
            self.found["Amax history"] = size(table.history, table.amax, table.scale)
        self.found["Quantized weights"] = quantized_weights(engine, params)
        ddp = trainer.strategy.model
        if isinstance(ddp, DistributedDataParallel) and not engine.level.has_half_weights:
            buckets = ddp._get_ddp_logging_data()["bucket_sizes"]  # as its reducer reports them
            self.found["Communication buffers"] = sum(int(b) for b in str(buckets).split(","))
        for one in self._traffic.sent:
            if one.kind != "broadcast":
                self.sent[one.kind] = self.sent.get(one.kind, 0) + one.bytes
        self._most = self._traffic = None


def quantized_weights(engine: Any, params: list[Any]) -> int:
    """Bytes of the operands that layers keep, without those that are a weight's own storage."""
    kept = [vars(state._kept) for state in engine.amaxes.weights.states.values() if state._kept is not None]
    of_params = storages(params)
    return sum(found for key, found in storages(kept).items() if key not in of_params)


def is_master(param: Any, engine: Any) -> bool:
    """Whether a shard is a master: of what is gathered in another format."""
    sharded = getattr(param, "sharded_param", param)  # of FSDP2's record
    if not is_sharded(sharded):
        return False
    level = engine.level
    return isinstance(local_shard(sharded), Fp8Gathered) or (level.has_half_weights and not level.is_low_bit)


def is_bookkeeping(tensor: Tensor, engine: Any) -> bool:
    """Amaxes, flags and logged numbers: what is sent beside weights and gradients."""
    histories = engine.amaxes.histories
    if histories is not None and tensor.untyped_storage()._cdata == histories.amax.untyped_storage()._cdata:
        return True
    shards = getattr(engine.columns.weights, "_sharded", {}).values()
    scaled = sum(isinstance(local_shard(p), Fp8Gathered) for p in shards)
    is_amax = scaled > 0 and tensor.dtype == torch.float32 and tensor.numel() == scaled
    return is_amax or tensor.dtype == torch.int8 or tensor.numel() == 1
