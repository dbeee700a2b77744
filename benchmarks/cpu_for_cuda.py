"""Megatron-core's distributed optimizer on the CPU, over gloo: it asks for CUDA where any device would do."""

from __future__ import annotations

from typing import Any

import nemo_lowprec.megatron.engine as engine
import nemo_lowprec.strategies.megatron as strategy
from benchmarks.torch_on_cpu import TorchOnCpu

__all__ = ["CpuForCuda"]


def _config(**fields: Any) -> Any:
    """Megatron's OptimizerConfig without precision-aware states, for which it would ask for Transformer Engine.

    The optimizer of this package switches Megatron's own off in any case.
    """
    from megatron.core.optimizer import OptimizerConfig

    return OptimizerConfig(**{k: v for k, v in fields.items() if "aware" not in k and not k.endswith("_dtype")},
                           params_dtype=fields["params_dtype"])  # fmt: skip


class CpuForCuda(TorchOnCpu):
    """``TorchOnCpu`` for the MegatronStrategy of this package, which would refuse a CPU."""

    def replaced(self) -> list[tuple[Any, str, Any]]:
        return [
            *super().replaced(),
            (engine, "OptimizerConfig", _config),
            (strategy, "check_megatron", lambda: None),
            (strategy, "check_device", lambda level: None),
        ]
