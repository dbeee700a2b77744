"""Which layers are converted: names, globs or a callable, the ends of the stack, and the head left alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

__all__ = ["HEAD", "LayerFilter"]

HEAD = "the head (name it in convert to convert it)"

# Last part of the names under which libraries keep their output projection.
_HEAD_NAMES = frozenset(
    {"lm_head", "head", "classifier", "score", "output_layer", "embed_out", "output_projection", "qa_outputs"}
)


@dataclass(frozen=True)
class LayerFilter:
    """A choice of linear layers and norms.

    An ``nn.MultiheadAttention`` is a layer, too: its name stands for the projections of its inputs.

    Args:
        convert: names or globs of the layers to convert (as in ``named_modules()``), or a callable
            ``(name, module) -> bool``; None for all but the head. A head is converted only where ``convert`` names it.
        skip: names or globs of layers to leave in half precision, whatever ``convert`` says.
        num_layers_at_start_in_half, num_layers_at_end_in_half: blocks that stay in half precision, of the
            ``ModuleList`` with the most linear layers in it (single layers where there is no such list).
    """

    convert: Sequence[str] | Callable[[str, nn.Module], bool] | None = None
    skip: Sequence[str] = ()
    num_layers_at_start_in_half: int = 0
    num_layers_at_end_in_half: int = 0

    def __post_init__(self) -> None:
        for name in ("convert", "skip"):
            value = getattr(self, name)
            if isinstance(value, str):
                object.__setattr__(self, name, (value,))
            elif value is None:
                object.__setattr__(self, name, None if name == "convert" else ())
            elif not (name == "convert" and callable(value)) and not _are_strings(value):
                raise ValueError(f"{name}={value!r} must hold names or globs of layers.")
        for name in ("num_layers_at_start_in_half", "num_layers_at_end_in_half"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ValueError(f"{name}={value!r} must be an integer of at least 0.")

    @staticmethod
    def arguments() -> dict[str, Any]:
        """Argument names and defaults."""
        return {f.name: f.default for f in fields(LayerFilter)}

    def reasons(self, model: nn.Module, candidates: dict[str, nn.Module], linears: list[str]) -> dict[str, str]:
        """Return, for each candidate that is not to be converted, why.

        Args:
            model: the whole model.
            candidates: convertible layers by name.
            linears: names of the linear ones among them, in the model's order.

        Raises:
            ValueError: a pattern that matches no layer.
        """
        self._check_patterns(candidates)
        heads = _heads(model, candidates)
        ends = self._ends(model, linears)
        reasons = {}
        for name, module in candidates.items():
            if _matches(name, self.skip):
                reasons[name] = "in skip"
            elif name in ends:
                reasons[name] = f"in the {ends[name]} layers kept in half precision"
            elif callable(self.convert):
                if not self.convert(name, module):
                    reasons[name] = "not chosen by convert"
            elif self.convert is not None:
                if not _matches(name, self.convert):
                    reasons[name] = "not in convert"
            elif name in heads:
                reasons[name] = HEAD
        return reasons

    def _check_patterns(self, candidates: dict[str, nn.Module]) -> None:
        patterns = list(self.skip) + (list(self.convert) if not callable(self.convert) and self.convert else [])
        for pattern in patterns:
            if not any(_matches(name, (pattern,)) for name in candidates):
                raise ValueError(
                    f"{pattern!r} matches no linear layer or norm of the model. Names are those of "
                    f"named_modules(), for example {next(iter(candidates), 'none here')!r}; globs are allowed."
                )

    def _ends(self, model: nn.Module, linears: list[str]) -> dict[str, str]:
        start, end = self.num_layers_at_start_in_half, self.num_layers_at_end_in_half
        if not (start or end):
            return {}
        stacks = [(n, m) for n, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m) > 1]
        inside = {n: [x for x in linears if x.startswith(n + ".")] for n, _ in stacks}
        stacks = [(n, m) for n, m in stacks if inside[n]]
        if not stacks:
            last = linears[max(len(linears) - end, 0) :]
            return {**dict.fromkeys(linears[:start], "first"), **dict.fromkeys(last, "last")}
        name, stack = max(stacks, key=lambda item: (len(inside[item[0]]), len(item[1])))
        ends: dict[str, str] = {}
        for layer, _ in model.named_modules():
            if layer.startswith(name + "."):
                index = int(layer[len(name) + 1 :].split(".")[0])
                if index < start:
                    ends[layer] = "first"
                elif index >= len(stack) - end:
                    ends[layer] = "last"
        return ends


def _are_strings(value: Any) -> bool:
    return isinstance(value, Iterable) and all(isinstance(v, str) for v in value)


def _matches(name: str, patterns: Sequence[str]) -> bool:
    # A plain name also stands for everything below it.
    return any(fnmatchcase(name, p) or name.startswith(p + ".") for p in patterns)


def _heads(model: nn.Module, candidates: dict[str, nn.Module]) -> set[str]:
    outputs = set()
    embeddings = set()
    for module in model.modules():
        get = getattr(module, "get_output_embeddings", None)
        if callable(get):
            outputs.add(id(get()))
        if isinstance(module, nn.Embedding):
            embeddings.add(id(module.weight))
    return {
        name
        for name, module in candidates.items()
        if name.rsplit(".", 1)[-1] in _HEAD_NAMES
        or id(module) in outputs
        or id(getattr(module, "weight", None)) in embeddings
    }
