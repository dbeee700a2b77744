"""Says of each matrix of a model whether a low-precision GEMM reads it, and if not, why."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import NamedTuple

from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from nemo_lowprec.compute.class_swap import own_class
from nemo_lowprec.compute.conversion import Conversion
from nemo_lowprec.compute.experts.blocks import blocks_of
from nemo_lowprec.compute.filters import full_name
from nemo_lowprec.compute.te_layers import is_te_module

_ENOUGH = 0.5  # of the products
_NAMED = 3
_PARAMETRIZED = re.compile(r"(^|\.)parametrizations\..*$")


class Fate(NamedTuple):
    """How a layer or matrix is computed.

    Attributes:
        kind: ``low``: by a converted layer; ``left``: by a converted layer that ``convert="auto"`` runs in half
            precision; ``te``: in Transformer Engine's own layers; ``half``; ``asked``: half, by the arguments that
            choose layers; ``router``: in FP32; ``norm``; ``embedding``: a lookup, which is no GEMM; ``fused`` and
            ``unfused``: a parent of layers, which a pattern computes or not.
        reason: why the kind is not ``low``; for ``fused`` the name of the pattern.
        pattern: of a matrix without a layer, its name with ``*`` for numbers, so that such matrices form one group.
    """

    kind: str
    reason: str = ""
    pattern: str = ""


@dataclass
class Group:
    """Layers, or matrices without a layer, that have one fate.

    Attributes:
        names: of the layers or matrices, in the model's order.
        elements: number of elements of their matrices (parameters of two or more dimensions), each counted once.
        products: of the matrices' elements with those of one token. A token passes a part of the experts; a matrix
            that is looked up has none.
    """

    fate: Fate
    names: list[str] = field(default_factory=list)
    elements: int = 0
    products: float = 0.0

    @property
    def is_gemm(self) -> bool:
        """Whether a GEMM reads the matrices that the user has not asked to keep in half precision.

        A matrix outside of torch's layers counts as one that a GEMM reads, since no module shows its use.
        """
        return self.fate.kind in ("low", "te", "left", "half", "router")

    @property
    def is_low(self) -> bool:
        """Whether low-precision GEMMs read the matrices."""
        return self.fate.kind in ("low", "te")


def groups_of(model: nn.Module, conversion: Conversion) -> list[Group]:
    """All layers in ``conversion`` and all matrices of ``model``, grouped; converted groups first, then by size.

    A matrix that several modules share (an embedding that is the head, too) counts for one of them, in this order:
    converted, Transformer Engine's, left in half precision, norm, embedding, anything else.
    """
    names: dict[Fate, dict[str, None]] = defaultdict(dict)
    elements: dict[Fate, int] = defaultdict(int)
    products: dict[Fate, float] = defaultdict(float)
    shares = {block.experts: block.share for block in blocks_of(model)}
    for name in conversion.low:
        names[_converted(name, conversion)][name] = None
    for name in conversion.norms:
        names[Fate("norm")][name] = None
    for name, pattern in conversion.fused.items():
        names[Fate("fused", pattern)][name] = None
    for name, reason in conversion.unfused.items():
        names[Fate("unfused", reason)][name] = None
    for name in conversion.kept:
        names[_kept(name, conversion)][name] = None
    low = dict(zip(conversion.weights, conversion.low, strict=True))
    for matrix, places in _matrices(model):
        _, fate, name = min((_found(*place, low, conversion) for place in places), key=lambda found: found[0])
        names[fate][name] = None
        size = 0 if isinstance(matrix, UninitializedParameter) else matrix.numel()
        elements[fate] += size
        if fate.kind not in ("norm", "embedding"):
            products[fate] += size * _share(places[0][0], shares)
    groups = [Group(fate, list(of), elements[fate], products[fate]) for fate, of in names.items()]
    return sorted(groups, key=lambda group: (_ORDER.index(group.fate.kind), -group.elements))


_ORDER = ("low", "te", "left", "norm", "fused", "unfused", "half", "asked", "router", "embedding")


def _share(module: str, shares: dict[str, float]) -> float:
    """The part of a module that a token passes."""
    return next((share for name, share in shares.items() if f"{module}.".startswith(f"{name}.")), 1.0)


def _matrices(model: nn.Module) -> Iterator[tuple[Tensor, list[tuple[str, nn.Module, str]]]]:
    """(matrix, [(name of a module with the matrix, the module, name of the matrix in the module)])."""
    found: dict[int, tuple[Tensor, list[tuple[str, nn.Module, str]]]] = {}
    for name, module in model.named_modules():
        for own, param in module._parameters.items():
            if param is not None and (isinstance(param, UninitializedParameter) or param.dim() > 1):
                found.setdefault(id(param), (param, []))[1].append((name, module, own))
    yield from found.values()


def _found(
    name: str, module: nn.Module, own: str, low: dict[str, str], conversion: Conversion
) -> tuple[int, Fate, str]:
    """(rank of the module among those that have the matrix, fate, name of the layer or matrix)."""
    full = full_name(name, own)
    if full in low:
        return 0, _converted(low[full], conversion), low[full]
    if name in conversion.routers:
        return 0, Fate("router", "routers"), name
    if is_te_module(module):
        return 1, Fate("te"), name
    outside = _PARAMETRIZED.sub("", name)
    for layer in (full, name, outside):
        if layer in conversion.kept:
            return 2, _kept(layer, conversion), layer
    if name in conversion.norms or isinstance(module, nn.LayerNorm | nn.RMSNorm):
        return 3, Fate("norm"), name
    kind = own_class(module).__name__.removeprefix("FSDP")
    if isinstance(module, nn.Embedding | nn.EmbeddingBag) or kind.endswith(("Embedding", "Embeddings")):
        return 4, Fate("embedding", "an embedding", _pattern(full)), full
    reason = "computed by a parametrization" if outside != name else f"a parameter of {kind}"
    return 5, Fate("half", reason, _pattern(full)), full


def _converted(layer: str, conversion: Conversion) -> Fate:
    return Fate("left", conversion.left[layer]) if layer in conversion.left else Fate("low")


def _kept(layer: str, conversion: Conversion) -> Fate:
    return Fate("asked" if layer in conversion.asked else "half", conversion.kept[layer])


def as_patterns(names: list[str]) -> list[str]:
    """``names``, where one pattern stands for all names that differ in numbers only."""
    alike: dict[str, list[str]] = defaultdict(list)
    for name in names:
        alike[_pattern(name)].append(name)
    return [pattern if len(of) > 1 else of[0] for pattern, of in alike.items()]


def as_globs(names: list[str], others: list[str]) -> list[str]:
    """Short globs that match all of ``names`` and none of ``others``, such as ``*.self_attn.q_proj``.

    A glob has the last two parts of a name, and more where two match another name, too. Where names of both lists
    differ in their numbers only, no glob can tell them apart, and the short glob matches both.
    """
    own, rest = as_patterns(names), as_patterns(others)
    found: list[str] = []
    for pattern in own:
        if any(fnmatchcase(pattern, glob) for glob in found):
            continue
        candidates = list(_shorter(pattern))
        exact = (glob for glob in candidates if not any(fnmatchcase(other, glob) for other in rest))
        found.append(next(exact, candidates[0] if "*" in pattern else pattern))
    return found


def _shorter(pattern: str) -> Iterator[str]:
    """Globs for the last two parts of ``pattern``, the last three, and so on, and ``pattern`` itself."""
    parts = pattern.split(".")
    for start in range(max(len(parts) - 2, 1), 0, -1):
        if set(parts[start:]) - {"*"}:
            yield ".".join(parts[start:] if parts[start] == "*" else ["*", *parts[start:]])
    yield pattern


def _pattern(name: str) -> str:
    return re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", name)


def too_little(groups: list[Group]) -> str | None:
    """A warning where converted layers do less than half of the products of a token with matrices, else None.

    Not counted are norms, layers that the user has asked to keep, and embeddings (a lookup is no GEMM) unless the
    embedding is the head, too.
    """
    counted = sum(group.products for group in groups if group.is_gemm)
    low = sum(group.products for group in groups if group.is_low)
    if low and low >= _ENOUGH * counted:
        return None
    others = sorted((g for g in groups if g.is_gemm and not g.is_low and g.products), key=lambda g: -g.products)
    shown = [
        f"{g.products / counted:.0%} {', '.join(as_patterns(g.names)[:_NAMED])}, {g.fate.reason}"
        for g in others[:_NAMED]
    ]
    more = f"; and {len(others) - _NAMED} more groups" if len(others) > _NAMED else ""
    what = f"only {low / counted:.0%} of the FLOP of the matrices" if low else "no matrix"
    return f"{what} that this model multiplies with {'are' if low else 'is'} in a converted layer" + (
        f". Others are: {'; '.join(shown)}{more}." if shown else "."
    )
