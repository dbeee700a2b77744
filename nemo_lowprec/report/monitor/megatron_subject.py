"""Layers, parameters and steps of a model on Megatron-core's engine, as the monitor reads them.

Each process steps flat shards of the parameters. A pipeline's stages have layers of the same names: with several
stages, or several parts on a stage, names begin with the number of the part.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim import Optimizer

from nemo_lowprec.report.monitor.subject import Subject

if TYPE_CHECKING:
    from nemo_lowprec.megatron.engine import MegatronEngine


class MegatronSubject(Subject):
    """A model at work on Megatron-core's ``engine``."""

    def __init__(self, engine: MegatronEngine) -> None:
        from megatron.core import parallel_state

        from nemo_lowprec.megatron.chunks import unwrapped

        self._megatron: Any = engine
        self.options = engine.settings.options
        self.observers, self.device = engine.observers, engine.guard.device
        layout = engine.layout
        stage, several = parallel_state.get_pipeline_model_parallel_rank(), len(engine.chunks) > 1
        self._parts: dict[str, nn.Module] = {}
        for index, chunk in enumerate(engine.chunks):
            part = index * layout.pipeline + stage
            self._parts[f"part {part}." if layout.pipeline > 1 or several else ""] = unwrapped(chunk)

    @property
    def step(self) -> Any:
        return self._megatron.guard

    @property
    def columns(self) -> Any:
        return self._megatron.columns

    def parts(self) -> dict[str, nn.Module]:
        return self._parts

    def params(self) -> dict[str, Tensor]:
        mains = {param: main for part in self._megatron.optimizer.parts for param, main in part.main_of.items()}
        every = super().params()
        return {name: mains[param] for name, param in every.items() if param in mains}

    def steppers(self, optimizer: Optimizer) -> list[Optimizer]:
        return [part.optimizer for part in self._megatron.optimizer.parts]

    def grad_scale(self, optimizer: Optimizer) -> Tensor | None:
        return self._megatron.optimizer.divisor  # type: ignore[no-any-return]

    def grad_norm(self, optimizer: Optimizer) -> Tensor | None:
        return self._megatron.optimizer.grad_norm  # type: ignore[no-any-return]
