"""Convert the layers of a model in place.

Conversion changes the class of a layer and adds a few attributes (``class_swap``). A module with two parents is
converted once; a layer that cannot be converted is left as it is, with the reason in ``Conversion.kept``.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

from nemo_lowprec.chart.groups import LayerFilter
from nemo_lowprec.chart.recipe import Recipe
from nemo_lowprec.compute.backends.base import Backend
from nemo_lowprec.compute.class_swap import derive, dtype_obstacle, own_forward, swap
from nemo_lowprec.compute.compiled_ops import register_shapes
from nemo_lowprec.compute.conversion import Conversion
from nemo_lowprec.compute.experts.blocks import blocks_of
from nemo_lowprec.compute.experts.gate import Gate
from nemo_lowprec.compute.experts.layout import layout_of
from nemo_lowprec.compute.experts.layout import obstacle as experts_obstacle
from nemo_lowprec.compute.experts.module import LowPrecisionExperts
from nemo_lowprec.compute.experts.reading import ROUTER, Fp32Router, compute_in_fp32
from nemo_lowprec.compute.filters import HEAD, find_heads, full_name, is_skipped, reasons_to_keep
from nemo_lowprec.compute.gemm_plan import GemmPlan
from nemo_lowprec.compute.graph_entry import GraphEntry
from nemo_lowprec.compute.half_layers import open_autocast
from nemo_lowprec.compute.half_linear import HalfLinear
from nemo_lowprec.compute.linear import LowPrecisionConv1D, LowPrecisionLinear
from nemo_lowprec.compute.logits import give_logits
from nemo_lowprec.compute.multihead import FUSED, LowPrecisionMultiheadAttention, has_torchs_forward, projection_weights
from nemo_lowprec.compute.operands import FEATURE_MULTIPLE, OPERANDS, operand_of
from nemo_lowprec.compute.patches import LowPrecisionPatches, is_patch_embedding
from nemo_lowprec.compute.patterns import apply_patterns, candidates, recognise
from nemo_lowprec.compute.patterns.norms import LowPrecisionLayerNorm, LowPrecisionRMSNorm
from nemo_lowprec.compute.patterns.plain_linear import PLAIN, as_linear, computes_linear
from nemo_lowprec.compute.shared_input import SharedInput
from nemo_lowprec.compute.unread import doubtful, unread
from nemo_lowprec.compute.weight_scales import WeightScale
from nemo_lowprec.compute.weight_state import WeightStates
from nemo_lowprec.formats import DelayedScaling
from nemo_lowprec.observers import NOBODY, Observers

# Layers without a GEMM plan that need no autocast for FP32 input; an embedding's input is integers.
_TAKE_FP32_INPUT = (LowPrecisionLayerNorm, LowPrecisionRMSNorm, nn.Embedding)


def convert_layers(
    model: nn.Module,
    half: torch.dtype,
    recipe: Recipe | None,
    backend: Backend,
    half_backend: Backend | None,
    layers: LayerFilter,
    histories: DelayedScaling | None,
    fp32_wgrad: bool = False,
    weights: WeightStates | None = None,
    observers: Observers = NOBODY,
) -> Conversion:
    """Convert linear layers, patch embeddings and norms of ``model`` in place.

    Args:
        half: dtype of activations.
        recipe: the FP8 recipe; None converts no layer to FP8 and leaves norms alone.
        backend: runs the FP8 GEMMs.
        half_backend: runs the GEMMs of the linear layers left in half precision; None leaves these GEMMs to torch.
        layers: chooses the layers.
        histories: for delayed scaling; gets a column for every input and output gradient.
        fp32_wgrad: whether layers in half precision get FP32 weight gradients, without torch's rounding to half.
        weights: gets an entry for every weight. None quantizes, and with delayed scaling measures, each at each use.
        observers: the operands of the layers' GEMMs are announced to them.
    """
    result = Conversion()
    for module in list(model.modules()):
        _call_layers(module)
    linears = {name: module for name, module in model.named_modules() if _linear_weights(name, module)}
    heads = [name for name in find_heads(model, linears) if recipe is not None and not is_skipped(layers, name)]
    if recipe is not None:
        _convert_low(model, half, recipe, backend, layers, histories, weights, observers, result)
    for name, module in model.named_modules() if half_backend is not None or fp32_wgrad else ():
        for item, weight in _linear_weights(name, module).items():
            if half_backend is None and _is_conv1d(module):  # which has no form like HalfLinear
                continue
            if layout_of(module) is not None:
                continue
            if weight in gemm_plans(module) or _linear_obstacle(module, weight) is not None:
                continue
            _plan(module, weight, GemmPlan(half_backend, half, name=item, observers=observers))  # type: ignore[arg-type]
            result.half.append(item)
    for head in heads:
        give_logits(model.get_submodule(head), backend)
    return result


def take_fp32_input_outside_autocast(model: nn.Module) -> list[Any]:
    """Let ``model`` and its modules take FP32 input while autocast is off. Returns the handles of the hooks."""

    def needs_it(module: nn.Module) -> bool:
        own = any(p is not None for p in module._parameters.values())
        converted = gemm_plans(module) and not isinstance(module, LowPrecisionPatches)  # which may convolve
        return own and not isinstance(module, _TAKE_FP32_INPUT) and not converted

    return open_autocast(module for module in model.modules() if module is model or needs_it(module))


def gemm_plans(module: nn.Module) -> dict[str, GemmPlan]:
    """The plans by which backends compute a converted module, by the names of its weights."""
    if isinstance(module, LowPrecisionMultiheadAttention):
        return {name: plan for name, plan in module.gemm_plans.items() if plan.backend is not None}
    if isinstance(module, LowPrecisionExperts):
        return dict(module.gemm_plans)
    return {"weight": module.gemm_plan} if isinstance(module, LowPrecisionLinear | LowPrecisionPatches) else {}


def linear_weights(model: nn.Module) -> dict[str, nn.Parameter]:
    """The weights of a converted model's linear layers and converted patch embeddings, by names as in
    ``named_parameters()``.
    """
    return {
        full_name(name, own): weight
        for name, module in model.named_modules()
        for own in _linear_weights(name, module).values()
        if (weight := module._parameters.get(own)) is not None
    }


def _call_layers(module: nn.Module) -> None:
    """Make torch's transformer modules call their layers in evaluation, too."""
    for kind, (name, value) in FUSED.items():
        if isinstance(module, kind) and getattr(module, name, value) != value:
            swap(module, type(module), **{name: value})
    if has_torchs_forward(module):
        own = type(module)
        low = LowPrecisionMultiheadAttention
        swap(module, low if own is nn.MultiheadAttention else derive(low, own), gemm_plans={})


def _linear_weights(name: str, module: nn.Module) -> dict[str, str]:
    """Weights of a linear layer, an attention's input projections or experts: name in ``Conversion`` to own name."""
    if isinstance(module, nn.Linear | LowPrecisionPatches) or _is_conv1d(module):
        return {name: "weight"}
    if isinstance(module, LowPrecisionMultiheadAttention):
        return {full_name(name, weight): weight for weight in projection_weights(module)}
    layout = layout_of(module)
    return {} if layout is None else {full_name(name, weight): weight for weight in layout.weights}


def replace_plan(module: nn.Module, weight: str, plan: GemmPlan) -> None:
    """Compute with ``weight`` of a converted ``module`` by another ``plan``. FSDP2 may have changed its class."""
    _give_entry(module, weight, plan)
    if isinstance(module, LowPrecisionMultiheadAttention | LowPrecisionExperts):
        module.gemm_plans[weight] = plan
    else:
        module.__dict__["gemm_plan"] = plan


def _give_entry(module: nn.Module, weight: str, plan: GemmPlan) -> None:
    register_shapes()
    plan.entry = GraphEntry(plan, module, weight, "bias" if weight == "weight" else "in_proj_bias")


def _plan(module: nn.Module, weight: str, plan: GemmPlan) -> None:
    """Compute with ``weight`` of ``module`` by ``plan``."""
    _give_entry(module, weight, plan)
    layout = layout_of(module)
    if layout is not None and not isinstance(module, LowPrecisionExperts):
        gate = Gate.of(module, layout)
        swap(module, derive(LowPrecisionExperts, type(module)), gemm_plans={}, layout=layout, gate=gate)
    if isinstance(module, LowPrecisionMultiheadAttention | LowPrecisionExperts):
        module.gemm_plans[weight] = plan
    elif _is_conv1d(module):
        in_features, out_features = module.weight.shape  # type: ignore[union-attr,misc]
        swap(module, LowPrecisionConv1D, gemm_plan=plan, in_features=in_features, out_features=out_features)
    elif is_patch_embedding(module):
        swap(module, derive(LowPrecisionPatches, type(module)), gemm_plan=plan)
    else:
        swap(module, as_linear(HalfLinear if plan.backend is None else LowPrecisionLinear, module), gemm_plan=plan)


def _convert_low(
    model: nn.Module,
    half: torch.dtype,
    recipe: Recipe,
    backend: Backend,
    layers: LayerFilter,
    histories: DelayedScaling | None,
    weights: WeightStates | None,
    observers: Observers,
    result: Conversion,
) -> None:
    linears = {name: module for name, module in model.named_modules() if _linear_weights(name, module)}
    found = candidates(model, histories is not None)
    layerlike = {name: patterns[0].is_listed for name, (_, patterns) in found.items() if not patterns[0].is_parent}
    norms = {name: found[name][0] for name, is_listed in layerlike.items() if is_listed}
    unlisted = {name: "in skip" for name in layerlike if name not in norms and is_skipped(layers, name)}
    patches = {name: module for name, module in model.named_modules() if is_patch_embedding(module)}
    refused = reasons_to_keep(layers, model, {**linears, **patches, **norms}, list(linears))
    # Patterns run the modules' own forwards, so recognition comes before any layer is converted.
    recognised = {
        name: recognise(*candidate, refused.get(name) or unlisted.get(name)) for name, candidate in found.items()
    }
    not_called, unsure = unread(model), doubtful(model)
    routers = {name: model.get_submodule(name) for block in blocks_of(model) for name in block.routers}

    chosen: dict[str, tuple[str, nn.Module, str]] = {}
    for name, module in (linears | patches).items():
        for item, weight in (_linear_weights(name, module) or {name: "weight"}).items():
            reason = (
                (ROUTER if name in routers else None)
                or refused.get(name)
                or not_called.get(id(module))
                or _linear_obstacle(module, weight)
                or _size_obstacle(module, weight, recipe)
            )
            if reason:
                result.kept[item] = reason
                if reason == refused.get(name) != HEAD:
                    result.asked.add(item)
            else:
                chosen[item] = full_name(name, weight), module, weight
    for module in routers.values():
        compute_in_fp32(module)
    result.routers += routers
    slots: dict[str, Any] = {}
    if histories is not None:
        kinds = [kind for kind in OPERANDS if kind != "weight"]
        histories.add_all({f"{item}.{k}": operand_of(recipe, k).fmt for item in chosen for k in kinds})
        slots |= histories.slots
    inputs = SharedInput(histories)
    for item, (weight_name, module, weight) in chosen.items():
        operands = {kind: operand_of(recipe, kind, slots.get(f"{item}.{kind}")) for kind in OPERANDS}
        state = None
        if weights is not None:
            others = [operand.slot for operand in operands.values() if operand.slot is not None]
            state = weights.add(item, module, weight, others)
            operands["weight"].slot = state if isinstance(state, WeightScale) else None
        plan = GemmPlan(backend, half, recipe, operands, inputs, state, name=item, observers=observers)
        _plan(module, weight, plan)
        result.low.append(item)
        if id(module) in unsure:
            result.doubtful[item] = unsure[id(module)]
        result.weights.append(weight_name)
        result.patches += [item] * (item in patches)
    apply_patterns(model, recognised, refused, backend, result)


def _is_conv1d(module: nn.Module) -> bool:
    # transformers.pytorch_utils.Conv1D, without importing transformers.
    cls = type(module)
    return cls.__name__ == "Conv1D" and cls.__module__ == "transformers.pytorch_utils"


def _linear_obstacle(module: nn.Module, own: str) -> str | None:
    """Why the GEMMs of this layer's weight ``own`` cannot be replaced; None where they can."""
    layout = layout_of(module)
    if layout is not None:
        reasons = (own_forward(module), experts_obstacle(module, layout))
        return next(filter(None, (*reasons, *(dtype_obstacle(module._parameters[n]) for n in layout.weights))), None)  # type: ignore[arg-type]
    if isinstance(module, Fp32Router):
        return ROUTER
    if obstacle := own_forward(module):
        return obstacle
    weight = module._parameters.get(own)
    if weight is None:
        return "its weight is computed (weight_norm or another parametrization)"
    if isinstance(weight, UninitializedParameter):
        return "not initialised yet (run the model once before training)"
    if obstacle := dtype_obstacle(weight):
        return obstacle
    plain = type(module) in PLAIN or _is_conv1d(module) or is_patch_embedding(module)
    plain = plain or isinstance(module, LowPrecisionMultiheadAttention)
    if not plain and not computes_linear(module):  # type: ignore[arg-type]
        return f"{type(module).__name__} computes another function than x @ weight.T + bias"
    return None


def _size_obstacle(module: nn.Module, own: str, recipe: Recipe) -> str | None:
    multiple = FEATURE_MULTIPLE[recipe.scaling]
    if (layout := layout_of(module)) is not None:
        sides = [size for name in layout.weights for size in module._parameters[name].shape[1:]]  # type: ignore[union-attr]
    else:
        first, *others = module._parameters[own].shape  # type: ignore[union-attr]
        sides = [first, math.prod(others)]
    for size in sides:
        if size % multiple or size == 0:
            return f"a side of {size} is no multiple of {multiple}"
    return None
