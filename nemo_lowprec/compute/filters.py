"""Chooses the layers to convert: by names, globs or a callable, without the ends of the stack and without the head."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from torch import nn

from nemo_lowprec.chart.groups import LayerFilter
from nemo_lowprec.compute.adapters import ADAPTER, adapters_of, plain_name, unwrapped

HEAD = "the head (head='fp8' converts it)"

# Last part of the names under which libraries keep their output projection.
_HEAD_NAMES = frozenset(
    {"lm_head", "head", "classifier", "score", "output_layer", "embed_out", "output_projection", "qa_outputs"}
)


def full_name(module: str, own: str) -> str:
    """The name in the model of the layer or weight ``own`` inside of ``module``; either name may be empty."""
    return f"{module}.{own}" if module and own else module or own


def reasons_to_keep(
    layers: LayerFilter, model: nn.Module, candidates: dict[str, nn.Module], linears: list[str]
) -> dict[str, str]:
    """Return the reason for each candidate that is not to be converted, by name.

    Args:
        model: the whole model.
        candidates: convertible layers by name.
        linears: names of the candidates that are linear layers, in the model's order.

    Raises:
        ValueError: a pattern that matches no layer; a pattern in ``convert`` that matches adapters only; ``head="fp8"``
            for a model without a head.
    """
    adapters = adapters_of(model)
    adapters &= {id(module) for module in candidates.values()}
    _check_patterns(layers, candidates, adapters)
    heads = find_heads(model, candidates)
    if layers.head == "fp8" and not heads:
        raise ValueError(
            f"head='fp8': no layer of {type(model).__name__} is known as the head, by its name or by "
            "get_output_embeddings(). Leave it out, or name the layer in convert."
        )
    ends = _ends(layers, model, [name for name in linears if id(candidates[name]) not in adapters])
    reasons = {}
    for name, module in candidates.items():
        if id(module) in adapters:
            reasons[name] = ADAPTER
        elif _matches(name, layers.skip):
            reasons[name] = "in skip"
        elif name in ends:
            reasons[name] = f"in the {ends[name]} layers kept in half precision"
        elif name in heads and layers.head == "fp8":
            continue
        elif callable(layers.chosen):
            if not layers.chosen(name, module):
                reasons[name] = "not chosen by convert"
        elif layers.chosen is not None:
            if not _matches(name, layers.chosen):
                reasons[name] = "not in convert"
        elif name in heads:
            reasons[name] = HEAD
    return reasons


def is_skipped(layers: LayerFilter, name: str) -> bool:
    """Whether ``skip`` names the module ``name``, or a module that holds it."""
    return _matches(name, layers.skip)


def _check_patterns(layers: LayerFilter, candidates: dict[str, nn.Module], adapters: set[int]) -> None:
    chosen = layers.chosen
    converted = () if chosen is None or callable(chosen) else chosen
    for pattern in [*layers.skip, *converted]:
        found = [module for name, module in candidates.items() if _matches(name, (pattern,))]
        if found and pattern in converted and all(id(module) in adapters for module in found):
            raise ValueError(
                f"convert names {pattern!r}, which is {ADAPTER}: adapters stay in half precision, since FP8 cannot pay "
                "at their rank. Name the layers that the adapters wrap, or leave convert out."
            )
        if not found:
            raise ValueError(
                f"{pattern!r} matches no linear layer or norm of the model. Names are those of "
                f"named_modules(), for example {next(iter(candidates), 'none here')!r}; globs are allowed."
            )


def _ends(layers: LayerFilter, model: nn.Module, linears: list[str]) -> dict[str, str]:
    start, end = layers.num_layers_at_start_in_half, layers.num_layers_at_end_in_half
    if not (start or end):
        return {}
    stacks = {n: len(m) for n, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m) > 1}
    inside = {n: sum(linear.startswith(n + ".") for linear in linears) for n in stacks}
    if not any(inside.values()):
        last = linears[max(len(linears) - end, 0) :]
        return {**dict.fromkeys(linears[:start], "first"), **dict.fromkeys(last, "last")}
    name = max(stacks, key=lambda n: (inside[n], stacks[n]))
    ends: dict[str, str] = {}
    for layer, _ in model.named_modules():
        if layer.startswith(name + "."):
            index = int(layer[len(name) + 1 :].split(".")[0])
            if index < start:
                ends[layer] = "first"
            elif index >= stacks[name] - end:
                ends[layer] = "last"
    return ends


def _matches(name: str, patterns: Sequence[str]) -> bool:
    # A plain name also stands for everything below it.
    names = {name, plain_name(name)}
    return any(fnmatchcase(one, p) or one.startswith(p + ".") for p in patterns for one in names)


def find_heads(model: nn.Module, candidates: dict[str, nn.Module]) -> set[str]:
    """The names of the candidates that compute the model's output: by their name, or as the model says."""
    outputs: set[int] = set()
    embeddings = set()
    for module in model.modules():
        get = getattr(module, "get_output_embeddings", None)
        if callable(get):
            outputs.update(map(id, unwrapped(get())))
        if isinstance(module, nn.Embedding):
            embeddings.add(id(module._parameters.get("weight", module)))
    return {
        name
        for name, module in candidates.items()
        if plain_name(name).rsplit(".", 1)[-1] in _HEAD_NAMES
        or id(module) in outputs
        # Not module.weight: a parametrization would compute it, and take a step of spectral_norm's power iteration.
        or id(module._parameters.get("weight")) in embeddings
    }
