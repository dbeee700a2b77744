"""Loss scaling for FP16, with Megatron's rules and names."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

__all__ = ["LossScale", "LossScaleConfig"]


@dataclass(frozen=True)
class LossScaleConfig:
    """How the loss is scaled.

    Args:
        loss_scale: a static scale; None for dynamic scaling.
        initial_loss_scale: first scale of dynamic scaling.
        loss_scale_window: good steps after which the scale doubles.
        hysteresis: overflows that are tolerated before the scale halves.
        min_loss_scale: the scale never falls below this.
    """

    loss_scale: float | None = None
    initial_loss_scale: float = 2.0**16
    loss_scale_window: int = 1000
    hysteresis: int = 2
    min_loss_scale: float = 1.0

    def __post_init__(self) -> None:
        for name in ("loss_scale", "initial_loss_scale", "min_loss_scale"):
            value = getattr(self, name)
            if name == "loss_scale" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
                raise ValueError(f"{name}={value!r} must be a positive number.")
        for name in ("loss_scale_window", "hysteresis"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}={value!r} must be an integer of at least 1.")
        if self.initial_loss_scale < self.min_loss_scale:
            raise ValueError(
                f"initial_loss_scale={self.initial_loss_scale!r} lies below min_loss_scale={self.min_loss_scale!r}."
            )

    @staticmethod
    def arguments() -> dict[str, Any]:
        """Argument names and defaults."""
        return {f.name: f.default for f in fields(LossScaleConfig)}


class LossScale:
    """The current scale and the counters behind it.

    Attributes:
        scale: of the next backward pass.
        used: of the gradients that are there.

    Source: Megatron-core's ``DynamicGradScaler``: the hysteresis is spent by overflows, however far apart, and
    restored when the scale grows.
    """

    def __init__(self, config: LossScaleConfig) -> None:
        self.config = config
        self.dynamic = config.loss_scale is None
        self.scale = float(config.initial_loss_scale if config.loss_scale is None else config.loss_scale)
        self.good_steps = 0
        self.hysteresis = config.hysteresis
        self.used = self.scale
        self._learned: bool | None = None

    def begin(self) -> float:
        """The scale of a backward pass: that of the pass before, unless a step has used its gradients since."""
        if self._learned is not None:
            self.used, self._learned = self.scale, None
        return self.used

    def learn(self, overflow: bool) -> None:
        """The outcome of one optimizer's step. Several that step on the gradients of one pass count as one."""
        if self._learned is None or (overflow and not self._learned):
            self.update(overflow)
        self._learned = bool(self._learned) or overflow

    def update(self, overflow: bool) -> None:
        """Learn the outcome of one step."""
        if not self.dynamic:
            return
        if overflow:
            self.good_steps = 0
            self.hysteresis -= 1
            if self.hysteresis <= 0:
                self.scale = max(self.scale / 2, float(self.config.min_loss_scale))
            return
        self.good_steps += 1
        if self.good_steps == self.config.loss_scale_window:
            self.good_steps = 0
            self.hysteresis = self.config.hysteresis
            self.scale *= 2

    def state_dict(self) -> dict[str, Any]:
        """Scale and counters."""
        return {
            "scale": self.scale, "used": self.used, "good_steps": self.good_steps, "hysteresis": self.hysteresis,
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from saved counters; a static scale stays what it was configured to be."""
        if self.dynamic:
            self.scale = float(state["scale"])
            self.good_steps, self.hysteresis = int(state["good_steps"]), int(state["hysteresis"])
            self.used, self._learned = float(state.get("used", self.scale)), False
