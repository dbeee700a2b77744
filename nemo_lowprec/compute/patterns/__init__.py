"""Patterns: modules that are computed in another way than layer by layer, over the parameters that they have.

Conversion asks the patterns of ``PATTERNS`` in order; the first one that recognises a module computes it. A pattern is
one file here. To add one, such as a norm that hands its quantized output to the GEMM behind it:

1. Write ``patterns/norm_linear.py`` with a subclass of ``Pattern``; give it a ``name``.
2. ``is_candidate(module)``: a cheap look at the class or the names of the children.
3. ``recognise(module)``: run the module's own forward on small random parameters and inputs with ``run_with``, and
   compare the output with the formula. Return a ``Match`` that names the linear layers and norms which the pattern
   computes (``Match(linears=("proj",), norms=("norm",))``), or a sentence that says why it computes none.
4. Write a subclass of ``nn.Module`` with the fused forward. It reads the parameters of the module's children, and of
   each linear layer its ``gemm_plan``: backend, dtype, operands. Operands that the class has quantized go to the next
   linear layer by ``SharedInput.offer``. A child that is read and not called runs no hooks.
5. ``apply(module, match, backend)``: ``swap(module, YourClass)``. ``revert_layers`` undoes this swap.
6. Add an instance to ``PATTERNS``, before the patterns of its parts. Test outputs and gradients against the unfused
   module bit for bit on the reference backend, as ``tests/compute/test_patterns.py`` does.

A parent (``is_parent``) is fused on top of its linear layers, which are converted as ever: names, scales, histories and
the weights' storage do not change, and a checkpoint fits with and without the pattern. A parent is left alone where one
of the linear layers or norms that its pattern computes is left in half precision. ``Conversion`` lists the outcomes.
"""

from __future__ import annotations

from collections.abc import Container

from torch import nn

from nemo_lowprec.compute.backends.base import Backend
from nemo_lowprec.compute.class_swap import own_forward
from nemo_lowprec.compute.conversion import Conversion
from nemo_lowprec.compute.filters import full_name
from nemo_lowprec.compute.patterns.activations import Activations
from nemo_lowprec.compute.patterns.gated_mlp import GatedMLPs
from nemo_lowprec.compute.patterns.mlp import MLPs
from nemo_lowprec.compute.patterns.norms import Norms
from nemo_lowprec.compute.patterns.pattern import Match, Pattern, run_with
from nemo_lowprec.compute.patterns.rotary import Rotary
from nemo_lowprec.compute.patterns.split import Split

__all__ = ["PATTERNS", "Match", "Pattern", "apply_patterns", "candidates", "recognise", "run_with"]

_ALONE = "its linear layers are in half precision"

PATTERNS: list[Pattern] = [GatedMLPs(), MLPs(), Rotary(), Split(), Norms(), Activations()]


def candidates(model: nn.Module, histories: bool) -> dict[str, tuple[nn.Module, list[Pattern]]]:
    """Modules of ``model`` and the patterns that may compute them, by name; a parent comes before its children.

    Args:
        histories: whether the level scales by histories.
    """
    usable = [pattern for pattern in PATTERNS if histories or not pattern.needs_histories]
    found = {name: (m, [p for p in usable if p.is_candidate(m)]) for name, m in model.named_modules()}
    return {name: (module, patterns) for name, (module, patterns) in found.items() if patterns}


def recognise(module: nn.Module, patterns: list[Pattern], refused: str | None) -> tuple[Pattern, Match | str]:
    """The first of ``patterns`` that matches, and the match; else the first pattern, and why none matches.

    Args:
        refused: the user's reason to leave ``module`` alone.
    """
    reason = refused or own_forward(module) or ""
    for pattern in () if reason else patterns:
        outcome = pattern.recognise(module)
        if isinstance(outcome, Match):
            return pattern, outcome
        reason = reason or outcome
    return patterns[0], reason


def apply_patterns(
    model: nn.Module,
    found: dict[str, tuple[Pattern, Match | str]],
    refused: Container[str],
    backend: Backend,
    conversion: Conversion,
) -> None:
    """Swap the forwards of the modules that match, and enter all modules into ``conversion``.

    Args:
        found: by the modules' names, parents first. A module that is part of a matched parent is not matched again.
        refused: names of norms that the user keeps.
        conversion: lists the linear layers that are converted by now.
    """
    free, computed = set(conversion.low), set[str]()
    for name, (pattern, outcome) in found.items():
        if name in computed or (isinstance(outcome, Match) and not pattern.pays(outcome, backend)):
            continue
        if not pattern.is_listed:
            if isinstance(outcome, Match):
                pattern.apply(model.get_submodule(name), outcome, backend)
            continue
        if isinstance(outcome, Match):
            linears, norms = ([full_name(name, own) for own in parts] for parts in (outcome.linears, outcome.norms))
            left = [part for part in linears if part not in free] + [norm for norm in norms if norm in refused]
            alone = outcome.beside and not any(full_name(name, own) in conversion.low for own in outcome.beside)
            if not left and not alone:
                pattern.apply(model.get_submodule(name), outcome, backend)
                free.difference_update(linears)
                computed.update(norms)
                conversion.norms += norms
                if pattern.is_parent:
                    conversion.fused[name] = pattern.name
                continue
            outcome = f"{left[0]} is in half precision, or part of another pattern" if left else _ALONE
        (conversion.unfused if pattern.is_parent else conversion.kept)[name] = outcome
