"""A step on Megatron-core: one norm of all gradients, one loss scale, one decision to skip, and the user's optimizer.

One pass over the gradients computes their norm. The norm shows whether all gradients are finite, and gives the divisor
that unscales and clips. Adam's kernels read both on the device. Megatron-core spreads the parameters of experts over
other processes than the other parameters: a copy of the user's optimizer steps the experts.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding
from megatron.core.fp8_utils import is_float8tensor
from megatron.core.optimizer import OptimizerConfig
from torch import Tensor
from torch.optim import Optimizer

from nemo_lowprec.engine import Step
from nemo_lowprec.grads import FoundInf
from nemo_lowprec.megatron.chunks import unhook
from nemo_lowprec.megatron.optimizer import LowPrecisionDistributedOptimizer, exact
from nemo_lowprec.megatron.settings import MegatronSettings


class Stepper:
    """The optimizer of this process's chunks of the model.

    Args:
        inner, config, settings, chunks: see ``LowPrecisionDistributedOptimizer``.
        guard: scales the loss and skips steps.

    Attributes:
        parts: the distributed optimizer of the parameters, and a second one of the experts' parameters, if any.
        grad_norm: L2 norm of the last step's true gradients before clipping, FP32 scalar on the device; None before
            the first step.
        divisor: of the gradients in the last step, FP32 scalar on the device: loss scale and clipping.
    """

    def __init__(
        self, inner: Optimizer, config: OptimizerConfig, settings: MegatronSettings, chunks: list[Any], guard: Step
    ) -> None:
        self.inner, self.chunks, self.guard, self._clip = inner, chunks, guard, config.clip_grad
        self.grad_norm: Tensor | None = None
        self.divisor: Tensor | None = None
        twin = _twin_of_experts(inner)
        self.parts = [LowPrecisionDistributedOptimizer(inner, config, settings, chunks)]
        if twin is not None:
            self.parts.append(LowPrecisionDistributedOptimizer(twin, config, settings, chunks, of_experts=True))

    @torch.no_grad()
    def step(self) -> bool:
        """Unscale, clip, step and refresh the weights. The host waits for the device once, at the end.

        All processes skip the step where a gradient or an operand of an FP8 GEMM is not finite on one of them.

        Returns:
            whether the optimizer has stepped.
        """
        squares = torch.stack([part.squares() for part in self.parts]).sum()
        saturated = self.guard.saturated()
        if saturated is not None:
            squares = torch.where(saturated, torch.inf, squares)
        dist.all_reduce(squares)
        scale = self.guard.loss_scale.used if self.guard.loss_scale is not None else 1.0
        self.grad_norm = norm = squares.sqrt() / scale
        found = FoundInf((~norm.isfinite()).float())
        divisor = torch.full_like(norm, scale)
        if self._clip > 0:
            divisor = divisor * ((norm + 1e-6) / self._clip).clamp(min=1.0)
        self.divisor = divisor
        self.guard.take(self.inner, found, partial(self._apply, divisor, found), waits=False)
        return self.inner not in self.guard.skipped

    def _apply(self, divisor: Tensor, found: FoundInf) -> None:
        for part in self.parts:
            # Schedulers change the settings of the user's groups only, and not those of the experts' groups.
            for group, leader in zip(part.optimizer.param_groups, self.inner.param_groups, strict=True):
                group.update({name: value for name, value in leader.items() if name != "params"})
            part.take_written()
            part.apply(divisor, found)
        self.refresh()

    def refresh(self) -> None:
        """Write and gather the weights that the next forward pass reads; with overlap, forward itself gathers."""
        for part in self.parts:
            part.refresh(self.guard.observers)
        for chunk in self.chunks:
            if not chunk.ddp_config.overlap_param_gather:
                chunk.start_param_sync()

    def zero_grad(self) -> None:
        """Zero the gradient buffers, and set the gradients of the shards to None."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        for part in self.parts:
            part.zero_grad()

    # Masters and states

    def masters(self, params: Iterable[Tensor]) -> list[Tensor]:
        """The exact values of this process's shards of ``params``: masters, or slices of weights without a master."""
        for part in self.parts:
            part.take_written(by_value=True)
        return [exact(main) for _, main in self._shards(params)]

    def is_weight(self, main: Tensor) -> bool:
        """Whether ``main`` is a slice of a weight, and no master of one."""
        return any(part.is_weight(main) for part in self.parts)

    def states(self, params: Iterable[Tensor]) -> list[dict[str, Any]]:
        """The optimizer states of this process's shards of ``params``."""
        return [part.optimizer.state[main] for part, main in self._shards(params)]

    def _shards(self, params: Iterable[Tensor]) -> list[tuple[LowPrecisionDistributedOptimizer, Tensor]]:
        params = list(params)
        return [(part, part.main_of[param]) for part in self.parts for param in params if param in part.main_of]

    def reload_masters(self) -> None:
        """Copy the weights into their masters."""
        for part in self.parts:
            part.reload_model_params()

    def release(self, gather: bool = True) -> dict[Tensor, Tensor]:
        """Give the parameters memory of their own, and free Megatron's buffers.

        Args:
            gather: whether weights are gathered before, a collective.

        Returns:
            the master shards by parameter.
        """
        for part in self.parts:
            part.take_written(by_value=True)
        masters = {param: main for part in self.parts for param, main in part.masters().items()}
        for chunk in self.chunks:
            if chunk.use_forward_hook:
                chunk.disable_forward_pre_hook(param_sync=gather)
            unhook(chunk)
            for param in chunk.module.parameters():
                for held in ("main_grad", "main_param"):  # slices of the buffers
                    param.__dict__.pop(held, None)
                if not is_float8tensor(param):
                    param.data = param.data.clone()
        return masters

    # Checkpoints

    def sharded_state(self, model: dict[str, Any], is_loading: bool, metadata: dict[str, Any]) -> dict[str, Any]:
        """The state of each of ``parts`` in the form of Megatron's dist_checkpointing, and the loss scale.

        Args:
            model: the sharded state of the model's chunks.
            is_loading: whether the state is read into, and not written.
            metadata: Megatron-core's options of the form, such as ``distrib_optim_sharding_type``.
        """
        if not is_loading:
            for part in self.parts:
                part.take_written(by_value=True)
        state: dict[str, Any] = {
            name: part.sharded_state_dict(model, is_loading=is_loading, metadata=metadata)
            for name, part in zip(_NAMES, self.parts, strict=False)
        }
        if metadata["distrib_optim_sharding_type"] == "dp_reshardable" and len(self.parts) > 1:
            add_prefix_for_sharding(state["experts"], "experts.")  # both parts number their buckets from 0
        if self.guard.loss_scale is not None:
            state["loss_scale"] = self.guard.loss_scale.state_dict()
        return state

    def load(self, state: dict[str, Any]) -> None:
        """Load a state of ``sharded_state`` that a checkpoint has filled."""
        # A run whose experts were on all processes has saved their settings among those of the other parameters.
        settings = {key: value for key, value in state["parameters"].items() if key != "param_state"}
        for name, part in zip(_NAMES, self.parts, strict=False):
            part.load_state_dict({**settings, **state[name]})
        saved = state.get("loss_scale")
        if self.guard.loss_scale is not None and saved:
            self.guard.loss_scale.load_state_dict(saved)


_NAMES = ("parameters", "experts")  # keys of ``Stepper.parts`` in a checkpoint


def _twin_of_experts(inner: Optimizer) -> Optimizer | None:
    """Move the experts' parameters from ``inner`` into a copy of the optimizer; None where there are no experts."""
    groups = []
    for group in inner.param_groups:
        experts = [p for p in group["params"] if not getattr(p, "allreduce", True)]
        groups.append({**group, "params": experts})
        group["params"] = [p for p in group["params"] if getattr(p, "allreduce", True)]
    if not any(group["params"] for group in groups):
        return None
    twin = copy.copy(inner)
    twin.state, twin.param_groups = defaultdict(dict), groups
    return twin
