"""Arguments of the levels with low-bit optimizer states."""

from __future__ import annotations

from dataclasses import dataclass

from nemo_lowprec.options.values import Arguments, check_flag, is_integer


@dataclass(frozen=True)
class LowBitOptions(Arguments):
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
            check_flag(name, getattr(self, name))
        if not is_integer(self.rounding_seed, 0, 2**32 - 1):
            raise ValueError(f"rounding_seed={self.rounding_seed!r} must be an integer from 0 to 2**32 - 1.")
