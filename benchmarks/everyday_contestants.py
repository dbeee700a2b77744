"""Who takes part in ``benchmarks.everyday``: BF16 autocast, Transformer Engine, torchao and this package.

All have FP32 weights to begin with, fused AdamW and BF16 autocast. The output layer of the model and layers whose sizes
16 does not divide stay in BF16 at Transformer Engine's and torchao's, as at ours.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.everyday_models import Task
from benchmarks.measure import DEVICE, release
from nemo_lowprec import prepare

__all__ = [
    "CONTESTANTS", "EAGER", "LEVELS", "OURS", "TE_LAYERS", "Contestant", "Training", "forget", "names",
    "repeated_blocks",
]  # fmt: skip

EAGER = "BF16 autocast"
OURS = "nemo_lowprec "
TE_LAYERS = "te.TransformerLayer, FP8"
LEVELS = ("bf16_with_fp8_mixed", "msamp_o2")
# The end of a contestant's name, and the level's options that it means.
OPTIONS: dict[str, dict[str, Any]] = {"": {}, ", no graphs": {"graphs": False}}
# The same of contestants that take part with large models alone.
OF_LARGE: dict[str, dict[str, Any]] = {
    ", FP8 head": {"head": "fp8"},
    ", fast_accum": {"fast_accum": True},
    ", FP8 head, fast_accum": {"head": "fp8", "fast_accum": True},
}


@dataclass(frozen=True)
class Training:
    """A model, its optimizer, the contexts of its forward pass, and what to call before a step."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    context: Callable[[], AbstractContextManager[Any]]
    before: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class Contestant:
    """``compiles``: with torch.compile, which takes minutes for all models."""

    make: Callable[[Task], Training]
    compiles: bool = False


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """The children of every innermost ModuleList or Sequential that has two or more, all of one class."""
    found = [block for child in model.children() for block in repeated_blocks(child)]
    children = list(model.children())
    if found or not isinstance(model, (nn.ModuleList, nn.Sequential)) or len(children) < 2:
        return found
    alike = len({type(child) for child in children}) == 1
    return children if alike and any(True for _ in children[0].parameters()) else []


def _compile(model: nn.Module, **options: Any) -> None:
    """Compile each repeated block. Blocks have static shapes, a few of them in Swin."""
    torch._dynamo.config.recompile_limit = 64
    for block in repeated_blocks(model):
        block.compile(dynamic=False, **options)


def forget() -> None:
    """Free what a contestant has left with Transformer Engine and the compiler."""
    quantization = sys.modules.get("transformer_engine.pytorch.quantization")
    if quantization is not None:
        quantization.FP8GlobalStateManager.reset()
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()
    release()


def _adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-5, fused=DEVICE.type == "cuda")


def _autocast() -> AbstractContextManager[Any]:
    return torch.autocast(DEVICE.type, torch.bfloat16)


def _new(make: Callable[[], nn.Module]) -> nn.Module:
    """The same weights for everybody."""
    torch.manual_seed(0)
    with DEVICE:
        return make().train()


def _bf16(task: Task) -> Training:
    model = _new(task.model)
    return Training(model, _adam(model), _autocast)


def _compiled(make: Callable[[Task], Training], task: Task) -> Training:
    training = make(task)
    _compile(training.model)
    return training


def _reduce_overhead(make: Callable[[Task], Training], task: Task) -> Training:
    training = make(task)
    _compile(training.model, mode="reduce-overhead")
    return replace(training, before=torch.compiler.cudagraph_mark_step_begin)


def _convertible(model: nn.Module) -> dict[str, nn.Linear]:
    """Linear layers that FP8 GEMMs take, but for the last one, which is the model's output."""
    linear = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    return {n: m for n, m in list(linear.items())[:-1] if m.in_features % 16 == m.out_features % 16 == 0}


@contextmanager
def _te_autocast() -> Iterator[None]:
    import transformer_engine.pytorch as te
    from transformer_engine.common.recipe import DelayedScaling

    with _autocast(), te.autocast(enabled=True, recipe=DelayedScaling()):
        yield


def _te_linear(task: Task) -> Training:
    import transformer_engine.pytorch as te

    model = _new(task.model)
    for name, plain in _convertible(model).items():
        own = te.Linear(plain.in_features, plain.out_features, plain.bias is not None, params_dtype=torch.float32)
        own.load_state_dict(plain.state_dict(), strict=False)  # without Transformer Engine's extra state
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, own)
    return Training(model, _adam(model), _te_autocast)


def _te_layers(task: Task) -> Training:
    assert task.te_layers is not None
    model = _new(task.te_layers)
    return Training(model, _adam(model), _te_autocast)


def _torchao(task: Task) -> Training:
    from torchao.float8 import convert_to_float8_training

    model = _new(task.model)
    chosen = set(_convertible(model))
    convert_to_float8_training(model, module_filter_fn=lambda module, name: name in chosen)
    _compile(model)
    return Training(model, _adam(model), _autocast)


def _ours(level: str, options: dict[str, Any], task: Task) -> Training:
    model = _new(task.model)
    model, optimizer = prepare(model, _adam(model), level, **options)
    return Training(model, optimizer, _autocast)


COMPILED = {"blocks compiled": _compiled, "blocks compiled, reduce-overhead": _reduce_overhead}


def _all() -> dict[str, Contestant]:
    ours = {
        f"{OURS}{level}{more}": Contestant(partial(_ours, level, options))
        for more, options in (OPTIONS | OF_LARGE).items()
        for level in LEVELS
    }
    compiled = {
        f"{name}, {how}": Contestant(partial(compile_, make), compiles=True)
        for how, compile_ in COMPILED.items()
        for name, make in {EAGER: _bf16, **{f"{OURS}{level}": partial(_ours, level, {}) for level in LEVELS}}.items()
    }
    return {
        EAGER: Contestant(_bf16),
        **ours,
        "te.Linear, FP8": Contestant(_te_linear),
        TE_LAYERS: Contestant(_te_layers),
        "torchao float8, blocks compiled": Contestant(_torchao, compiles=True),
        **compiled,
    }


CONTESTANTS = _all()


def names(task: Task, holding: list[str] | None, compiled: bool) -> list[str]:
    """The contestants of a model: of the names in ``holding``, else whose names hold one of ``holding``.

    Without ``holding`` those that do not compile.

    Args:
        compiled: without ``holding``, those that compile, too.
    """
    large = (TE_LAYERS, *OF_LARGE)
    found = [name for name in CONTESTANTS if task.te_layers is not None or not name.endswith(large)]
    if holding:
        of_names = [name for name in found if name in holding]
        return of_names or [name for name in found if any(part in name for part in holding)]
    return [name for name in found if compiled or not CONTESTANTS[name].compiles]
