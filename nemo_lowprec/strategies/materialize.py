"""Gives memory to a model on torch's meta device, unit by unit."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def materialize(unit: nn.Module, device: torch.device, initializes: bool) -> None:
    """Replace the parameters and buffers of an FSDP2 unit on the meta device by memory on ``device``.

    Each unit is sharded before the next unit gets memory: no process holds the whole model on its GPU. Only a process
    that ``initializes``, the first one, calls the modules' ``reset_parameters``; the others get its values.
    """
    made: dict[int, Tensor] = {}  # by id of the meta tensor, so that tied parameters stay tied

    def memory_for(tensor: Tensor) -> Tensor:
        if id(tensor) not in made:
            memory = torch.empty_like(tensor, device=device, requires_grad=False)
            if isinstance(tensor, nn.Parameter):
                memory = nn.Parameter(memory, tensor.requires_grad)
                memory.__dict__.update(tensor.__dict__)
            made[id(tensor)] = memory
        return made[id(tensor)]

    replaced: list[Tensor | None] = []  # keeps the meta tensors alive, as an id may be used again
    for module in unit.modules():
        if not _on_meta(module):
            continue
        for held in _held(module):
            replaced += held.values()
            held |= {own: memory_for(t) for own, t in held.items() if t is not None and t.is_meta}
        reset = getattr(module, "reset_parameters", None)
        if initializes and callable(reset):
            reset()


def obstacle(model: nn.Module, initializes: bool) -> ValueError | None:
    """Why ``materialize`` cannot give ``model`` memory and values on this process; None if it can."""
    for name, module in model.named_modules():
        for own, value in vars(module).items():
            if isinstance(value, Tensor) and value.is_meta:
                return ValueError(
                    f"{name + '.' if name else ''}{own} is on the meta device, and neither a parameter nor a buffer: "
                    "it cannot get its values from the first process. Use register_buffer."
                )
        lost = _on_meta(module)
        if initializes and lost and not callable(getattr(module, "reset_parameters", None)):
            return ValueError(
                f"{name or 'The model'} ({type(module).__name__}) is on the meta device, and has no reset_parameters() "
                f"that would give {', '.join(sorted(lost))} values. Add one, or make the model within "
                "trainer.strategy.init_on_first_process()."
            )
    return None


def _held(module: nn.Module) -> tuple[dict[str, Tensor | None], ...]:
    return module._parameters, module._buffers  # type: ignore[return-value]


def _on_meta(module: nn.Module) -> set[str]:
    """Names of the parameters and buffers of ``module`` itself that are on the meta device."""
    return {own for held in _held(module) for own, t in held.items() if t is not None and t.is_meta}
