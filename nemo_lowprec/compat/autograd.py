"""Autograd's engine, ``torch.func``'s wrappers and the tracer of ``torch.jit``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch._C import _functorch

is_batched = _functorch.is_batchedtensor  # by ``torch.vmap``
is_legacy_batched = _functorch.is_legacy_batchedtensor  # by ``torch.autograd.grad(is_grads_batched=True)``
is_transforming = torch._C._are_functorch_transforms_active
current_backward = torch._C._current_graph_task_id  # a number for each backward pass; -1 outside
keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph  # whether another backward pass may follow


unwrap_if_dead = _functorch.unwrap_if_dead  # a tensor that a transform has left behind, as the plain tensor that it is


def apply_function(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """``function.apply`` at less host time: without the search of all arguments for what transforms have left behind.

    The caller hands over tensors after ``unwrap_if_dead``, and calls it outside of ``torch.func``'s transforms.
    """
    return super(torch.autograd.Function, function).apply  # type: ignore[misc]


def is_tracing() -> bool:
    """Whether ``torch.jit.trace`` records the operations."""
    return torch._C._get_tracing_state() is not None


def outside_transforms(value: Any) -> Any:
    """The tensor that the wrappers of ``torch.func``'s transforms hold; anything else is returned as it is."""
    while isinstance(value, Tensor) and _functorch.is_functorch_wrapped_tensor(value):
        value = _functorch.get_unwrapped(value)
    return value


def is_wanted(ctx: Any, index: int) -> bool:
    """Whether the backward pass that runs ``ctx`` goes on to the node that made the input ``index`` of ``ctx``."""
    try:
        return torch._C._will_engine_execute_node(ctx.next_functions[index][0])
    except RuntimeError:  # torch has no answer for a leaf that torch.autograd.grad was asked for
        return True


def run_early(tensor: Tensor) -> None:
    """Have backward passes run the node of ``tensor`` as soon as the node has its gradient.

    So autograd accumulates into leaves. Of other nodes autograd runs the newest first: in later passes a node that was
    made once would run after all others.
    """
    assert tensor.grad_fn is not None
    tensor.grad_fn._set_sequence_nr(2**64 - 1)  # type: ignore[attr-defined]


def after_backward(call: Callable[[], None]) -> None:
    """Have ``call`` called when the backward pass that runs now has ended."""
    torch.autograd.Variable._execution_engine.queue_callback(call)  # type: ignore[attr-defined]


def run_backward(loss: Tensor) -> None:
    """``loss.backward()`` that leaves the caller's ``TorchFunctionMode`` on for recomputed blocks."""
    torch.autograd.graph._engine_run_backward(
        (loss,), (torch.ones_like(loss),), False, False, (), allow_unreachable=True, accumulate_grad=True
    )


def saves_through_hooks() -> bool:
    """Whether ``torch.autograd.graph.saved_tensors_hooks`` are on, as in non-reentrant activation checkpointing."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def graph_of(tensors: Iterable[Tensor]) -> tuple[set[Any], list[Tensor]]:
    """The nodes of the graph that made ``tensors``, and its leaves: what a backward pass would give a gradient."""
    nodes = [tensor.grad_fn for tensor in tensors]
    seen: set[Any] = set()
    leaves: list[Tensor] = []
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            leaves.append(node.variable)
        nodes += [function for function, _ in node.next_functions]
    return seen, leaves
