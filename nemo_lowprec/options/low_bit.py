"""Arguments of the levels with low-bit optimizer states."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

__all__ = ["LowBitOptions"]


@dataclass(frozen=True)
class LowBitOptions:
    """How low-bit weights are updated.

    Args:
        stochastic_rounding: round updated 16-bit weights (O3: masters) up or down at random, so that updates far
            smaller than a weight are kept on average.
        rounding_seed: seed of stochastic rounding, of weights and of moments (see ``StateFormats``).
        gradient_release: step each parameter as soon as its gradient is complete, and free the gradient.
    """

    stochastic_rounding: bool = False
    rounding_seed: int = 0
    gradient_release: bool = False

    def __post_init__(self) -> None:
        for name in ("stochastic_rounding", "gradient_release"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}={getattr(self, name)!r} must be True or False.")
        seed = self.rounding_seed
        if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**32:
            raise ValueError(f"rounding_seed={seed!r} must be an integer from 0 to 2**32 - 1.")

    @staticmethod
    def arguments() -> dict[str, Any]:
        """Argument names and defaults."""
        return {f.name: f.default for f in fields(LowBitOptions)}
