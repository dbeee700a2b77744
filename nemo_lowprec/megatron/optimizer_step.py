"""A step on Megatron-core: one norm of all gradients, one loss scale, one decision to skip, and the user's optimizer.

Unscaling, clipping and the search for gradients that are not finite are one pass over them, whose result the kernels
that step read on the device. Experts' parameters, which Megatron-core spreads over other processes than the rest, are
stepped by a twin of the user's optimizer.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding
from megatron.core.fp8_utils import is_float8tensor
from megatron.core.optimizer import OptimizerConfig
from torch import Tensor
from torch.optim import Optimizer

from nemo_lowprec.engine import Step
from nemo_lowprec.grads import FoundInf
from nemo_lowprec.megatron.chunks import unhook
from nemo_lowprec.megatron.optimizer import LowPrecisionDistributedOptimizer
from nemo_lowprec.megatron.settings import MegatronSettings


class Stepper:
    """The optimizer of this process's chunks, each wrapped in Megatron's DistributedDataParallel.

    Args:
        inner: torch's Adam or AdamW of their parameters; holds this process's parts of them from now on.
        config: of Megatron-core, with the level's fields.
        settings: of the level.
        chunks: the wrapped parts of the model.
        guard: scales the loss and decides to skip.

    Attributes:
        parts: the distributed optimizers: of the parameters, and of the experts' where there are any.
        grad_norm: of the last step's gradients before clipping, FP32 scalar on the device; None before the first step.
    """

    def __init__(
        self, inner: Optimizer, config: OptimizerConfig, settings: MegatronSettings, chunks: list[Any], guard: Step
    ) -> None:
        self.inner, self.chunks, self.guard, self._clip = inner, chunks, guard, config.clip_grad
        self.grad_norm: Tensor | None = None
        twin = _twin_of_experts(inner)
        with_context = {"with_context_parallel": True}
        self.parts = [
            LowPrecisionDistributedOptimizer(
                inner, config, settings, chunks, {i: c.buffers for i, c in enumerate(chunks)},
                parallel_state.get_data_parallel_group(**with_context),
                parallel_state.get_data_parallel_group_gloo(**with_context),
                dist.get_rank(parallel_state.get_model_parallel_group()),
            )
        ]  # fmt: skip
        if twin is not None:
            self.parts.append(
                LowPrecisionDistributedOptimizer(
                    twin, config, settings, chunks,
                    {i: c.expert_parallel_buffers for i, c in enumerate(chunks)},
                    parallel_state.get_expert_data_parallel_group(),
                    parallel_state.get_expert_data_parallel_group_gloo(),
                    dist.get_rank(parallel_state.get_expert_tensor_model_pipeline_parallel_group()),
                )
            )  # fmt: skip
        for part in self.parts:
            part.observers = guard.observers

    @torch.no_grad()
    def step(self) -> bool:
        """Unscale, clip, step and refresh the weights; on this device, without waiting for it before the end.

        Skipped on all processes where a gradient, or an operand of an FP8 GEMM, is not finite on any.

        Returns:
            whether it stepped.
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
        self.guard.take(self.inner, found, partial(self._apply, divisor, found), waits=False)
        return self.inner not in self.guard.skipped

    def _apply(self, divisor: Tensor, found: FoundInf) -> None:
        for part in self.parts:
            self._follow(part.optimizer)
            part.take_written()
            part.apply(divisor, found)
        self.refresh()

    def _follow(self, twin: Optimizer) -> None:
        """Give the experts' groups the settings that schedulers have given the others."""
        if twin is not self.inner:
            for group, leader in zip(twin.param_groups, self.inner.param_groups, strict=True):
                group.update({name: value for name, value in leader.items() if name != "params"})

    def refresh(self) -> None:
        """Bring the weights that the model computes with up to date."""
        for part in self.parts:
            part.refresh()
        for chunk in self.chunks:
            if not chunk.ddp_config.overlap_param_gather:
                chunk.start_param_sync()

    def zero_grad(self) -> None:
        """Let go of the parts' gradients; those of the buffers are the model chunks' to zero."""
        for part in self.parts:
            part.zero_grad()

    # Masters and states

    def masters(self, params: Iterable[Tensor]) -> list[Tensor]:
        """What holds the exact values of these parameters on this process: masters, or parts of the weights."""
        params = list(params)
        for part in self.parts:
            part.take_written(by_value=True)
        return [main for part in self.parts for main in part.masters(params)]

    def is_weight(self, main: Tensor) -> bool:
        """Whether ``main`` is a part of a weight, which takes its updates itself."""
        return any(part.is_weight(main) for part in self.parts)

    def states(self, params: Iterable[Tensor]) -> list[dict[str, Any]]:
        """The optimizer states of the parts that this process has of these parameters."""
        params = list(params)
        return [state for part in self.parts for state in part.states(params)]

    def take_masters(self, masters: Mapping[Tensor, Tensor]) -> None:
        """Go on from the masters of an earlier optimizer of the same parameters."""
        for part in self.parts:
            part.take_masters(masters)

    def reload_masters(self) -> None:
        """Have masters start from the weights as they are."""
        for part in self.parts:
            part.reload_model_params()

    def release(self, gather: bool = True) -> dict[Tensor, Tensor]:
        """Let go of the buffers: parameters get memory of their own.

        Args:
            gather: whether weights are brought up to date before, which takes all processes.

        Returns:
            the masters, by their parameters.
        """
        for part in self.parts:
            part.take_written(by_value=True)
        masters = {param: main for part in self.parts for param, main in part.kept_masters().items()}
        for chunk in self.chunks:
            if chunk.use_forward_hook:
                chunk.disable_forward_pre_hook(param_sync=gather)
            unhook(chunk)
            for param in chunk.module.parameters():
                for held in ("main_grad", "main_param"):  # parts of the buffers
                    param.__dict__.pop(held, None)
                if not is_float8tensor(param):
                    param.data = param.data.clone()
        return masters

    # Checkpoints

    def sharded_state(self, model: dict[str, Any], is_loading: bool, metadata: dict[str, Any]) -> dict[str, Any]:
        """States in the form of Megatron's dist_checkpointing, by part; and the loss scale.

        Args:
            model: the sharded state of the model's chunks.
            is_loading: whether it is to be filled.
            metadata: ``distrib_optim_sharding_type`` and the like.
        """
        if not is_loading:
            for part in self.parts:
                part.take_written(by_value=True)
        state: dict[str, Any] = {
            name: part.sharded_state_dict(model, is_loading=is_loading, metadata=metadata)
            for name, part in zip(_NAMES, self.parts, strict=False)
        }
        if metadata["distrib_optim_sharding_type"] == "dp_reshardable" and len(self.parts) > 1:
            add_prefix_for_sharding(state["experts"], "experts.")  # both count their buckets from 0
        if self.guard.loss_scale is not None:
            state["loss_scale"] = self.guard.loss_scale.state_dict()
        return state

    def load(self, state: dict[str, Any]) -> None:
        """Take over what ``sharded_state`` has described."""
        for name, part in zip(_NAMES, self.parts, strict=False):
            # Saved where experts were on all processes, their settings are those of the other parameters.
            part.load_state_dict({**_without_states(state["parameters"]), **state[name]})
        saved = state.get("loss_scale")
        if self.guard.loss_scale is not None and saved:
            self.guard.loss_scale.load_state_dict(saved)


_NAMES = ("parameters", "experts")  # of the parts in a checkpoint


def _without_states(part: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in part.items() if key != "param_state"}


def _twin_of_experts(inner: Optimizer) -> Optimizer | None:
    """An optimizer like ``inner`` of the experts' parameters, which are taken from it; None where it has none."""
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
