"""Models that bring Transformer Engine layers of their own (``te.Linear``, ``te.TransformerLayer``, ...).

TE's layers are not converted: they run FP8 themselves under ``te_context``. Their pickled ``_extra_state`` is saved
empty; the amax histories and scales of delayed scaling are saved as plain tensors by ``te_state_dict``. Nothing here
imports TE before the model has done so.

Not covered: weights that the user has created in FP8 (``te.quantized_model_init``), whose scales TE keeps itself,
and FP8 attention.
"""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from nemo_lowprec.chart.recipe import Recipe

_DIRECTIONS = {"fwd": ("scaling_fwd", "forward"), "bwd": ("scaling_bwd", "backward")}


def is_te_module(module: nn.Module) -> bool:
    """Whether the class of ``module``, or a base of the class, comes from Transformer Engine."""
    return any(base.__module__.split(".")[0] == "transformer_engine" for base in type(module).__mro__)


def _te_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    if "transformer_engine" in sys.modules:
        yield from ((name, module) for name, module in model.named_modules() if is_te_module(module))


def has_te_layers(model: nn.Module) -> bool:
    """Whether ``model`` contains modules of Transformer Engine."""
    return next(_te_modules(model), None) is not None


@lru_cache(maxsize=16)
def te_recipe(recipe: Recipe) -> Any:
    """TE's recipe with the settings of ``recipe``.

    Raises:
        ValueError: an argument that TE's own layers do not have.
    """
    if recipe.scaling == "rowwise":
        raise ValueError("Transformer Engine's own layers have no rowwise scaling. Use another level.")
    kinds = importlib.import_module("transformer_engine.common.recipe")
    if any(recipe.override_linear_precision):
        raise ValueError("Transformer Engine's own layers have no override_linear_precision: leave it (False,) * 3.")
    if recipe.interval != 1:
        raise ValueError("Transformer Engine's own layers renew their scales at every step: leave interval=1.")
    if recipe.fast_accum:
        raise ValueError("Transformer Engine's own layers sum in FP32 in backward: leave fast_accum=False.")
    if recipe.fp8_margin and recipe.scaling != "delayed":
        raise ValueError(f"Transformer Engine's own layers take no fp8_margin with {recipe.scaling} scaling: leave 0.")
    fmt = kinds.Format.HYBRID if recipe.fp8 == "hybrid" else kinds.Format.E4M3
    if recipe.scaling == "delayed":
        return kinds.DelayedScaling(
            margin=recipe.fp8_margin,
            fp8_format=fmt,
            amax_history_len=recipe.fp8_amax_history_len,
            amax_compute_algo=recipe.fp8_amax_compute_algo,
        )
    if recipe.scaling == "nvfp4":
        return kinds.NVFP4BlockScaling()
    names = {"current": "Float8CurrentScaling", "blockwise": "Float8BlockScaling", "mxfp8": "MXFP8BlockScaling"}
    return getattr(kinds, names[recipe.scaling])(fp8_format=fmt)


@contextmanager
def te_context(recipe: Recipe | None, half: torch.dtype) -> Iterator[None]:
    """Context of a forward pass in which TE's own layers compute by ``recipe``.

    TE's layers take their compute dtype from torch.autocast; where autocast is off, the context turns it on for
    ``half``. Without a recipe, or where nothing has imported TE, the context does nothing.
    """
    if recipe is None or "transformer_engine" not in sys.modules:
        yield
        return
    te = importlib.import_module("transformer_engine.pytorch")
    amp = nullcontext() if torch.is_autocast_enabled("cuda") else torch.autocast("cuda", dtype=half)
    with amp, te.autocast(enabled=True, recipe=te_recipe(recipe)):
        yield


class _EmptyExtraState:
    """Mixin before the class of a TE module: the module saves an empty extra state, and loads none."""

    def get_extra_state(self) -> Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: Any) -> None:
        pass

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        # Replaced whether the checkpoint has the key or not: TE's own override may read the key.
        state_dict[f"{prefix}_extra_state"] = self.get_extra_state()
        super()._load_from_state_dict(state_dict, prefix, *args)  # type: ignore[misc]


@lru_cache(maxsize=256)
def _with_empty_extra_state(kind: Any) -> Any:
    names = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(kind)(kind.__name__, (_EmptyExtraState, kind), names)


def empty_extra_state(model: nn.Module) -> None:
    """Make TE's modules save an empty ``_extra_state`` and ignore a loaded one; may be called again.

    The key stays: the same model without this package needs the key to load strictly, and TE ignores an empty value.
    """
    for _, module in _te_modules(model):
        kind: Any = type(module)
        if not issubclass(kind, _EmptyExtraState):
            module.__class__ = _with_empty_extra_state(kind)


def _with_metadata(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """TE's modules with weights and FP8 state. Modules without weights have such state for FP8 attention only."""
    for name, module in _te_modules(model):
        has_weights = next(module.parameters(recurse=False), None) is not None
        if has_weights and isinstance(getattr(module, "fp8_meta", None), dict):
            yield name, module


def _is_delayed(state: Any) -> bool:
    return all(isinstance(getattr(state, name, None), Tensor) for name in ("scale", "amax_history"))


def te_state_dict(model: nn.Module) -> dict[str, dict[str, Tensor]]:
    """Delayed-scaling state of TE's modules, by module name, on the CPU.

    ``amax_history_fwd`` and ``_bwd``: FP32 [steps, operands]; ``scale_fwd`` and ``_bwd``: FP32 [operands]. Modules
    that have not run in FP8, or run with another scaling, have none.
    """
    states: dict[str, dict[str, Tensor]] = {}
    for name, module in _with_metadata(model):
        found = {d: module.fp8_meta.get(key) for d, (key, _) in _DIRECTIONS.items()}
        if all(_is_delayed(state) for state in found.values()):
            states[name] = {
                f"{what}_{direction}": getattr(state, what).detach().to("cpu", copy=True)
                for direction, state in found.items()
                for what in ("scale", "amax_history")
            }
    return states


@torch.no_grad()
def load_te_state_dict(model: nn.Module, state: dict[str, dict[str, Tensor]]) -> None:
    """Load the result of ``te_state_dict``; a module that is missing in ``state`` keeps its own state.

    A module that has not run yet adopts the state at its first forward if its recipe is delayed scaling with a history
    of the same length; otherwise the module starts with an empty history.
    """
    for name, module in _with_metadata(model):
        if name not in state:
            continue
        ready = bool(module.fp8_meta_tensors_initialized)
        for direction, (key, mode) in _DIRECTIONS.items():
            scale, history = state[name][f"scale_{direction}"], state[name][f"amax_history_{direction}"]
            target = module.fp8_meta.get(key)
            if not ready:
                # When TE sets a module up, the module adopts the buffers of an existing state, but not its recipe.
                target = module.fp8_meta[key] = _delayed_state(mode, scale.numel(), len(history))
            elif not _is_delayed(target):
                continue  # the module runs with another scaling
            # In place: TE's quantizers and its global buffers are views of these tensors.
            target.scale.copy_(scale)
            target.amax_history.copy_(_fit(history, len(target.amax_history)))


@contextmanager
def histories_kept(model: nn.Module) -> Iterator[None]:
    """Context of an evaluation that leaves the amax histories, from which training computes scales, unchanged."""
    before = [(history, history.clone()) for history in _histories(model)]
    try:
        yield
    finally:
        for history in _histories(model):  # also of modules that had not run before
            history.zero_()
        for history, values in before:
            history.copy_(values)


def _histories(model: nn.Module) -> list[Tensor]:
    states = (m.fp8_meta.get(key) for _, m in _with_metadata(model) for key, _ in _DIRECTIONS.values())
    return [state.amax_history for state in states if _is_delayed(state)]


def has_empty_histories(model: nn.Module) -> bool:
    """Whether no module has seen an operand yet, so that all scales are 1."""
    return not any(bool(history.any()) for history in _histories(model))


@torch.no_grad()
def nonfinite_amaxes(model: nn.Module) -> Tensor | None:
    """Whether an amax in the histories is not finite, as a bool scalar on the device; None without histories."""
    histories = _histories(model)
    return ~torch.stack(torch._foreach_norm(histories, math.inf)).isfinite().all() if histories else None


@torch.no_grad()
def forget_nonfinite_amaxes(model: nn.Module) -> None:
    """Replace amaxes that are not finite in the histories: TE computes no scale from a history with such an amax."""
    for history in _histories(model):
        history.nan_to_num_(nan=0.0, posinf=0.0)


@torch.no_grad()
def scale_by_histories(model: nn.Module, loss_scale: float) -> None:
    """Compute the gradients' scales from their histories, which a backward pass with ``loss_scale`` has filled."""
    for module, state in _of_gradients(model):
        state.amax_history.div_(loss_scale)
        recipe = module.fp8_meta["recipe"]
        amax = state.amax_history.amax(dim=0)
        scale = recipe.fp8_format.value.max_bwd / amax / 2**recipe.margin
        state.scale.copy_(torch.where((amax > 0) & amax.isfinite(), scale, state.scale))


@torch.no_grad()
def rescale_gradients(model: nn.Module, factor: float) -> None:
    """Adapt histories and scales to gradients ``factor`` times as large, after the loss scale has changed."""
    for _, state in _of_gradients(model):
        state.amax_history.mul_(factor)
        known = state.amax_history.amax(dim=0) > 0
        state.scale.copy_(torch.where(known, state.scale / factor, state.scale))


def _of_gradients(model: nn.Module) -> Iterator[tuple[Any, Any]]:
    """(module, delayed-scaling state of its gradients)."""
    for _, module in _with_metadata(model):
        state = module.fp8_meta.get(_DIRECTIONS["bwd"][0])
        if _is_delayed(state):
            yield module, state


def _delayed_state(mode: str, operands: int, history_len: int) -> Any:
    quantization = importlib.import_module("transformer_engine.pytorch.quantization")
    recipe = importlib.import_module("transformer_engine.common.recipe").DelayedScaling(amax_history_len=history_len)
    return quantization.DelayedScalingRecipeState(recipe, mode=mode, num_quantizers=operands)


def _fit(history: Tensor, length: int) -> Tensor:
    """The history in ``length`` rows: row 0 is the present step, the newest rows come last, with zeros between."""
    fitted = history.new_zeros(length, history.shape[1])
    fitted[0] = history[0]
    kept = min(length, len(history)) - 1
    if kept:
        fitted[-kept:] = history[-kept:]
    return fitted
