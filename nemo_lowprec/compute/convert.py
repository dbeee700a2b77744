"""Convert the layers of a model in place, and back.

A layer is converted by changing its class and adding a few attributes, so that parents, parameters, hooks and
attributes stay what they were, a module with two parents is converted once, and one layer that cannot be converted
never stops the rest.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.parameter import UninitializedParameter

from nemo_lowprec.compute.backends.base import Backend
from nemo_lowprec.compute.filters import HEAD, reasons_to_keep
from nemo_lowprec.compute.half_layers import fp32_input_class, open_autocast
from nemo_lowprec.compute.half_linear import HalfLinear
from nemo_lowprec.compute.linear import GemmPlan, LowPrecisionConv1D, LowPrecisionLinear
from nemo_lowprec.compute.multihead import FUSED, LowPrecisionMultiheadAttention, projection_weights
from nemo_lowprec.compute.norms import LowPrecisionLayerNorm, LowPrecisionRMSNorm, rms_norm_kind
from nemo_lowprec.compute.operands import FEATURE_MULTIPLE, OPERANDS, operand_of
from nemo_lowprec.compute.shared_input import SharedInput
from nemo_lowprec.compute.weight_scales import WeightScales
from nemo_lowprec.formats import DelayedScaling
from nemo_lowprec.observers import NOBODY, Observers
from nemo_lowprec.options import LayerFilter, Recipe

__all__ = [
    "Conversion",
    "convert_layers",
    "gemm_plans",
    "is_converted",
    "linear_weights",
    "revert_layers",
    "take_fp32_input",
    "take_fp32_input_outside_autocast",
]

_ORIGINAL = "_lowprec_original"  # (class, attributes as they were, class of ours) on a converted module
_PLAIN = (nn.Linear, NonDynamicallyQuantizableLinear)  # the latter only says what nn.MultiheadAttention does with it

# Layers without a GEMM plan that need no autocast for FP32 input; an embedding's input is integers.
_TAKE_FP32_INPUT = (LowPrecisionLayerNorm, LowPrecisionRMSNorm, nn.Embedding)


class _ABSENT:
    """The value of an attribute that was not there; a class, which copies and pickles of a module keep."""


@dataclass
class Conversion:
    """What became of each linear layer and norm.

    The input projections of ``nn.MultiheadAttention`` go by the names of their weights (``attn.in_proj_weight``), for
    want of a layer.

    Attributes:
        low: names of layers whose GEMMs run below 16 bits.
        weights: names of their weights, as in ``named_parameters()``.
        half: names of linear layers whose GEMMs run in half precision, and not by torch alone.
        norms: names of converted norms.
        kept: name to reason, for every linear layer and norm that was left alone.
        asked: names of those of ``kept`` that the arguments for choosing layers leave out.
    """

    low: list[str] = field(default_factory=list)
    weights: list[str] = field(default_factory=list)
    half: list[str] = field(default_factory=list)
    norms: list[str] = field(default_factory=list)
    kept: dict[str, str] = field(default_factory=dict)
    asked: set[str] = field(default_factory=set)


def is_converted(model: nn.Module) -> bool:
    """Whether any module of ``model`` is converted."""
    return any(_ORIGINAL in m.__dict__ for m in model.modules())


def convert_layers(
    model: nn.Module,
    half: torch.dtype,
    recipe: Recipe | None,
    backend: Backend,
    half_backend: Backend | None,
    layers: LayerFilter,
    histories: DelayedScaling | None,
    fp32_wgrad: bool = False,
    weight_scales: WeightScales | None = None,
    observers: Observers = NOBODY,
) -> Conversion:
    """Convert linear layers and norms of ``model`` in place.

    Args:
        half: dtype of activations.
        recipe: the FP8 recipe; None converts no layer to FP8 and leaves norms alone.
        backend: runs the FP8 GEMMs.
        half_backend: runs the GEMMs of the linear layers left in half precision; None leaves that to torch.
        layers: which layers.
        histories: gets a column for every operand but the weight, for delayed scaling.
        fp32_wgrad: whether those layers' weight gradients are FP32; torch rounds them to half before.
        weight_scales: gets an entry for every weight, for delayed scaling; None scales a weight at each use.
        observers: the operands of the layers' GEMMs are announced to them.
    """
    result = Conversion()
    for module in list(model.modules()):
        _call_layers(module)
    if recipe is not None:
        _convert_low(model, half, recipe, backend, layers, histories, weight_scales, observers, result)
    for name, module in model.named_modules() if half_backend is not None or fp32_wgrad else ():
        for item, weight in _linear_weights(name, module).items():
            if _plan_of(module, weight) is not None or _linear_obstacle(module, weight) is not None:
                continue
            plan = GemmPlan(half_backend, half, name=item, observers=observers)  # type: ignore[arg-type]
            if half_backend is not None:
                _plan(module, weight, plan)
            elif _is_conv1d(module):
                continue
            elif isinstance(module, nn.Linear):
                _swap(module, HalfLinear, half_plan=plan)
            elif isinstance(module, LowPrecisionMultiheadAttention):
                module.half_plans[weight] = plan
            result.half.append(item)
    return result


def take_fp32_input(model: nn.Module, on_cpu: bool) -> None:
    """Let the layers of ``model`` that nothing converts take FP32 input where their weights are half."""
    for module in model.modules():
        cls = fp32_input_class(module, on_cpu)
        if cls is not None:
            _swap(module, cls)


def take_fp32_input_outside_autocast(model: nn.Module) -> list[Any]:
    """Let ``model`` and its modules take FP32 input while autocast is off, too. Returns the hooks' handles."""

    def needs_it(module: nn.Module) -> bool:
        own = any(p is not None for p in module._parameters.values())
        return own and not isinstance(module, _TAKE_FP32_INPUT) and not gemm_plans(module)

    return open_autocast(module for module in model.modules() if module is model or needs_it(module))


def gemm_plans(module: nn.Module) -> dict[str, GemmPlan]:
    """The plans of a converted module by the names of its weights."""
    if isinstance(module, LowPrecisionMultiheadAttention):
        return module.gemm_plans
    return {"weight": module.gemm_plan} if isinstance(module, LowPrecisionLinear) else {}


def linear_weights(model: nn.Module) -> dict[str, nn.Parameter]:
    """The weights of the linear layers of a converted model, by their names in ``named_parameters()``."""
    return {
        _inside(name, own): weight
        for name, module in model.named_modules()
        for own in _linear_weights(name, module).values()
        if (weight := module._parameters.get(own)) is not None
    }


def _call_layers(module: nn.Module) -> None:
    """Have torch's transformer modules call their layers, which in evaluation they go around."""
    for kind, (name, value) in FUSED.items():
        if isinstance(module, kind) and getattr(module, name, value) != value:
            _swap(module, type(module), **{name: value})
    if type(module) is nn.MultiheadAttention and "forward" not in module.__dict__:
        _swap(module, LowPrecisionMultiheadAttention, gemm_plans={}, half_plans={})


def _linear_weights(name: str, module: nn.Module) -> dict[str, str]:
    """Weights that a linear layer, or an attention with such layers inside, multiplies with.

    By the name under which ``Conversion`` knows the layer: the name in the module.
    """
    if isinstance(module, nn.Linear) or _is_conv1d(module):
        return {name: "weight"}
    if isinstance(module, LowPrecisionMultiheadAttention):
        return {_inside(name, weight): weight for weight in projection_weights(module)}
    return {}


def _inside(name: str, own: str) -> str:
    return f"{name}.{own}" if name else own


def _plan_of(module: nn.Module, weight: str) -> GemmPlan | None:
    return gemm_plans(module).get(weight)


def _plan(module: nn.Module, weight: str, plan: GemmPlan) -> None:
    """Compute with ``weight`` of ``module`` by ``plan``."""
    if isinstance(module, LowPrecisionMultiheadAttention):
        module.gemm_plans[weight] = plan
    elif _is_conv1d(module):
        in_features, out_features = module.weight.shape  # type: ignore[union-attr,misc]
        _swap(module, LowPrecisionConv1D, gemm_plan=plan, in_features=in_features, out_features=out_features)
    else:
        _swap(module, LowPrecisionLinear, gemm_plan=plan)


def _convert_low(
    model: nn.Module,
    half: torch.dtype,
    recipe: Recipe,
    backend: Backend,
    layers: LayerFilter,
    histories: DelayedScaling | None,
    weight_scales: WeightScales | None,
    observers: Observers,
    result: Conversion,
) -> None:
    linears: dict[str, nn.Module] = {}
    norms: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if _linear_weights(name, module):
            linears[name] = module
        elif type(module) in (nn.LayerNorm, nn.RMSNorm) or _looks_like_rms_norm(module):
            norms[name] = module
    candidates = {**linears, **norms}
    refused = reasons_to_keep(layers, model, candidates, list(linears))
    unread = _unread(model)

    chosen: dict[str, tuple[str, nn.Module, str]] = {}
    for name, module in linears.items():
        for item, weight in _linear_weights(name, module).items():
            reason = (
                refused.get(name)
                or unread.get(id(module))
                or _linear_obstacle(module, weight)
                or _size_obstacle(module, weight, recipe)
            )
            if reason:
                result.kept[item] = reason
                if reason == refused.get(name) != HEAD:
                    result.asked.add(item)
            else:
                chosen[item] = _inside(name, weight), module, weight
    slots: dict[str, Any] = {}
    if histories is not None:
        kinds = [kind for kind in OPERANDS if kind != "weight"]
        keys = {f"{item}.{k}": operand_of(recipe, k).fmt for item in chosen for k in kinds}
        histories.add_all(keys)
        slots = {key: histories.slots[key] for key in keys}
        if weight_scales is not None:
            for item, (_, module, weight) in chosen.items():
                others = [slots[f"{item}.{kind}"] for kind in kinds]
                slots[f"{item}.weight"] = weight_scales.add(item, module, weight, others)
    inputs = SharedInput(histories)
    for item, (full_name, module, weight) in chosen.items():
        operands = {kind: operand_of(recipe, kind, slots.get(f"{item}.{kind}")) for kind in OPERANDS}
        plan = GemmPlan(backend, half, recipe, operands, inputs, name=item, observers=observers)
        _plan(module, weight, plan)
        result.low.append(item)
        result.weights.append(full_name)

    for name, module in norms.items():
        reason = refused.get(name) or _norm_obstacle(module)
        if reason:
            result.kept[name] = reason
        elif type(module) is nn.LayerNorm:
            _swap(module, LowPrecisionLayerNorm)
            result.norms.append(name)
        elif type(module) is nn.RMSNorm:
            _swap(module, LowPrecisionRMSNorm, norm_backend=backend, zero_centered=False)
            result.norms.append(name)
        else:
            kind = rms_norm_kind(module)
            if kind is None:
                result.kept[name] = f"{type(module).__name__} does not compute a plain RMSNorm"
                continue
            eps, zero_centered = kind
            shape = tuple(module.weight.shape)  # type: ignore[union-attr,arg-type]
            _swap(
                module, LowPrecisionRMSNorm, norm_backend=backend, zero_centered=zero_centered,
                eps=eps, normalized_shape=shape, elementwise_affine=True,
            )  # fmt: skip
            result.norms.append(name)


def revert_layers(model: nn.Module) -> None:
    """Give every converted module its own class back."""
    for module in model.modules():
        if _ORIGINAL in module.__dict__:
            original, before, ours = module.__dict__.pop(_ORIGINAL)
            for name, value in before.items():
                if value is _ABSENT:
                    del module.__dict__[name]
                else:
                    module.__dict__[name] = value
            module.__class__ = original if type(module) is ours else _rebased(type(module), original)


def _rebased(cls: type[nn.Module], original: type[nn.Module]) -> type[nn.Module]:
    """``cls``, which a parametrization has derived from a class of this package, derived from ``original`` instead."""
    inherited = ("__dict__", "__weakref__")
    return type(cls.__name__, (original,), {name: v for name, v in vars(cls).items() if name not in inherited})


def _swap(module: nn.Module, cls: type[nn.Module], **attributes: Any) -> None:
    # Through __dict__: nn.Module.__setattr__ would register and check, and ``revert_layers`` undoes it exactly.
    before = {name: module.__dict__.get(name, _ABSENT) for name in attributes}
    module.__dict__.update(attributes)
    module.__dict__[_ORIGINAL] = (type(module), before, cls)
    module.__class__ = cls


def _is_conv1d(module: nn.Module) -> bool:
    # transformers.pytorch_utils.Conv1D, without importing transformers.
    cls = type(module)
    return cls.__name__ == "Conv1D" and cls.__module__ == "transformers.pytorch_utils"


def _looks_like_rms_norm(module: nn.Module) -> bool:
    cls = type(module)
    return cls.__name__.endswith("RMSNorm") and cls.__module__.startswith("transformers.")


def _unread(model: nn.Module) -> dict[int, str]:
    """By the id of the module: why ``out_proj`` of an attention with a forward of its own is left alone."""
    return {
        id(module.out_proj): f"{type(module).__name__} may read its weight without calling it"
        for module in model.modules()
        if isinstance(module, nn.MultiheadAttention) and not isinstance(module, LowPrecisionMultiheadAttention)
    }


def _linear_obstacle(module: nn.Module, own: str) -> str | None:
    """Why this layer cannot compute with its weight ``own`` in another way."""
    is_layer = type(module) in _PLAIN or _is_conv1d(module) or isinstance(module, LowPrecisionMultiheadAttention)
    if not is_layer or "forward" in module.__dict__:
        return f"{type(module).__name__} has a forward of its own"
    weight = module._parameters.get(own)
    if weight is None:
        return "its weight is computed (weight_norm or another parametrization)"
    if isinstance(weight, UninitializedParameter):
        return "not initialised yet (run the model once before training)"
    return _dtype_obstacle(weight)


def _norm_obstacle(module: nn.Module) -> str | None:
    if "forward" in module.__dict__:
        return f"{type(module).__name__} has a forward of its own"
    weight = getattr(module, "weight", None)
    return _dtype_obstacle(weight) if isinstance(weight, torch.Tensor) else None


def _dtype_obstacle(weight: torch.Tensor) -> str | None:
    if weight.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"its weight is {str(weight.dtype).removeprefix('torch.')}"
    return None


def _size_obstacle(module: nn.Module, own: str, recipe: Recipe) -> str | None:
    multiple = FEATURE_MULTIPLE[recipe.scaling]
    for size in module._parameters[own].shape:  # type: ignore[union-attr]
        if size % multiple or size == 0:
            return f"a side of {size} is no multiple of {multiple}"
    return None
