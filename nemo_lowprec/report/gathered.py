"""Look at a sharded model's weights while they are gathered, and at their gradients before these are reduced."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from nemo_lowprec.engine import Engine
from nemo_lowprec.grads import Fp8Gradients
from nemo_lowprec.report.tensor_storage import Stored, as_stored
from nemo_lowprec.weights import ShardedWeights

__all__ = ["Gathered"]


class Gathered:
    """Context that notes what whole parameters are stored as when their modules compute.

    Attributes:
        weights, gradients: by the id of the sharded parameter.
    """

    def __init__(self, model: nn.Module, engine: Engine) -> None:
        self._model, self._engine = model, engine
        self.weights: dict[int, Stored] = {}
        self.gradients: dict[int, Stored] = {}
        self._handles: list[Any] = []
        self._sharded: dict[int, int] = {}

    def __enter__(self) -> Gathered:
        if isinstance(self._engine.columns.gradients, Fp8Gradients):
            self._engine.columns.gradients.watch = self._note_gradient
        self._handles = [m.register_forward_pre_hook(self._before_forward) for m in self._model.modules()]
        return self

    def __exit__(self, *_: Any) -> None:
        if isinstance(self._engine.columns.gradients, Fp8Gradients):
            self._engine.columns.gradients.watch = None
        for handle in self._handles:
            handle.remove()

    def _before_forward(self, module: nn.Module, args: Any) -> None:
        shards = self._engine.columns.weights
        assert isinstance(shards, ShardedWeights)
        for name, param in module._parameters.items():
            sharded = shards.sharded(module, name)
            if param is None or sharded is None or param is sharded:
                continue
            self.weights[id(sharded)] = as_stored(param)
            if param.requires_grad and id(param) not in self._sharded:
                self._sharded[id(param)] = id(sharded)
                self._handles.append(param.register_post_accumulate_grad_hook(self._note_gradient))

    def _note_gradient(self, whole: Tensor) -> None:
        gradients = self._engine.columns.gradients
        apart = gradients.detached_grads if isinstance(gradients, Fp8Gradients) else None
        found = whole.grad if whole.grad is not None or apart is None else apart.get(id(whole))
        if found is not None:  # else it was put apart and sent, and noted then
            self.gradients[self._sharded[id(whole)]] = as_stored(found)
