"""Models that were made on torch's meta device, by all processes or all but the first: memory, unit by unit."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def materialize(unit: nn.Module, device: torch.device, initializes: bool) -> None:
    """Replace what ``unit`` has on the meta device by memory on ``device``.

    Called for one unit after the other, each sharded before the next: no process holds the whole model on its GPU.

    Args:
        initializes: whether modules are initialized here, by their ``reset_parameters``; processes that get their
            values from one that does leave it out.
    """
    made: dict[int, Tensor] = {}  # by what was there: tied parameters stay tied

    def memory_for(tensor: Tensor) -> Tensor:
        if id(tensor) not in made:
            memory = torch.empty_like(tensor, device=device, requires_grad=False)
            if isinstance(tensor, nn.Parameter):
                memory = nn.Parameter(memory, tensor.requires_grad)
                memory.__dict__.update(tensor.__dict__)
            made[id(tensor)] = memory
        return made[id(tensor)]

    replaced: list[Tensor | None] = []  # alive until the end, so that no other tensor takes an id
    for module in unit.modules():
        if not _on_meta(module):
            continue
        for held in _held(module):
            replaced += held.values()
            held |= {own: memory_for(t) for own, t in held.items() if t is not None and t.is_meta}
        reset = getattr(module, "reset_parameters", None)
        if initializes and callable(reset):
            reset()


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
