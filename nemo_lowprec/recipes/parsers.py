"""Types of our arguments that nemo_run's command-line parser does not read by itself.

These are tuples, sequences, ``X | Y``, and annotations that are strings (``from __future__ import annotations``).
nemo_run refuses them ("Unsupported type"), so registering them changes nothing for other recipes.
"""

from __future__ import annotations

import ast
import inspect
import types
from collections.abc import Callable, Sequence
from typing import Any, get_args

from nemo_run.cli.cli_parser import ParseError, type_parser

__all__ = ["register_annotations", "register_parsers"]


def _literal(value: str, annotation: Any) -> list[Any]:
    try:
        parsed = ast.literal_eval(value)
    except (ValueError, SyntaxError) as error:
        raise ParseError(value, annotation, "not a Python list or tuple") from error
    if not isinstance(parsed, list | tuple):
        raise ParseError(value, annotation, "not a list or tuple")
    return list(parsed)


def _tuple(value: str, annotation: Any) -> tuple[Any, ...]:
    return tuple(_literal(value, annotation))


def _sequence(value: str, annotation: Any) -> list[Any]:
    return _literal(value, annotation)


def _union(value: str, annotation: Any) -> Any:
    members = get_args(annotation)
    if type(None) in members and value.lower() in ("none", "null"):
        return None
    reasons = []
    # A string can be read as anything, so it comes last.
    for member in sorted((m for m in members if m is not type(None)), key=lambda m: m is str):
        try:
            return type_parser.parse(value, member)
        except ParseError as error:
            reasons.append(str(error))
    raise ParseError(value, annotation, "; ".join(reasons))


def register_parsers() -> None:
    """Teaches nemo_run's command line the types."""
    for kind, parser in ((tuple, _tuple), (Sequence, _sequence), (types.UnionType, _union)):
        type_parser.register_parser(kind)(parser)


def register_annotations(*functions: Callable[..., Any]) -> None:
    """Teaches it what the annotations of these functions or classes mean, where they are strings."""
    for function in functions:
        meant = inspect.signature(function, eval_str=True).parameters
        for name, parameter in inspect.signature(function).parameters.items():
            if isinstance(parameter.annotation, str):
                kind = meant[name].annotation
                type_parser.register_parser(parameter.annotation)(
                    lambda value, _, kind=kind: type_parser.parse(value, kind)
                )
