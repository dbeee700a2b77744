"""Delayed scaling in Megatron-core's layers with Transformer Engine 2.

Megatron-core 0.16.1 to 0.19.2 pass ``override_linear_precision`` to Transformer Engine's DelayedScaling. Transformer
Engine 2 has dropped this argument, so that every step with delayed scaling would end in a TypeError.
"""

from __future__ import annotations

import inspect
from typing import Any


def mend_delayed_scaling() -> None:
    """Replace Megatron-core's recipe by a recipe without the argument, where Transformer Engine does not take it."""
    import transformer_engine.common.recipe as recipes
    from megatron.core import fp8_utils
    from megatron.core.extensions import transformer_engine as extension

    if "override_linear_precision" in inspect.signature(recipes.DelayedScaling).parameters:
        return
    if fp8_utils.TEDelayedScaling.__module__ == __name__:
        return  # it is replaced already

    class DelayedScaling(recipes.DelayedScaling):
        """Transformer Engine's recipe from a TransformerConfig, as Megatron-core's ``TEDelayedScaling`` builds it."""

        def __init__(self, config: Any, fp8_format: Any, override_linear_precision: tuple[bool, ...] = ()) -> None:
            if any(override_linear_precision):
                raise ValueError("Transformer Engine 2 has no override_linear_precision. Use fp8_wgrad=True.")
            super().__init__(
                margin=config.fp8_margin,
                fp8_format=fp8_format,
                amax_history_len=config.fp8_amax_history_len,
                amax_compute_algo=config.fp8_amax_compute_algo,
                fp8_dpa=config.fp8_dot_product_attention,
                fp8_mha=config.fp8_multi_head_attention,
            )

    fp8_utils.TEDelayedScaling = extension.TEDelayedScaling = DelayedScaling  # type: ignore[misc]
