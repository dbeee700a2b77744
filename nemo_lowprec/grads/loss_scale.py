"""Loss scaling for FP16, with Megatron's rules and names."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, fields
from typing import Any

__all__ = ["LossScale", "LossScaleConfig"]

_LOWEST = 2.0**-24  # FP16's smallest number: below, a gradient of 1 would become zero
_HIGHEST = 2.0**126  # FP32 holds it, and its reciprocal as a normal number
_STUCK = 10  # steps skipped in a row, where no smaller scale will come


@dataclass(frozen=True)
class LossScaleConfig:
    """How the loss is scaled.

    Args:
        loss_scale: a static scale; None for dynamic scaling.
        initial_loss_scale: first scale of dynamic scaling.
        loss_scale_window: good steps after which the scale doubles.
        hysteresis: overflows that are tolerated before the scale halves.
        min_loss_scale: the scale never falls below this.

    Raises:
        ValueError: a scale below 2**-24 or above 2**126, a count below 1, or ``initial_loss_scale`` below
            ``min_loss_scale``.
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
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
                raise ValueError(f"{name}={value!r} must be a positive number.")
            if not _LOWEST <= value <= _HIGHEST:
                raise ValueError(
                    f"{name}={value!r} must be a positive number from 2**-24 (below, FP16 gradients of 1 become zero) "
                    "to 2**126 (above, FP32 does not hold it and its reciprocal)."
                )
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
        self._skipped = 0  # steps in a row

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
        """Learn the outcome of one step. Warns where step after step is skipped and the scale cannot fall."""
        lowest = not self.dynamic or self.scale <= self.config.min_loss_scale
        self._skipped = self._skipped + 1 if overflow and lowest else 0
        if self._skipped == _STUCK:
            name = "min_loss_scale" if self.dynamic else "loss_scale"
            warnings.warn(
                f"The last {_STUCK} steps were skipped: gradients overflow at {name}={self.scale!r}, and nothing is "
                f"learned. Lower {name}, or look for what is not finite in the model or its data.",
                stacklevel=2,
            )
        if not self.dynamic:
            return
        if overflow:
            self.good_steps = 0
            self.hysteresis -= 1
            if self.hysteresis <= 0:
                self.scale = max(self.scale / 2, float(self.config.min_loss_scale))
            return
        self.good_steps += 1
        if self.good_steps >= self.config.loss_scale_window:
            self.good_steps = 0
            self.hysteresis = self.config.hysteresis
            self.scale = min(self.scale * 2, _HIGHEST)

    def state_dict(self) -> dict[str, Any]:
        """Scale and counters."""
        return {
            "scale": self.scale, "used": self.used, "good_steps": self.good_steps, "hysteresis": self.hysteresis,
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from saved counters, within this configuration's bounds; a static scale stays what it is."""
        if self.dynamic:
            self.scale = max(float(state["scale"]), float(self.config.min_loss_scale))
            self.good_steps = int(state["good_steps"])
            self.hysteresis = min(int(state["hysteresis"]), self.config.hysteresis)
            self.used, self._learned = float(state.get("used", self.scale)), False
