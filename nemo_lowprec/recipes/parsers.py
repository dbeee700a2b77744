"""Types of our arguments that nemo_run's command-line parser does not read by itself: tuples, sequences, ``X | Y``.

nemo_run refuses them ("Unsupported type"), so registering them changes nothing for other recipes.
"""

from __future__ import annotations

import ast
import types
from collections.abc import Sequence
from typing import Any, get_args

from nemo_run.cli.cli_parser import ParseError, type_parser

__all__ = ["register_parsers"]


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
