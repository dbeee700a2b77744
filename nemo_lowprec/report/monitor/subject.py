"""Layers, parameters and steps of an engine, as the monitor reads them."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from nemo_lowprec.chart.options import Options
from nemo_lowprec.compute import Conversion
from nemo_lowprec.engine import Columns, Engine, Step
from nemo_lowprec.observers import Observers
from nemo_lowprec.report.monitor.te_operands import te_linears
from nemo_lowprec.weights import ShardedWeights


class Subject:
    """A model at work on ``engine``.

    Attributes:
        options: the row and its arguments.
        observers: of the engine.
        device: of the model.
    """

    options: Options
    observers: Observers
    device: torch.device

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.options = engine.options
        self.observers, self.device = engine.observers, engine.step.device

    @property
    def step(self) -> Step:
        """Runs the optimizers' steps."""
        return self._engine.step

    @property
    def columns(self) -> Columns:
        """The columns of the row."""
        return self._engine.columns

    def parts(self) -> dict[str, nn.Module]:
        """The model's parts on this process, by the beginning of their layers' names."""
        assert self._engine.model is not None
        return {"": self._engine.model}

    @property
    def conversion(self) -> Conversion:
        """How each layer is computed."""
        return self.columns.computation.conversion

    def te_layers(self) -> dict[str, nn.Module]:
        """Transformer Engine's own layers that compute in FP8, by name; none at a level without FP8."""
        if self.options.recipe is None:
            return {}
        return {start + name: layer for start, part in self.parts().items() for name, layer in te_linears(part).items()}

    def layers(self) -> list[str]:
        """Names of the layers whose operands may be quantized, in the order of the model."""
        found = {*self.conversion.low, *self.conversion.half, *self.te_layers()}
        names: dict[str, None] = {}
        for start, part in self.parts().items():
            names |= dict.fromkeys(start + name for name, _ in (*part.named_modules(), *part.named_parameters()))
        return [name for name in names if name in found]

    def params(self) -> dict[str, Tensor]:
        """The tensors that optimizers step, by the names of the parameters."""
        return {
            start + name: param
            for start, part in self.parts().items()
            for name, param in part.named_parameters()
            if param.requires_grad
        }

    def owners(self) -> dict[int, Tensor]:
        """By the id of a gathered matrix its sharded parameter; empty for a whole model."""
        weights = self.columns.weights
        pairs = weights.gathered_matrices() if isinstance(weights, ShardedWeights) else ()
        return {id(whole): sharded for whole, sharded in pairs}

    def steppers(self, optimizer: Optimizer) -> list[Optimizer]:
        """The optimizers that step where ``optimizer`` does."""
        return [optimizer]

    def grad_scale(self, optimizer: Optimizer) -> Tensor | None:
        """By what the gradients of the step are still to be divided, FP32 scalar; None for nothing."""
        return getattr(optimizer, "grad_scale", None)

    def grad_norm(self, optimizer: Optimizer) -> Tensor | None:
        """L2 norm of the true gradients before clipping, FP32 scalar; None where gradients are released."""
        return self.step.norm_of(optimizer)

    @property
    def loss_scale(self) -> float | None:
        """The loss scale of the last step; None at a level without."""
        scale = self.step.loss_scale
        return None if scale is None else scale.used
