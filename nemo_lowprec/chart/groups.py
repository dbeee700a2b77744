"""Groups of arguments that several levels take: layers, loss scale (the names are Megatron's), low-bit weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal, get_type_hints

from annotated_types import Ge, Le

from nemo_lowprec.arguments import AtLeast0, AtLeast1, Seed, check_value

_LOWEST = 2.0**-24  # FP16's smallest number: with a smaller scale a gradient of 1 would become zero
HIGHEST = 2.0**126  # the largest power of two of which FP32 holds the reciprocal as a normal number


class _PlainNumber:
    """Part of an annotation: a number of Python. pydantic takes any object with a ``__float__``, such as a tensor."""

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        from pydantic_core.core_schema import chain_schema, is_instance_schema

        return chain_schema([is_instance_schema((int, float)), handler(source)])


_Scale = Annotated[
    float, _PlainNumber(), Ge(_LOWEST), Le(HIGHEST),
    "a positive number from 2**-24 (below, FP16 gradients of 1 become zero) "
    "to 2**126 (above, FP32 does not hold it and its reciprocal)",
]  # fmt: skip


class Arguments:
    """Base of the groups, which are frozen dataclasses: a value is checked against the annotation of its field."""

    def __post_init__(self) -> None:
        for name, kind in get_type_hints(type(self), include_extras=True).items():
            check_value(name, getattr(self, name), kind)

    @classmethod
    def arguments(cls) -> dict[str, Any]:
        """Argument names and defaults."""
        return {f.name: f.default for f in fields(cls)}  # type: ignore[arg-type]


@dataclass(frozen=True)
class LayerFilter(Arguments):
    """A choice of linear layers, patch embeddings (convolutions whose kernels do not overlap) and norms.

    An ``nn.MultiheadAttention`` is a layer, too: its name stands for the projections of its inputs.

    Args:
        convert: names or globs of the layers to convert (as in ``named_modules()``), or a callable
            ``(name, module) -> bool``; None for all layers but the head. ``"auto"``: all layers but the head and, after
            the first step, but those that are too small to gain on this GPU; ``["auto"]`` is a name.
        head: ``"fp8"`` converts the head, too: the layer that computes the model's output. ``"half"``: a head is
            converted only where ``convert`` names the head.
        skip: names or globs of layers to leave in half precision, whatever ``convert`` says.
        num_layers_at_start_in_half: blocks at the start of the stack that stay in half precision. The stack is the
            ``ModuleList`` with the most linear layers; in a model without a ``ModuleList`` single layers count.
        num_layers_at_end_in_half: blocks at the end of the stack that stay in half precision.
    """

    convert: Literal["auto"] | Sequence[str] | Callable[..., bool] | None = "auto"
    head: Literal["half", "fp8"] = "half"
    skip: Sequence[str] = ()
    num_layers_at_start_in_half: int = 0
    num_layers_at_end_in_half: int = 0

    def __post_init__(self) -> None:
        for name in ("convert", "skip"):
            value = getattr(self, name)
            if name == "convert" and value == "auto":
                continue
            if isinstance(value, str):
                object.__setattr__(self, name, (value,))
            elif value is None:
                object.__setattr__(self, name, None if name == "convert" else ())
            elif not (name == "convert" and callable(value)):
                if not _are_strings(value):
                    raise ValueError(f"{name}={value!r} must hold names or globs of layers.")
                object.__setattr__(self, name, tuple(value))  # Hydra and YAML have lists
        for name in ("num_layers_at_start_in_half", "num_layers_at_end_in_half"):
            check_value(name, getattr(self, name), AtLeast0)
        check_value("head", self.head, Literal["half", "fp8"])

    @property
    def is_auto(self) -> bool:
        """Whether layers that are too small to gain stay in half precision."""
        return self.convert == "auto"

    @property
    def chosen(self) -> Sequence[str] | Callable[..., bool] | None:
        """The user's choice of layers; None for all but the head."""
        return None if self.convert == "auto" else self.convert


def _are_strings(value: Any) -> bool:
    return isinstance(value, Iterable) and all(isinstance(v, str) for v in value)


@dataclass(frozen=True)
class LossScaleConfig(Arguments):
    """How the loss of an FP16 level is scaled.

    Args:
        loss_scale: a static scale; None for dynamic scaling.
        initial_loss_scale: first scale of dynamic scaling.
        loss_scale_window: steps without an overflow after which the scale doubles.
        hysteresis: overflows after which the scale halves.
        min_loss_scale: smallest scale of dynamic scaling.

    Raises:
        ValueError: a scale below 2**-24 or above 2**126, a count below 1, or ``initial_loss_scale`` below
            ``min_loss_scale``.
    """

    loss_scale: _Scale | None = None
    initial_loss_scale: _Scale = 2.0**16
    loss_scale_window: AtLeast1 = 1000
    hysteresis: AtLeast1 = 2
    min_loss_scale: _Scale = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.initial_loss_scale < self.min_loss_scale:
            raise ValueError(
                f"initial_loss_scale={self.initial_loss_scale!r} lies below min_loss_scale={self.min_loss_scale!r}."
            )


@dataclass(frozen=True)
class LowBitOptions(Arguments):
    """How low-bit weights are updated.

    Args:
        stochastic_rounding: round updated 16-bit weights (O3: masters) up or down at random, so that updates far
            smaller than a weight are kept on average.
        rounding_seed: seed of stochastic rounding, of weights and of moments.
        gradient_release: step each parameter as soon as its gradient is complete, and free the gradient.
    """

    stochastic_rounding: bool = False
    rounding_seed: Seed = 0
    gradient_release: bool = False
