"""Loss scaling for FP16, with Megatron's rules and names."""

from __future__ import annotations

import warnings
from typing import Any

from nemo_lowprec.chart.groups import HIGHEST, LossScaleConfig

_STUCK = 10  # skipped steps in a row, at the smallest scale, before a warning


class LossScale:
    """The loss scale and its counters.

    Source: Megatron-core's ``DynamicGradScaler``: the hysteresis is spent by overflows, however far apart, and
    restored when the scale grows.
    """

    def __init__(self, config: LossScaleConfig) -> None:
        self.config = config
        self.dynamic = config.loss_scale is None
        # Of the next backward pass; ``used`` is the loss scale by which the present gradients were multiplied.
        self.scale = float(config.initial_loss_scale if config.loss_scale is None else config.loss_scale)
        self.good_steps = 0
        self.hysteresis = config.hysteresis
        self.used = self.scale
        self._learned: bool | None = None
        self._skipped = 0  # steps in a row

    def begin(self) -> float:
        """The scale of a backward pass. Passes whose gradients are added up, before one step, have the same scale."""
        if self._learned is not None:
            self.used, self._learned = self.scale, None
        return self.used

    def learn(self, overflow: bool) -> None:
        """Take in the outcome of one optimizer's step. Optimizers that step after one backward pass count once."""
        if self._learned is None or (overflow and not self._learned):
            self.update(overflow)
        self._learned = bool(self._learned) or overflow

    def update(self, overflow: bool) -> None:
        """Adapt the scale to the outcome of one step. Warns after ten skipped steps in which the scale cannot fall."""
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
            self.scale = min(self.scale * 2, HIGHEST)

    def state_dict(self) -> dict[str, Any]:
        """Scale and counters."""
        return {"scale": self.scale, "used": self.used, "good_steps": self.good_steps, "hysteresis": self.hysteresis}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load saved counters, within the bounds of ``config``; a static scale is not changed.

        Checkpoints of earlier versions on Megatron-core have the names of Megatron-core's ``DynamicGradScaler``.
        """
        if self.dynamic:
            self.scale = max(float(state["scale"]), float(self.config.min_loss_scale))
            self.good_steps = int(state.get("good_steps", state.get("growth_tracker", 0)))
            hysteresis = int(state.get("hysteresis", state.get("hysteresis_tracker", self.config.hysteresis)))
            self.hysteresis = min(hysteresis, self.config.hysteresis)
            self.used, self._learned = float(state.get("used", self.scale)), False
