"""Whether the code of a module may write one of its parameters in place."""

from __future__ import annotations

import ast
import builtins
import functools
import inspect
import sys
import textwrap
from typing import Any

# How names begin of methods that give a module its values or sizes, and are called outside of passes.
_OUTSIDE_OF_PASSES = ("init", "reset", "set_", "resize", "load")
_KNOWN = ("torch.nn.", "nemo_lowprec.", "typing")  # modules whose classes write no parameter
# Packages of which only functions whose names end with "_" write their arguments.
_READ = ("torch", "einops", "numpy", "scipy", "math", "builtins")


@functools.cache
def may_write(cls: Any, name: str) -> bool:
    """Whether a method of ``cls`` may write the parameter ``self.<name>`` in place, or assign it to an attribute.

    The answer comes from the source: of the methods, and of functions that the methods call with the parameter. The
    source names the parameter ``self.<name>``, a view of ``self.<name>``, or a variable that was assigned either.
    Without a source the answer is True. Classes of torch and of this package write no parameter.
    """
    bases = [each for each in cls.__mro__ if each is not object and not each.__module__.startswith(_KNOWN)]
    return any(
        methods is None or any(_Code(_globals_of(base), method, cls, name).writes() for method in methods)
        for base, methods in ((base, methods_in_passes(base)) for base in bases)
    )


@functools.cache
def methods_in_passes(cls: Any) -> list[ast.AST] | None:
    """The methods of ``cls`` itself that may run in a pass; None without a source."""
    if not any(inspect.isfunction(each) for each in vars(cls).values()):
        return []
    tree = _tree(cls)
    if tree is None:
        return None
    methods = [node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    return [method for method in methods if not method.name.lstrip("_").startswith(_OUTSIDE_OF_PASSES)]


def _tree(found: Any) -> ast.AST | None:
    """The source of a class or a function; None without one."""
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(found))).body[0]
    except (OSError, TypeError, SyntaxError):
        return None


def _globals_of(cls: Any) -> dict[str, Any]:
    return vars(sys.modules.get(cls.__module__, builtins))


_under_way: set[Any] = set()


@functools.cache
def _function_writes(function: Any, cls: Any, position: int | str) -> bool:
    """Whether a function, or a method of ``cls``, may write its argument at ``position``, or of this name."""
    function = inspect.unwrap(function)
    if not inspect.isfunction(function):
        return True
    if (function, position) in _under_way:  # a function that calls itself
        return False
    tree = _tree(function)
    if not isinstance(tree, ast.FunctionDef):
        return True
    names = [each.arg for each in (*tree.args.posonlyargs, *tree.args.args)]
    if isinstance(position, str):
        names += [each.arg for each in tree.args.kwonlyargs]
        argument = position if position in names else None
    else:
        argument = names[position] if position < len(names) else None
    if argument is None:
        return True
    _under_way.add((function, position))
    try:
        return _Code(function.__globals__, tree, cls, None, argument).writes()
    finally:
        _under_way.discard((function, position))


class _Code:
    """A method of ``cls`` or a function, read for what it does with ``self.<name>``, or with a variable."""

    def __init__(
        self, around: dict[str, Any], code: ast.AST, cls: Any, name: str | None, variable: str | None = None
    ) -> None:
        self._cls, self._name, self._globals = cls, name, around
        self._nodes = list(ast.walk(code))
        self._aliases: set[str] = set() if variable is None else {variable}
        self._locals = {n.id for n in self._nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        self._locals |= {n.arg for n in self._nodes if isinstance(n, ast.arg)}
        self._imported = {
            each.asname or each.name: node.module or ""
            for node in self._nodes
            if isinstance(node, ast.ImportFrom)
            for each in node.names
        }
        imports = (node for node in self._nodes if isinstance(node, ast.Import))
        self._imported |= {(each.asname or each.name).partition(".")[0]: each.name for n in imports for each in n.names}
        self._learn()

    def writes(self) -> bool:
        return any(map(self._writes, self._nodes))

    def _learn(self) -> None:
        """Find the variables that may be the parameter; one may be made of another one further below, in a loop."""
        found = -1
        while found < len(self._aliases):
            found = len(self._aliases)
            for node in self._nodes:
                loops = isinstance(node, (ast.For, ast.comprehension))
                if not loops and not isinstance(node, (ast.Assign, ast.AnnAssign, ast.NamedExpr)):
                    continue
                if self._is(node.iter if loops else node.value):  # type: ignore[attr-defined]
                    targets = node.targets if isinstance(node, ast.Assign) else [node.target]  # type: ignore[attr-defined]
                    self._aliases |= {n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name)}

    def _is(self, node: ast.AST | None) -> bool:
        """Whether the expression may be the parameter or a view of it."""
        if isinstance(node, ast.Name):
            return node.id in self._aliases
        if isinstance(node, ast.Attribute):
            own = isinstance(node.value, ast.Name) and node.value.id == "self" and node.attr == self._name
            return own or self._is(node.value)
        if isinstance(node, (ast.Subscript, ast.Starred, ast.NamedExpr)):
            return self._is(node.value)
        if isinstance(node, ast.Call):
            return isinstance(node.func, ast.Attribute) and self._is(node.func.value)
        if isinstance(node, ast.IfExp):
            return self._is(node.body) or self._is(node.orelse)
        if isinstance(node, ast.BoolOp):
            return any(map(self._is, node.values))
        return isinstance(node, (ast.Tuple, ast.List)) and any(map(self._is, node.elts))

    def _writes(self, node: ast.AST) -> bool:
        if isinstance(node, ast.Call):
            return self._call_writes(node)
        if isinstance(node, ast.AugAssign):
            return self._is(node.target)
        if isinstance(node, ast.Assign):
            into = [target for target in node.targets if isinstance(target, (ast.Attribute, ast.Subscript))]
            return bool(into) and (self._is(node.value) or any(self._is(target.value) for target in into))
        return False

    def _call_writes(self, call: ast.Call) -> bool:
        if any(self._is(each.value) for each in call.keywords if each.arg == "out"):
            return True
        given: list[int | str] = [i for i, each in enumerate(call.args) if self._is(each)]
        given += [each.arg or "**" for each in call.keywords if self._is(each.value)]
        if isinstance(call.func, ast.Attribute) and self._is(call.func.value):
            return _is_in_place(call.func.attr)
        if not given:
            return False
        if isinstance(call.func, ast.Name):
            name = call.func.id
            if name in self._locals:
                return True
            if name in self._imported:
                return self._imported[name].partition(".")[0] not in _READ or _is_in_place(name)
            found = self._globals.get(name, getattr(builtins, name, None))
            # What has no name here was not imported, and cannot run.
            return found is not None and self._passed_on(found, name, given)
        if not isinstance(call.func, ast.Attribute):
            return True
        method, owner = call.func.attr, call.func.value
        if isinstance(owner, ast.Name) and owner.id == "self" and self._cls is not None:
            found = getattr(self._cls, method, None)  # None for a module
            shifted = [i + 1 if isinstance(i, int) else i for i in given]
            return found is not None and any(_function_writes(found, self._cls, each) for each in shifted)
        while isinstance(owner, ast.Attribute):
            owner = owner.value
        if not isinstance(owner, ast.Name) or owner.id in self._locals:
            return False  # a method of another tensor
        if owner.id in self._imported:
            return self._imported[owner.id].partition(".")[0] not in _READ or _is_in_place(method)
        found = self._globals.get(owner.id)
        return inspect.ismodule(found) and self._passed_on(found, method, given)

    def _passed_on(self, found: Any, name: str, given: list[int | str]) -> bool:
        """Whether ``found``, a function of this name or the module that has it, may write what it is given."""
        package = found.__name__ if inspect.ismodule(found) else getattr(found, "__module__", None) or "builtins"
        if package.partition(".")[0] in _READ:
            return _is_in_place(name)
        function = getattr(found, name, None) if inspect.ismodule(found) else found
        return any(_function_writes(function, None, each) for each in given)


def _is_in_place(method: str) -> bool:
    return method.endswith("_") and not method.endswith("__")
