"""Arguments of the loss scale, for FP16 levels; the names are Megatron's."""

from __future__ import annotations

from dataclasses import dataclass

from nemo_lowprec.options.values import Arguments, is_integer

LOWEST = 2.0**-24  # FP16's smallest number: with a smaller scale a gradient of 1 would become zero
HIGHEST = 2.0**126  # the largest power of two of which FP32 holds the reciprocal as a normal number


@dataclass(frozen=True)
class LossScaleConfig(Arguments):
    """How the loss is scaled.

    Args:
        loss_scale: a static scale; None for dynamic scaling.
        initial_loss_scale: first scale of dynamic scaling.
        loss_scale_window: steps without an overflow after which the scale doubles.
        hysteresis: overflows after which the scale halves.
        min_loss_scale: smallest scale of dynamic scaling.

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
            if not LOWEST <= value <= HIGHEST:
                raise ValueError(
                    f"{name}={value!r} must be a positive number from 2**-24 (below, FP16 gradients of 1 become zero) "
                    "to 2**126 (above, FP32 does not hold it and its reciprocal)."
                )
        for name in ("loss_scale_window", "hysteresis"):
            value = getattr(self, name)
            if not is_integer(value, 1):
                raise ValueError(f"{name}={value!r} must be an integer of at least 1.")
        if self.initial_loss_scale < self.min_loss_scale:
            raise ValueError(
                f"initial_loss_scale={self.initial_loss_scale!r} lies below min_loss_scale={self.min_loss_scale!r}."
            )
