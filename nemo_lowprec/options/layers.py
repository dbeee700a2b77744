"""Arguments that choose layers: names, globs or a callable, and the ends of the stack."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from nemo_lowprec.options.values import Arguments, is_integer


@dataclass(frozen=True)
class LayerFilter(Arguments):
    """A choice of linear layers and norms.

    An ``nn.MultiheadAttention`` is a layer, too: its name stands for the projections of its inputs.

    Args:
        convert: names or globs of the layers to convert (as in ``named_modules()``), or a callable
            ``(name, module) -> bool``; None for all layers but the head. A head is converted only where ``convert``
            names the head.
        skip: names or globs of layers to leave in half precision, whatever ``convert`` says.
        num_layers_at_start_in_half, num_layers_at_end_in_half: blocks that stay in half precision, of the
            ``ModuleList`` with the most linear layers (single layers in a model without a ``ModuleList``).
    """

    convert: Sequence[str] | Callable[..., bool] | None = None
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
            if not is_integer(value, 0):
                raise ValueError(f"{name}={value!r} must be an integer of at least 0.")


def _are_strings(value: Any) -> bool:
    return isinstance(value, Iterable) and all(isinstance(v, str) for v in value)
