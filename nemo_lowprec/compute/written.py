"""Whether the code of a module may write one of its parameters in place."""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from typing import Any

_OUTSIDE_OF_PASSES = ("init", "reset")  # within the names of methods that give parameters their first values


@functools.cache
def may_write(cls: Any, name: str) -> bool:
    """Whether a method of ``cls`` may write ``self.<name>`` in place, or store it elsewhere.

    Read off the source, which knows the parameter by ``self.<name>``, by views of it and by variables for both. True
    where there is no source. torch's own classes write none, but an embedding with ``max_norm`` its table.
    """
    return any(_class_writes(base, name) for base in cls.__mro__ if not _is_of_torch(base))


def _is_of_torch(cls: type) -> bool:
    return cls is object or cls.__module__.startswith("torch.nn.")


def _class_writes(cls: type, name: str) -> bool:
    if cls.__module__ == "typing" or not any(inspect.isfunction(f) for f in vars(cls).values()):
        return False
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    except (OSError, TypeError, SyntaxError):
        return True
    methods = [node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    in_passes = [m for m in methods if not any(part in m.name for part in _OUTSIDE_OF_PASSES)]
    return any(_method_writes(method, name) for method in in_passes)


def _method_writes(method: ast.AST, name: str) -> bool:
    nodes = list(ast.walk(method))
    aliases: set[str] = set()

    def is_parameter(node: ast.AST | None) -> bool:
        """Whether the expression may be the parameter or a view of it."""
        if isinstance(node, ast.Name):
            return node.id in aliases
        if isinstance(node, ast.Attribute):
            own = isinstance(node.value, ast.Name) and node.value.id == "self" and node.attr == name
            return own or is_parameter(node.value)
        if isinstance(node, (ast.Subscript, ast.Starred, ast.NamedExpr)):
            return is_parameter(node.value)
        if isinstance(node, ast.Call):
            return isinstance(node.func, ast.Attribute) and is_parameter(node.func.value)
        if isinstance(node, ast.IfExp):
            return is_parameter(node.body) or is_parameter(node.orelse)
        if isinstance(node, ast.BoolOp):
            return any(is_parameter(value) for value in node.values)
        return isinstance(node, (ast.Tuple, ast.List)) and any(is_parameter(each) for each in node.elts)

    def writes(node: ast.AST) -> bool:
        if isinstance(node, ast.Call):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if any(is_parameter(each.value) for each in node.keywords if each.arg == "out"):
                return True
            in_place = called.endswith("_") and not called.endswith("__")
            return in_place and any(map(is_parameter, (getattr(node.func, "value", None), *node.args)))
        if isinstance(node, ast.AugAssign):
            return is_parameter(node.target)
        if isinstance(node, ast.Assign):
            into = [target for target in node.targets if isinstance(target, (ast.Attribute, ast.Subscript))]
            return bool(into) and (is_parameter(node.value) or any(is_parameter(target.value) for target in into))
        return False

    found = -1
    while found < len(aliases):  # a variable may be made of one that stands further below, in a loop
        found = len(aliases)
        for node in nodes:
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            if isinstance(node, (ast.Assign, ast.AnnAssign, ast.NamedExpr, ast.For)):
                value = node.iter if isinstance(node, ast.For) else node.value
                if is_parameter(value):
                    aliases |= {n.id for t in targets if t is not None for n in ast.walk(t) if isinstance(n, ast.Name)}
    return any(map(writes, nodes))
