"""Drives an engine by hooks of the model and the optimizer, in a training loop without Lightning."""

from __future__ import annotations

import warnings
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from nemo_lowprec.comm import GradientReducer, leave_to_ddp, take_from_ddp
from nemo_lowprec.compat.autograd import after_backward
from nemo_lowprec.compat.compiler import outside_graphs
from nemo_lowprec.compat.distributed import ddp_in_forward, is_managed_by_fsdp, is_replica
from nemo_lowprec.compat.modules import call_first
from nemo_lowprec.compat.tensors import tree_leaves
from nemo_lowprec.engine import Engine
from nemo_lowprec.grads import FoundInf
from nemo_lowprec.loops.grad_scaler import tell_grad_scaler

_OWN = {  # of the engine's state, in the optimizer's
    "fp8": "fp8_histories", "te": "te_histories", "groups": "fp8_groups", "learned": "fp8_learned",
    "speed": "fp8_layers",
}  # fmt: skip


def refuse_sharded(model: nn.Module) -> None:
    """Raise ValueError where ``fully_shard`` has sharded parameters of ``model``.

    Such shards, their gradients and the optimizer's states would stay FP32.
    """
    if not dist.is_initialized():
        return
    from torch.distributed.fsdp import FSDPModule

    if any(isinstance(module, FSDPModule) for module in model.modules()):
        raise ValueError(
            "This model's parameters are sharded (by fully_shard), which initialize cannot train. Use a Trainer with "
            "strategy='lowprec_sharded', which shards the model, or takes over what fully_shard has cut; or leave "
            "fully_shard out, and use DistributedDataParallel."
        )


class PlainLoop:
    """Updates amax histories at each step, saves them with the optimizer's state, and tells GradScaler of overflows.

    Where GradScaler has skipped a step, the next training forward discards the step's amaxes.
    """

    def __init__(self, engine: Engine, model: nn.Module, optimizer: Optimizer) -> None:
        self._engine = engine
        self._looked_at = self._looked_into = False
        self._written: FoundInf | None = None
        model.register_forward_pre_hook(self._before_forward)
        engine.when_adopted = self.follow
        self._averages = AveragesGradients(engine)
        self.follow(optimizer)

    def follow(self, optimizer: Optimizer) -> None:
        """Hook into the steps and the state of ``optimizer``, made before or after the conversion."""
        optimizer.all_reduce_grads = self._averages  # type: ignore[attr-defined]
        tell_grad_scaler(optimizer, self._found)
        before = optimizer.register_step_pre_hook(self._before_step)
        # First, while the model's own parameters, and not the masters, are in the groups.
        call_first(optimizer, before)
        optimizer.register_step_post_hook(self._after_step)
        optimizer.register_state_dict_pre_hook(lambda _: self._refuse_written())
        optimizer.register_state_dict_post_hook(self._with_own_state)
        optimizer.register_load_state_dict_pre_hook(self._before_loading)

    @outside_graphs
    def _before_forward(self, model: nn.Module, args: Any) -> None:
        if not torch.is_grad_enabled():
            self._engine.columns.computation.before_forward()  # for compiled graphs, which evaluate, too
            return
        if not self._looked_into:
            refuse_sharded(model)  # fully_shard may have been called after the conversion
        self._check_own_parameters(model)
        for column in self._engine.columns:
            column.before_forward()
            column.before_backward()
        if self._looked_at:
            self._looked_at = False
            self._engine.amaxes.after_step(skipped=True)

    def _check_own_parameters(self, model: nn.Module) -> None:
        """Raise ValueError where a wrapper has replaced the parameters, and the optimizer would step unused copies.

        The parts of the model are checked at the first forward only.
        """
        if is_replica(model):
            raise ValueError(
                "DataParallel computes with copies of the parameters, which get no gradients in FP8. Use "
                "DistributedDataParallel, one process a GPU."
            )
        if any(map(is_managed_by_fsdp, [model] if self._looked_into else model.modules())):
            raise ValueError(
                "FSDP has taken the parameters of a model that initialize had converted: the optimizer would step "
                "others. Use DistributedDataParallel, or a Trainer with strategy='lowprec_sharded'."
            )
        self._looked_into = True

    def _found(self, found: Tensor) -> Tensor:
        self._looked_at = True
        return self._engine.step.found_on_any_rank(found)

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        self._refuse_written()
        differ = self._engine.columns.weights.find_written(optimizer)
        self._written = None if differ is None else FoundInf(differ.float())
        for see in self._engine.observers.before_update:
            see(optimizer)
        closure = kwargs.get("closure") or (args[1] if len(args) > 1 else None)
        if closure is None:
            return None
        return args[:1], {**kwargs, "closure": self._engine.columns.evaluating(optimizer, closure)}

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        self._looked_at = False
        for see in self._engine.observers.after_update:
            see(optimizer)
        if self._written is not None and not self._written.on_device.is_cuda:
            self._refuse_written()  # on a GPU before the next step, so that the host does not wait for this one
        for column in self._engine.columns:
            column.after_step(skipped=False)

    def _refuse_written(self) -> None:
        written, self._written = self._written, None
        if written:
            self._engine.columns.weights.refuse_written()

    def _before_loading(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        own = {name: state[key] for name, key in _OWN.items() if key in state}
        if own:
            self._engine.columns.computation.load_state_dict(own)

    def _with_own_state(self, _: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        own = self._engine.columns.computation.state_dict()
        return {**state, **{key: own[name] for name, key in _OWN.items() if name in own}}


class AveragesGradients:
    """Averages gradients without DDP: the method ``optimizer.all_reduce_grads(module)``."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._of_parts: dict[tuple[int, ...], GradientReducer] = {}
        self._met: list[Any] = []  # groups whose processes were given the same weights

    def __call__(self, module: nn.Module, group: Any = None) -> None:
        """Average the gradients of ALL parameters of ``module`` over the processes; FP8 gradients are sent in FP8.

        The first call gives every process of ``group`` the weights and buffers of the group's first process.

        Args:
            module: the converted model, a part of the model, or a wrapper around the model.
            group: the processes; None for all processes.

        Raises:
            ValueError: ``module`` has parameters that are not the model's; or ``gradient_release``, which has stepped
                the parameters already.
        """
        engine, model = self._engine, self._engine.model
        assert model is not None
        params, known = list(module.parameters()), {id(p) for p in model.parameters()}
        if not {id(p) for p in params} <= known:
            raise ValueError("This module has parameters that are none of the model's that initialize has converted.")
        engine.columns.comm.check_averaging()
        if not dist.is_initialized():
            return
        before = engine.columns.comm.reducer
        whole = engine.columns.comm.average_over(group)
        if whole is not before:
            self._of_parts.clear()
        if group not in self._met:
            self._met.append(group)
            if engine.broadcast(buffers=True):
                warnings.warn(
                    "The weights of this process were others than those of the first one, which it has now; the "
                    "gradients of this step are of its own. Seed processes alike, or load the same weights.",
                    stacklevel=2,
                )
        self._reducer_of(params, len(known), whole).reduce()

    def _reducer_of(self, params: list[nn.Parameter], count: int, whole: GradientReducer) -> GradientReducer:
        key = tuple(map(id, params))
        if len(key) == count:
            return whole
        if key not in self._of_parts:
            self._of_parts[key] = GradientReducer(
                params, whole.group, self._engine.columns.comm.wire, observers=self._engine.observers
            )
        return self._of_parts[key]


class UnderDDP:
    """Averages gradients during backward, under torch's DistributedDataParallel and in the level's formats.

    Within ``no_sync()`` gradients are not averaged.
    """

    def __init__(self, engine: Engine, model: nn.Module) -> None:
        self._engine = engine
        self._wanted = False
        self._wrapper: Any = None
        self._entered = False
        self._waiting = False
        leave_to_ddp(model)
        model.register_forward_pre_hook(self._before_forward)
        model.register_forward_hook(self._after_forward)

    def __getstate__(self) -> dict[str, Any]:  # a copy of the model is in no process group
        return {**self.__dict__, "_wanted": False, "_wrapper": None}

    @outside_graphs
    def _before_forward(self, model: nn.Module, args: Any) -> None:
        ddp = ddp_in_forward()
        if ddp is None or ddp.module is not model:
            return
        if self._wrapper is None or self._wrapper() is not ddp:
            self._engine.columns.comm.average_over(ddp.process_group, ddp.bucket_bytes_cap)
            self._engine.broadcast()
            take_from_ddp(ddp)
            self._wrapper = ref(ddp)
        if torch.is_grad_enabled():
            self._wanted = ddp.require_backward_grad_sync
            self._entered, self._waiting = True, False

    @outside_graphs
    def _after_forward(self, model: nn.Module, args: Any, output: Any) -> None:
        """Hook the outputs, so that ``_begin`` runs on every process, whichever parameters its batch has used."""
        entered, self._entered = self._entered, False
        if entered and self._wanted:
            for leaf in tree_leaves(output):
                if isinstance(leaf, Tensor) and leaf.requires_grad:
                    leaf.register_hook(self._begin)

    def _begin(self, _: Tensor) -> None:
        # Not at a parameter's gradient: reentrant checkpointing computes parameters' gradients in a nested backward.
        if self._wanted and not self._waiting:
            self._waiting = True
            assert self._engine.columns.comm.reducer is not None
            self._engine.columns.comm.reducer.begin()
            after_backward(self._finish)

    def _finish(self) -> None:
        self._waiting = self._wanted = False
        assert self._engine.columns.comm.reducer is not None
        self._engine.columns.comm.reducer.finish()
