"""Models that were made on torch's meta device, by all processes or all but the first: memory, unit by unit."""

from __future__ import annotations

import torch
from torch import Tensor, nn

__all__ = ["Materializer", "obstacle"]


class Materializer:
    """Gives a model memory one unit at a time, so that no process holds all of it on its GPU.

    Args:
        device: where.
        initializes: whether modules are initialized here, by their ``reset_parameters``; processes that get their
            values from one that does leave it out.
    """

    def __init__(self, device: torch.device, initializes: bool) -> None:
        self._device, self._initializes = device, initializes
        self._made: dict[int, tuple[Tensor, Tensor]] = {}  # both: an id is that of something that lives

    def materialize(self, unit: nn.Module) -> None:
        """Replace what is on the meta device by memory, initialized where this process does that."""
        for module in unit.modules():
            if not _on_meta(module):
                continue
            for held in _held(module):
                held |= {own: self._memory_for(t) for own, t in held.items() if t is not None and t.is_meta}
            reset = getattr(module, "reset_parameters", None)
            if self._initializes and callable(reset):
                reset()

    def _memory_for(self, tensor: Tensor) -> Tensor:
        if id(tensor) not in self._made:  # once: tied parameters stay tied
            memory = torch.empty_like(tensor, device=self._device, requires_grad=False)
            if isinstance(tensor, nn.Parameter):
                memory = nn.Parameter(memory, tensor.requires_grad)
                memory.__dict__.update(tensor.__dict__)
            self._made[id(tensor)] = tensor, memory
        return self._made[id(tensor)][1]


def obstacle(model: nn.Module, initializes: bool) -> str | None:
    """Why this process cannot give ``model`` memory and values; None where it can."""
    for name, module in model.named_modules():
        for own, value in vars(module).items():
            if isinstance(value, Tensor) and value.is_meta:
                return (
                    f"{name + '.' if name else ''}{own} is on the meta device, and neither a parameter nor a buffer: "
                    "it cannot get its values from the first process. Use register_buffer."
                )
        lost = _on_meta(module)
        if initializes and lost and not callable(getattr(module, "reset_parameters", None)):
            return (
                f"{name or 'The model'} ({type(module).__name__}) is on the meta device, and has no reset_parameters() "
                f"that would give {', '.join(sorted(lost))} values. Add one, or make the model within "
                "trainer.strategy.init_on_first_process()."
            )
    return None


def _held(module: nn.Module) -> tuple[dict[str, Tensor | None], ...]:
    return module._parameters, module._buffers  # type: ignore[return-value]


def _on_meta(module: nn.Module) -> set[str]:
    """What ``module`` itself has there."""
    return {own for held in _held(module) for own, t in held.items() if t is not None and t.is_meta}
