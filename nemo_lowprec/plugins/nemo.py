"""The levels under NeMo 2's own MegatronStrategy.

NeMo's strategy builds, wraps, scales and steps the model with Megatron-core, as the plugin's ``dtype_config`` says.
The precision plugin only casts the model, and no engine of this package runs.

Source: nemo-toolkit 2.7.3 (``MegatronStrategy``, ``MegatronParallel``, ``MegatronMixedPrecision``).
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import Strategy
from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from nemo_lowprec.chart import PrecisionLevel
from nemo_lowprec.megatron.requirements import check_device, check_transformer_engine


class NemoPrecision(Precision):
    """Replaces the user's plugin from the conversion of the model by NeMo's strategy to the strategy's teardown.

    Args:
        level: the row of the chart.
        dtype_config: the fields that NeMo copies onto Megatron-core's configs.
    """

    def __init__(self, level: PrecisionLevel, dtype_config: Any) -> None:
        self.level = level
        self.dtype_config = dtype_config
        self.precision = level.name  # type: ignore[assignment]
        self._configs: list[Any] = []
        self.undo = ExitStack()

    @override
    def convert_module(self, module: nn.Module) -> nn.Module:
        """Cast Megatron-core's model inside ``module`` to half precision, with FP32 outputs.

        Raises:
            RuntimeError: Transformer Engine is missing; Megatron-core would run FP8 GEMMs in half precision silently.
            ValueError: the GPU cannot run the level's GEMMs.
        """
        from megatron.core.transformer.module import Float16Module
        from megatron.core.utils import get_model_config

        if self.level.has_fp8:
            check_transformer_engine(
                f"{self.level.name} needs Transformer Engine, without which Megatron-core computes in half precision: "
                "pip install --no-build-isolation 'transformer-engine[pytorch]'"
            )
            check_device(self.level)
        config = get_model_config(module.module)
        self._configs.append(config)
        if not isinstance(module.module, Float16Module):
            module.module = Float16Module(config, module.module)
        return module

    def convert_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Have Megatron-core scale the loss at a level with a loss scale. NeMo calls it after ``convert_module``.

        Raises:
            ValueError: the optimizer keeps no FP32 masters of the level's parameters.
        """
        inner: Any = getattr(optimizer, "mcore_optimizer", None)
        wanted = (self.dtype_config.fp16, self.dtype_config.bf16)
        parts = getattr(inner, "chained_optimizers", [inner])
        if inner is None or any((part.config.fp16, part.config.bf16) != wanted for part in parts):
            raise ValueError(
                f"{self.level.name} has FP32 masters of its weights, which {type(optimizer).__name__} does not keep. "
                "Use NeMo's MegatronOptimizerModule."
            )
        if self.level.has_loss_scale:
            for config in self._configs:
                # NeMo does not set the function, and Megatron-core would unscale gradients of an unscaled loss.
                config.grad_scale_func = inner.scale_loss
        return optimizer

    @override
    def clip_gradients(self, optimizer: Optimizer, clip_val: float = 0.0, *args: Any, **kwargs: Any) -> None:  # type: ignore[override]
        if clip_val and clip_val > 0:
            raise ValueError(
                f"gradient_clip_val={clip_val}: Megatron-core clips inside its optimizer. Leave it out of the Trainer, "
                "and set clip_grad in OptimizerConfig."
            )

    @override
    def teardown(self) -> None:
        self.undo.close()


class _AsConfig:
    """Descriptor of ``__io__``: a plugin's arguments as a fiddle config; AttributeError for the class itself.

    NeMo's ``io`` does not wrap a class that has the attribute.
    """

    def __get__(self, plugin: Any, owner: type) -> Any:
        if plugin is None:
            raise AttributeError("__io__")
        import fiddle as fdl

        return fdl.Config(owner, level=plugin.level.name, **plugin.options)


class SavedByNemo:
    """Makes NeMo's ``io`` save the plugin as a config beside a checkpoint: NeMo opens no pickles of foreign classes."""

    __io__ = _AsConfig()
    __wrapped_init__ = True  # NeMo would record ``**options`` as one argument named ``options``


def runs(strategy: Strategy) -> bool:
    """Whether ``strategy`` is NeMo's, with a model in its MegatronParallel."""
    return hasattr(strategy, "megatron_parallel")


def take_over(strategy: Any, level: PrecisionLevel, dtype_config: Any) -> NemoPrecision:
    """Replace the plugin of NeMo's strategy by a ``NemoPrecision``, for all chunks of a pipeline, until teardown."""
    plugin = NemoPrecision(level, dtype_config)
    plugin.undo.callback(setattr, strategy, "precision_plugin", strategy.precision_plugin)
    strategy.precision_plugin = strategy.megatron_parallel.precision_plugin = plugin
    strategy.megatron_parallel.convert_module_fn = plugin.convert_module
    return plugin
