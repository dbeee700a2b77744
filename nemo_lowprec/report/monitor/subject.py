"""What the monitor reads of an engine: its layers, its parameters, its steps."""

from __future__ import annotations

from torch import Tensor
from torch.optim import Optimizer

from nemo_lowprec.compute import Conversion
from nemo_lowprec.engine import Engine
from nemo_lowprec.weights import ShardedWeights


class Subject:
    """A model at work on ``engine``.

    Attributes:
        observers: of the engine.
        device: of the model.
    """

    def __init__(self, engine: Engine) -> None:
        assert engine.model is not None
        self._engine, self.model = engine, engine.model
        self.options = engine.options
        self.observers, self.device = engine.observers, engine.step.device

    @property
    def conversion(self) -> Conversion:
        """How each layer is computed."""
        return self._engine.columns.computation.conversion

    def layers(self) -> list[str]:
        """Names of the layers whose operands may be quantized, in the order of the model."""
        found = {*self.conversion.low, *self.conversion.half}
        modules = [name for name, _ in self.model.named_modules()]
        return [name for name in (*modules, *(n for n, _ in self.model.named_parameters())) if name in found]

    def params(self) -> dict[str, Tensor]:
        """The parameters that are trained, by name."""
        return {name: param for name, param in self.model.named_parameters() if param.requires_grad}

    def owners(self) -> dict[int, Tensor]:
        """By the id of a gathered matrix its sharded parameter; empty for a whole model."""
        weights = self._engine.columns.weights
        pairs = weights.gathered_matrices() if isinstance(weights, ShardedWeights) else ()
        return {id(whole): sharded for whole, sharded in pairs}

    def grad_norm(self, optimizer: Optimizer) -> Tensor | None:
        """L2 norm of the true gradients before clipping, FP32 scalar; None where gradients are released."""
        return self._engine.step.norm_of(optimizer)

    @property
    def loss_scale(self) -> float | None:
        """The loss scale of the last step; None at a level without."""
        scale = self._engine.step.loss_scale
        return None if scale is None else scale.used
