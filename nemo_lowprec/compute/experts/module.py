"""The converted module of experts: its two projections are grouped GEMMs at the level's precision."""

from __future__ import annotations

from dataclasses import replace
from inspect import signature
from typing import Any, Self

import torch
from torch import Tensor, nn

from nemo_lowprec.compat.autograd import unwrap_if_dead
from nemo_lowprec.compute.autocast import AutocastOff
from nemo_lowprec.compute.backends.base import is_transformed
from nemo_lowprec.compute.experts.function import ExpertsFunction
from nemo_lowprec.compute.experts.fused import FusedGemms, can_fuse
from nemo_lowprec.compute.experts.fused_blocks import FusedBlockGemms, fits
from nemo_lowprec.compute.experts.gate import Gate
from nemo_lowprec.compute.experts.gemms import LoopGemms
from nemo_lowprec.compute.experts.layout import ExpertsLayout
from nemo_lowprec.compute.gemm_plan import GemmPlan


class LowPrecisionExperts(nn.Module):
    """Experts with the GEMMs of two ``GemmPlan``s; conversion derives the module's class from this one and its own.

    The forward takes what transformers' interface gives: tokens [tokens, features], the experts of each token and their
    weights, both [tokens, top_k]; and returns [tokens, features] in the dtype of the tokens.

    Attributes:
        layout: of the weights.
        gate: what is computed between the projections.
        gemm_plans: by the names of the weights.
    """

    layout: ExpertsLayout
    gate: Gate
    gemm_plans: dict[str, GemmPlan]

    @torch.compiler.disable
    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        tokens, index, scores = _arguments(self, args, kwargs)
        if is_transformed() or not tokens.numel():
            return super().forward(tokens, index, scores)  # type: ignore[misc,no-any-return]
        tokens, scores = unwrap_if_dead(tokens), unwrap_if_dead(scores)
        device = "cuda" if tokens.is_cuda else tokens.device.type
        plans = [self.gemm_plans[name] for name in self.layout.weights]
        if torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) != plans[0].half:
            plans = [replace(plan, half=torch.get_autocast_dtype(device)) for plan in plans]
        up, down = (self._parameters[name] for name in self.layout.weights)
        biases = (None, None) if self.layout.biases is None else [self._parameters[name] for name in self.layout.biases]
        grad = torch.is_grad_enabled()
        with AutocastOff(device):
            gemms = _gemms_of(plans, (up, down), tokens.device)(index, self.num_experts)  # type: ignore[arg-type]
            call = self, self.layout, self.gate, plans, gemms, tokens.dtype, self.training, grad
            return ExpertsFunction.apply(tokens, scores, up, down, *biases, call)  # type: ignore[no-any-return]

    @property
    def waits(self) -> bool:
        """Whether the host waits for the device in each pass, so that no CUDA graph holds the module."""
        weights = tuple(self._parameters[name] for name in self.layout.weights)
        return _gemms_of(list(self.gemm_plans.values()), weights, weights[0].device).waits  # type: ignore[union-attr]

    def train(self, mode: bool = True) -> Self:
        for plan in self.gemm_plans.values():
            if not mode and plan.weight is not None:
                plan.weight.look_again()
        return super().train(mode)


def _gemms_of(plans: list[GemmPlan], weights: tuple[Any, ...], device: torch.device) -> type[LoopGemms]:
    """What computes the two projections."""
    if not can_fuse(plans, device):
        return LoopGemms
    if plans[0].operands["weight"].layout is None:
        return FusedGemms
    return FusedBlockGemms if fits(weights) else LoopGemms


def _arguments(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """(tokens, index, scores), by their places in the module's own forward."""
    if len(args) == 3 and not kwargs:
        return args
    classes = type(module).__mro__
    own: Any = classes[classes.index(LowPrecisionExperts) + 1]
    bound = signature(own.forward).bind(module, *args, **kwargs)
    return tuple(list(bound.arguments.values())[1:4])  # type: ignore[return-value]
