"""Twins: the leaves of a capture in the place of parameters, and the memory into which layers write their gradients."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from nemo_lowprec.compute.graph_entry import twins_standing_in
from nemo_lowprec.compute.linear_function import give_grad_buffer, give_grad_buffers
from nemo_lowprec.tensors.gradient import compute_gradient_as, computed_dtype


@contextmanager
def with_twins(block: nn.Module, params: list[nn.Parameter], twins: list[nn.Parameter]) -> Iterator[None]:
    """Context in which ``block`` has ``twins`` in the place of ``params``.

    Autograd accumulates the gradient of a parameter on the stream on which the parameter was used first, and no other
    stream may wait for the stream of a capture. So a capture has leaves of its own, in the memory of the parameters.
    """
    by_id = {id(param): twin for param, twin in zip(params, twins, strict=True)}
    tables = [(module._parameters, dict(module._parameters)) for module in block.modules()]
    for table, before in tables:
        table.update({name: by_id[id(param)] for name, param in before.items() if param is not None})
    try:
        with twins_standing_in(by_id):
            yield
    finally:
        for table, before in tables:
            table.update(before)


def twin_of(param: nn.Parameter) -> nn.Parameter:
    """A leaf in the memory of ``param``, whose gradient has the dtype of that of ``param``."""
    twin = nn.Parameter(param.detach(), requires_grad=param.requires_grad)
    if param.requires_grad and param.grad_dtype != twin.grad_dtype:
        twin.grad_dtype = param.grad_dtype
    if param.requires_grad and computed_dtype(param) != computed_dtype(twin):
        compute_gradient_as(twin, computed_dtype(param))
    return twin


def grad_buffers(
    own: list[nn.Parameter], params: list[nn.Parameter], beside: list[list[nn.Parameter]]
) -> list[Tensor | None]:
    """Memory for the gradients of ``own``, the twins of ``params``; in one piece for those that lie ``beside``."""
    by_id = {id(param): twin for param, twin in zip(params, own, strict=True)}
    found: dict[int, Tensor] = {}
    for weights in beside:
        twins = [by_id[id(weight)] for weight in weights if id(weight) in by_id]
        if len(twins) == len(weights) and len({computed_dtype(twin) for twin in twins}) == 1:
            found |= {id(twin): grad for twin, grad in zip(twins, give_grad_buffers(twins), strict=True)}
    return [found[id(twin)] if id(twin) in found else give_grad_buffer(twin) for twin in own]
