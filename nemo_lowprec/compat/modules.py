"""Modules and optimizers of torch: base classes and hooks that are already there."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_pre_hooks
from torch.overrides import _pop_mode_temporarily
from torch.utils.hooks import RemovableHandle

NormWithStatistics = nn.modules.batchnorm._NormBase  # batch and instance norms
UNSCALE_METHOD = "_unscale_grads_"  # of GradScaler


def forward_pre_hooks(module: nn.Module) -> list[Any]:
    """The hooks of ``module`` before its forward."""
    return list(module._forward_pre_hooks.values())


def share_hook_id(handle: RemovableHandle, shared: int) -> RemovableHandle:
    """Let the hook of ``handle`` have the id ``shared``, which it can have in other modules, too.

    Dynamo guards on the ids of hooks. If each module had an id of its own, every block of a model would be compiled
    anew, until Dynamo gives up and runs the other blocks uncompiled. Negative ids are never torch's own.
    """
    for reference in (handle.hooks_dict_ref, *handle.extra_dict_ref):
        table = reference()
        for key in list(table):  # each anew, so that the order stays
            table[shared if key == handle.id else key] = table.pop(key)
    handle.id = shared
    return handle


def all_hooks(module: nn.Module) -> list[dict[int, Any]]:
    """The tables of hooks around the forward and the backward pass of ``module``."""
    return [
        module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks,
    ]  # fmt: skip


def global_hooks() -> list[dict[int, Any]]:
    """The tables of hooks of all modules."""
    every = nn.modules.module
    return [
        every._global_forward_pre_hooks, every._global_forward_hooks, every._global_backward_pre_hooks,
        every._global_backward_hooks,
    ]  # fmt: skip


def is_compiled(module: nn.Module) -> bool:
    """Whether ``module`` is the result of ``torch.compile``, or ``module.compile()`` was called."""
    return "_orig_mod" in module._modules or module._compiled_call_impl is not None


def makes_cuda_graphs(module: nn.Module) -> bool:
    """Whether ``torch.compile`` has compiled ``module`` for CUDA graphs, as ``mode="reduce-overhead"`` does."""
    compiled: Any = module if "_orig_mod" in module._modules else module._compiled_call_impl
    config = getattr(compiled, "get_compiler_config", lambda: None)()
    return bool(config and config.get("triton.cudagraphs"))


@contextmanager
def compiled_outside_of_mode(model: nn.Module) -> Iterator[None]:
    """Context in which compiled modules of ``model`` run outside of the innermost mode of torch functions.

    Dynamo guards on the modes that are active, and would compile again.
    """

    def outside(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            with _pop_mode_temporarily():
                return call(*args, **kwargs)

        return run

    states = [(m.__dict__, "forward" if "_orig_mod" in m._modules else "_compiled_call_impl") for m in model.modules()]
    calls = [(state, name, state[name]) for state, name in states if state.get(name) is not None]
    for state, name, call in calls:
        state[name] = outside(call)
    try:
        yield
    finally:
        for state, name, call in calls:
            state[name] = call


def has_state_dict_hook(module: nn.Module, hook: Callable[..., Any]) -> bool:
    """Whether ``hook`` was registered by ``register_state_dict_post_hook``."""
    return hook in module._state_dict_hooks.values()


def remove_state_dict_hooks(module: nn.Module, which: Collection[Any]) -> None:
    """Remove the hooks ``which`` of ``module`` after ``state_dict`` and around ``load_state_dict``."""
    for hooks in (module._state_dict_hooks, module._load_state_dict_pre_hooks, module._load_state_dict_post_hooks):
        for key, hook in list(hooks.items()):
            if getattr(hook, "hook", hook) in which:
                del hooks[key]


def call_first(optimizer: Optimizer, handle: RemovableHandle) -> None:
    """Have the hook of ``handle``, before or after the step of ``optimizer``, called before the other hooks."""
    hooks: Any
    for hooks in (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks):
        if handle.id in hooks:
            hooks.move_to_end(handle.id, last=False)


def step_pre_hooks(optimizer: Optimizer) -> list[Any]:
    """The hooks that are called before a step of ``optimizer``, those of all optimizers included."""
    return [*_global_optimizer_pre_hooks.values(), *optimizer._optimizer_step_pre_hooks.values()]


def patch_step(optimizer: Optimizer) -> None:
    """Let ``step`` of the present class of ``optimizer`` call the hooks around steps."""
    optimizer._patch_step_function()


def note_step(optimizer: Optimizer) -> None:
    """Tell schedulers that ``optimizer`` has stepped before them."""
    optimizer._opt_called = True  # type: ignore[attr-defined]


def mark_wrapped(step: Any) -> None:
    """Mark ``step`` as wrapped by a scheduler, which then does not wrap it again."""
    step._wrapped_by_lr_sched = True


def is_wrapped(step: Any) -> bool:
    """Whether a scheduler has wrapped ``step``."""
    return hasattr(step, "_wrapped_by_lr_sched")


@contextmanager
def around_calls(around: Callable[[nn.Module], AbstractContextManager[Any]]) -> Iterator[None]:
    """Context in which each call of a module runs within ``around(module)``.

    Unlike hooks, which a fused parent of the module looks for, nobody sees it.
    """
    call = nn.Module.__call__

    def run(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with around(module):
            return call(module, *args, **kwargs)

    nn.Module.__call__ = run  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.__call__ = call  # type: ignore[method-assign]
