"""Attention modules whose forward calls a function for rotary position embeddings, as transformers' do.

The function is known by what it computes: values, gradients and their roundings on small random inputs. The module then
runs its own code, in which the function's name stands for ``FusedRotary``; no other module sees the change.
"""

from __future__ import annotations

import copyreg
import dis
import functools
import inspect
import itertools
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from nemo_lowprec.compute.backends.base import Backend, is_transformed
from nemo_lowprec.compute.class_swap import swap
from nemo_lowprec.compute.patterns.own_code import innermost, with_globals
from nemo_lowprec.compute.patterns.pattern import Match, Pattern, probing
from nemo_lowprec.compute.rotary import FusedRotary, RotaryForm, _backward, _forward

_LAYOUTS = list(itertools.product(("halves", "pairs"), ("halves", "pairs"), ("halves", "pairs", "first")))


class Rotary(Pattern):
    """Rotates queries and keys in one pass."""

    name = "rotary embedding"

    def is_candidate(self, module: nn.Module) -> bool:
        return bool(rotary_functions(type(module))) and bool(_linears(module))

    def recognise(self, module: nn.Module) -> Match | str:
        if fused_class(type(module)) is None:  # type: ignore[arg-type]
            return f"the rotary embedding of {type(module).__name__} is another formula"
        return Match(beside=_linears(module))

    def apply(self, module: nn.Module, match: Match, backend: Backend) -> None:
        fused = fused_class(type(module))  # type: ignore[arg-type]
        assert fused is not None
        swap(module, fused)


def _linears(module: nn.Module) -> tuple[str, ...]:
    """Names of the linear layers in ``module``, also inside of adapters."""
    return tuple(name for name, part in module.named_modules() if isinstance(part, nn.Linear))


class FusedClass(type(nn.Module)):  # type: ignore[misc]
    """The classes that ``fused_class`` makes. They are pickled by the class that they are made of."""


def _reduce(cls: FusedClass) -> Any:
    made_of = cls.__dict__.get("made_of")
    return cls.__qualname__ if made_of is None else (fused_class, (made_of,))  # a class derived from it has a name


copyreg.pickle(FusedClass, _reduce)  # type: ignore[arg-type]


@lru_cache(maxsize=256)
def fused_class(cls: type[nn.Module]) -> type[nn.Module] | None:
    """A subclass of ``cls`` that rotates in one pass; None where no function that ``cls`` calls is known.

    Its forward is that of ``cls`` in code which is compiled or transformed.
    """
    own = cls.forward
    fused = {name: FusedRotary(f, form) for name, f in rotary_functions(cls).items() if (form := form_of(f))}
    if not fused or type(cls) is not type:
        return None
    rewired = with_globals(own, _Globals(innermost(own).__globals__, fused))  # type: ignore[arg-type, union-attr]

    @functools.wraps(own)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or is_transformed():
            return own(self, *args, **kwargs)
        return rewired(self, *args, **kwargs)

    own_names = {"forward": forward, "made_of": cls, "__module__": cls.__module__, "__doc__": cls.__doc__}
    return FusedClass(cls.__name__, (cls,), own_names)


class _Globals(dict[str, Any]):
    """The names of a module file as they are now, with fused functions in the place of those that they compute."""

    def __init__(self, names: dict[str, Any], fused: dict[str, FusedRotary]) -> None:
        super().__init__(__builtins__=names["__builtins__"])  # which the interpreter does not look up by __missing__
        self._names, self._fused = names, fused

    def __missing__(self, name: str) -> Any:
        value = self._names[name]
        fused = self._fused.get(name)
        return value if fused is None or fused.function is not value else fused


@lru_cache(maxsize=4096)
def _names_of(code: Any) -> tuple[str, ...]:
    """Names that ``code`` may look up among the globals; none where it also writes them."""
    writes = any(step.opname in ("STORE_GLOBAL", "DELETE_GLOBAL") for step in dis.get_instructions(code))
    return () if writes else code.co_names


def rotary_functions(cls: type[nn.Module]) -> dict[str, Callable[..., Any]]:
    """The functions of tensors, cos and sin that the forward of ``cls`` may call, by their global names."""
    own = None if isinstance(cls, FusedClass) else innermost(cls.forward)
    if own is None:
        return {}
    found = {name: own.__globals__[name] for name in _names_of(own.__code__) if name in own.__globals__}
    return {name: value for name, value in found.items() if _signature(value) is not None}


def _signature(function: Any) -> tuple[int, int | None] | None:
    """(number of tensors before cos and sin, default of ``unsqueeze_dim``); None for any other function."""
    if not callable(function) or isinstance(function, type | nn.Module) or type(function).__hash__ is None:
        return None
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return None
    names = [p.name for p in parameters]
    count = names.index("cos") if "cos" in names else 0
    if count not in (1, 2) or names[count : count + 2] != ["cos", "sin"]:
        return None
    if any(p.default is p.empty or p.kind is not p.POSITIONAL_OR_KEYWORD for p in parameters[count + 2 :]):
        return None
    axis = next((p.default for p in parameters if p.name == "unsqueeze_dim"), None)
    return count, axis


@lru_cache(maxsize=256)
@probing()
def form_of(function: Callable[..., Any]) -> RotaryForm | None:
    """What ``function`` computes, found out on random inputs; None where it is no known rotary embedding."""
    signature = _signature(function)
    if signature is None:
        return None
    count, default = signature
    # Where the call cannot say the axis, it is the same counted from the end for any number of dimensions.
    for axis in (-3, -2) if default is None else (default,):
        probe = _Probe(function, count)
        forms = [RotaryForm(count, axis, False, layouts, False, False, True, False) for layouts in _LAYOUTS]
        found = [form for form in forms if probe.agrees(form)]
        if len(found) == 1 and (default is not None or probe.agrees(found[0], batched=False)):
            return _with_roundings(probe, found[0], default is not None)
    return None


def _with_roundings(probe: _Probe, form: RotaryForm, may_take_axis: bool) -> RotaryForm | None:
    """``form`` with what more calls show; None for roundings that it cannot have."""
    partial = probe.agrees(form, rest=6)
    takes_axis = may_take_axis and form.axis in (1, 2) and probe.agrees(form, axis=3 - form.axis)
    form = form._replace(partial=partial, takes_axis=takes_axis)
    for rounds, rounds_grad, keeps in itertools.product((True, False), repeat=3):
        found = form._replace(rounds=rounds, rounds_grad=rounds_grad, keeps_dtype=keeps)
        cases = itertools.product((torch.bfloat16, torch.float32), (0, 6) if partial else (0,))
        if all(probe.has_same_bits(found, factors, rest) for factors, rest in cases):
            return found
    return None


class _Probe:
    """Calls ``function`` on random inputs, always the same, with 4 query and 2 key heads of 16 elements and more."""

    def __init__(self, function: Callable[..., Any], count: int) -> None:
        self._function, self._count = function, count

    def agrees(self, form: RotaryForm, axis: int | None = None, rest: int = 0, batched: bool = True) -> bool:
        """Whether the function computes ``form`` on FP32 inputs.

        Args:
            axis: what the function is told; None for nothing.
            rest: elements beyond the rotary dim.
            batched: whether the tensors have a dimension for the batch.
        """
        place = form.axis if axis is None else axis
        tensors, cos, sin, _ = self._inputs(place, rest, torch.float32, torch.float32)
        if not batched:
            tensors, cos, sin = [t[0] for t in tensors], cos[0], sin[0]
        got = self._call(tensors, cos, sin, {} if axis is None else {"unsqueeze_dim": axis})
        want = _forward(form, place, cos, sin, tensors)
        return len(got) == len(want) and all(
            isinstance(g, Tensor) and g.shape == w.shape and torch.allclose(g, w, rtol=1e-4, atol=1e-5)
            for g, w in zip(got, want, strict=True)
        )

    def has_same_bits(self, form: RotaryForm, factors: torch.dtype, rest: int) -> bool:
        """Whether results and gradients for half inputs are bit for bit those of ``form``."""
        half = torch.bfloat16
        tensors, cos, sin, grads = self._inputs(form.axis, rest, half, factors)
        got = self._call(tensors, cos, sin, {})
        want = _forward(form, form.axis, cos, sin, [t.detach() for t in tensors])
        if len(got) != len(want) or not all(map(_is_same, got, want)):
            return False
        grads = [grad.to(g.dtype) for grad, g in zip(grads, got, strict=True)]
        turned = torch.autograd.grad(got, tensors, grads)
        return all(map(_is_same, turned, _backward(form, form.axis, cos, sin, grads, half)))

    def _call(self, tensors: list[Tensor], cos: Tensor, sin: Tensor, how: dict[str, int]) -> list[Any]:
        """What the function returns; nothing where it fails."""
        try:
            found = self._function(*tensors, cos, sin, **how)
        except Exception:  # any failure means: another function
            return []
        return [found] if self._count == 1 else list(found)

    def _inputs(
        self, axis: int, rest: int, dtype: torch.dtype, factors: torch.dtype
    ) -> tuple[list[Tensor], Tensor, Tensor, list[Tensor]]:
        """The tensors, cos and sin, and gradients of the results."""
        generator = torch.Generator("cpu").manual_seed(0)

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, device="cpu", dtype=torch.float32)

        def heads(number: int) -> Tensor:
            places = (2, number, 5) if axis % 4 == 1 else (2, 5, number)
            return random(*places, 16 + rest).to(dtype)

        numbers = (4, 2)[: self._count]
        tensors = [heads(number).requires_grad_() for number in numbers]
        cos, sin = (random(2, 5, 16).to(factors) for _ in range(2))
        return tensors, cos, sin, [heads(number) for number in numbers]


def _is_same(a: Any, b: Tensor) -> bool:
    return isinstance(a, Tensor) and a.dtype == b.dtype and torch.equal(a, b)
