"""The levels under NeMo 2's own MegatronStrategy.

It builds, wraps, scales and steps the model with Megatron-core, told what by the plugin's ``dtype_config``. A precision
plugin has little left to do there, and an engine of this package nothing.

Source: nemo-toolkit 2.7.3 (``MegatronStrategy``, ``MegatronParallel``, ``MegatronMixedPrecision``).
"""

from __future__ import annotations

import sys
from typing import Any

from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import Strategy
from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from nemo_lowprec.chart import PrecisionLevel
from nemo_lowprec.megatron.nemo import DtypeConfig
from nemo_lowprec.megatron.requirements import check_device, check_megatron

__all__ = ["NemoPrecision", "before_build", "runs", "take_over"]


class NemoPrecision(Precision):
    """What stands in for the user's plugin from the time that NeMo's strategy converts the model.

    Args:
        level: the row.
        dtype_config: of that plugin.
    """

    def __init__(self, level: PrecisionLevel, dtype_config: DtypeConfig) -> None:
        self.level = level
        self.dtype_config = dtype_config
        self.precision = level.name  # type: ignore[assignment]

    @override
    def convert_module(self, module: nn.Module) -> nn.Module:
        """Cast Megatron-core's model inside ``module`` to half precision, with FP32 outputs.

        Raises:
            RuntimeError: a level with low-precision GEMMs where there is no Transformer Engine: Megatron-core would
                compute in half precision, without a word.
            ValueError: a GPU that cannot run the level's GEMMs.
        """
        from megatron.core.transformer.module import Float16Module
        from megatron.core.utils import get_model_config

        if self.level.has_fp8:
            check_megatron()
            check_device(self.level)
        config = get_model_config(module.module)
        # NeMo's chunks of a pipeline after the first have a config of their own.
        config.fp16, config.bf16 = self.dtype_config.fp16, self.dtype_config.bf16
        if not isinstance(module.module, Float16Module):
            module.module = Float16Module(config, module.module)
        return module

    def convert_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Called by NeMo's strategy; changes nothing.

        Raises:
            ValueError: an optimizer without FP32 masters of this level's parameters.
        """
        inner: Any = getattr(optimizer, "mcore_optimizer", None)
        wanted = (self.dtype_config.fp16, self.dtype_config.bf16)
        parts = getattr(inner, "chained_optimizers", [inner])
        if inner is None or any((part.config.fp16, part.config.bf16) != wanted for part in parts):
            raise ValueError(
                f"{self.level.name} has FP32 masters of its weights, which {type(optimizer).__name__} does not keep. "
                "Use NeMo's MegatronOptimizerModule."
            )
        return optimizer

    @override
    def clip_gradients(self, optimizer: Optimizer, clip_val: float = 0.0, *args: Any, **kwargs: Any) -> None:  # type: ignore[override]
        if clip_val and clip_val > 0:
            raise ValueError(
                f"gradient_clip_val={clip_val}: Megatron-core clips inside its optimizer. Leave it out of the Trainer, "
                "and set clip_grad in OptimizerConfig."
            )


def runs(strategy: Strategy) -> bool:
    """Whether ``strategy`` is NeMo's, with a model in its MegatronParallel."""
    return hasattr(strategy, "megatron_parallel")


def take_over(strategy: Any, level: PrecisionLevel, dtype_config: DtypeConfig) -> NemoPrecision:
    """Have NeMo's strategy go on with a ``NemoPrecision``, also for the chunks of a pipeline that come next."""
    plugin = NemoPrecision(level, dtype_config)
    strategy.precision_plugin = strategy.megatron_parallel.precision_plugin = plugin
    strategy.megatron_parallel.convert_module_fn = plugin.convert_module
    return plugin


def before_build(level: PrecisionLevel) -> None:
    """Before a model is built, whose layers may ask Megatron-core for a recipe: see ``megatron.delayed``."""
    if level.scaling == "delayed" and {"megatron.core", "transformer_engine.pytorch"} <= sys.modules.keys():
        from nemo_lowprec.megatron.delayed import mend_delayed_scaling

        mend_delayed_scaling()
