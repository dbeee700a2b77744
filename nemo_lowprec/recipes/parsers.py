"""Parsers for the types that nemo_run's command line does not read: tuples, sequences, ``X | Y``, string annotations.

Importing this file registers the parsers. nemo_run refuses these types ("Unsupported type"), so a registered parser
changes nothing for other recipes.
"""

from __future__ import annotations

import ast
import inspect
import types
from collections.abc import Callable, Sequence
from typing import Any, get_args

from nemo_run.cli.cli_parser import ParseError, type_parser


@type_parser.register_parser(Sequence)
def _sequence(value: str, annotation: Any) -> list[Any]:
    try:
        parsed = ast.literal_eval(value)
    except (ValueError, SyntaxError) as error:
        raise ParseError(value, annotation, "not a Python list or tuple") from error
    if not isinstance(parsed, list | tuple):
        raise ParseError(value, annotation, "not a list or tuple")
    return list(parsed)


@type_parser.register_parser(tuple)
def _tuple(value: str, annotation: Any) -> tuple[Any, ...]:
    return tuple(_sequence(value, annotation))


@type_parser.register_parser(types.UnionType)
def _union(value: str, annotation: Any) -> Any:
    members = get_args(annotation)
    if type(None) in members and value.lower() in ("none", "null"):
        return None
    reasons = []
    # Any value is a string, so the type str comes last.
    for member in sorted((m for m in members if m is not type(None)), key=lambda m: m is str):
        try:
            return type_parser.parse(value, member)
        except ParseError as error:
            reasons.append(str(error))
    raise ParseError(value, annotation, "; ".join(reasons))


def register_annotations(*functions: Callable[..., Any]) -> None:
    """Register a parser for each string annotation of the functions or classes, which parses the type it names."""
    for function in functions:
        meant = inspect.signature(function, eval_str=True).parameters
        for name, parameter in inspect.signature(function).parameters.items():
            if isinstance(parameter.annotation, str):
                kind = meant[name].annotation
                type_parser.register_parser(parameter.annotation)(
                    lambda value, _, kind=kind: type_parser.parse(value, kind)
                )
