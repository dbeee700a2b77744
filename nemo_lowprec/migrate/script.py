"""A parsed script: names, values that are known before the script runs, and the changes that are found for it."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import libcst as cst
from libcst import metadata

Edit = Callable[[Any], Any]
Notes = list[tuple[cst.CSTNode, str]]
Kind = TypeVar("Kind", bound=cst.CSTNode)


class Obstacle(Exception):
    """A place of a script cannot be migrated.

    Attributes:
        node: the place.
    """

    def __init__(self, node: cst.CSTNode, sentence: str) -> None:
        super().__init__(sentence)
        self.node = node


@dataclass
class Change:
    """What migrates one place of a script, all or nothing.

    Attributes:
        edits: for a node of the script the function that makes the new node from the old one, whose children are edited
            already.
        imports: (module, name) for ``from module import name``; (module, None) for ``import module``.
        notes: places and sentences about what is different after the migration.
    """

    edits: dict[cst.CSTNode, Edit] = field(default_factory=dict)
    imports: dict[tuple[str, str | None], None] = field(default_factory=dict)
    notes: Notes = field(default_factory=list)

    def add(self, other: Change) -> None:
        """Add the edits, imports and notes of ``other``."""
        self.edits |= other.edits
        self.imports |= other.imports
        self.notes += other.notes


class Script:
    """A script and the changes that the frameworks' files have found for it.

    Args:
        source: the bytes of the file.

    Raises:
        ValueError: the source is not UTF-8 or no Python, or an expression is nested too deeply.
    """

    def __init__(self, source: bytes) -> None:
        try:
            source.decode("utf-8")
            self._wrapper = wrapper = metadata.MetadataWrapper(cst.parse_module(source))
            found: Any = wrapper.resolve_many([metadata.ScopeProvider, metadata.ParentNodeProvider])
        except UnicodeDecodeError as error:
            raise ValueError(f"byte {error.start} is not UTF-8") from None
        except cst.ParserSyntaxError as error:
            raise ValueError(f"line {error.raw_line} is not Python") from None
        except SyntaxError as error:  # the encoding that the first lines declare
            raise ValueError(str(error)) from None
        except RecursionError:
            raise ValueError("an expression is nested too deeply") from None
        self.module = wrapper.module
        self._scopes, self._parents = found[metadata.ScopeProvider], found[metadata.ParentNodeProvider]
        self.change = Change()
        self.obstacles: Notes = []
        self.nodes = list(_walk(self.module))

    # The text

    def all(self, kind: type[Kind]) -> Iterator[Kind]:
        """The nodes of a class, in the order of the script."""
        return (node for node in self.nodes if isinstance(node, kind))

    def text(self, node: cst.CSTNode) -> str:
        """The source text of ``node``."""
        return self.module.code_for_node(node)

    def line(self, node: cst.CSTNode) -> int:
        """The line on which ``node`` starts."""
        position: Any = self._wrapper.resolve(metadata.PositionProvider)[node]
        return int(position.start.line)

    def parent(self, node: cst.CSTNode) -> cst.CSTNode:
        """The node that holds ``node``."""
        parent: cst.CSTNode = self._parents[node]
        return parent

    # Names

    def name(self, node: cst.CSTNode) -> str:
        """The dotted name that an import gives ``node``, such as ``lightning.pytorch.Trainer``; else empty."""
        found: Any = self._wrapper.resolve(metadata.QualifiedNameProvider).get(node, ())
        names = found() if callable(found) else found
        return next((n.name for n in names if n.source is metadata.QualifiedNameSource.IMPORT), "")

    def imports(self, package: str) -> list[cst.Import | cst.ImportFrom]:
        """The import statements that name ``package`` or a module of it."""
        found: list[cst.Import | cst.ImportFrom] = []
        for node in self.nodes:
            if isinstance(node, cst.Import):
                names = [dotted(alias.name) for alias in node.names]
            elif isinstance(node, cst.ImportFrom) and node.module is not None and not node.relative:
                names = [dotted(node.module)]
            else:
                continue
            if any(name.split(".")[0] == package for name in names):
                found.append(node)
        return found

    def binds(self, name: str) -> bool:
        """Whether the script itself assigns, defines or imports ``name``."""
        return any(name in scope for scope in self.scopes if not isinstance(scope, metadata.BuiltinScope))

    @property
    def scopes(self) -> list[metadata.Scope]:
        """Module, classes and functions of the script."""
        return list(dict.fromkeys(s for s in self._scopes.values() if s is not None))

    def definition(self, node: cst.CSTNode) -> cst.Assign | None:
        """The statement that alone assigns a variable, or None."""
        scope = self._scopes.get(node)
        if not isinstance(node, cst.Name) or scope is None:
            return None
        assigned = list(scope[node.value])
        if len(assigned) != 1 or not isinstance(assigned[0], metadata.Assignment):
            return None
        return self._assign_of(assigned[0])

    def _assign_of(self, assignment: metadata.Assignment) -> cst.Assign | None:
        target = self._parents.get(assignment.node)
        statement = self._parents.get(target) if isinstance(target, cst.AssignTarget) else None
        return statement if isinstance(statement, cst.Assign) and len(statement.targets) == 1 else None

    def users(self, definition: cst.Assign) -> int:
        """The number of places that read the variable of a definition."""
        target: Any = definition.targets[0].target
        return sum(len(assignment.references) for assignment in self._scopes[target][target.value])

    def resolve(self, node: cst.BaseExpression) -> cst.BaseExpression:
        """The expression that ``node`` stands for, where ``node`` is a variable that is assigned once."""
        definition = self.definition(node)
        return node if definition is None else self.resolve(definition.value)

    def value(self, node: cst.BaseExpression) -> Any:
        """The value of a literal, or of a variable that is a literal.

        Raises:
            Obstacle: the value is known only when the script runs.
        """
        resolved = self.resolve(node)
        try:
            return ast.literal_eval(self.text(resolved).strip())
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            raise Obstacle(node, f"{self.short(node)} is known only when the script runs.") from None

    def short(self, node: cst.CSTNode) -> str:
        """The text of ``node`` in one line of at most 60 characters, for messages."""
        text = " ".join(self.text(node).split())
        return text if len(text) <= 60 else f"{text[:57]}..."

    def keywords(self, call: cst.Call, subject: str) -> dict[str, cst.BaseExpression]:
        """The values of the arguments of ``call`` that have a name.

        Raises:
            Obstacle: ``*arguments`` or ``**options``, in which ``subject`` may be.
        """
        for arg in call.args:
            if arg.star:
                given = f"{'*' * len(arg.star)}{self.short(arg.value)}"
                raise Obstacle(arg, f"{given} is known only when the script runs; {subject} in it is not migrated.")
        return {arg.keyword.value: arg.value for arg in call.args if arg.keyword is not None}

    def unused(self) -> dict[str, list[cst.CSTNode]]:
        """Import aliases and single assignments that no place of the script reads, by the names that they bind.

        A name that is also text of the script (in ``__all__``) counts as read.
        """
        texts = {text.evaluated_value for text in self.all(cst.SimpleString)}
        read: dict[cst.ImportAlias, bool] = {}  # an alias a.b.c makes several assignments
        found: dict[str, list[cst.CSTNode]] = {}
        for assignment in (a for scope in self.scopes for a in scope.assignments):
            is_read = bool(assignment.references) or assignment.name in texts
            if isinstance(assignment, metadata.ImportAssignment):
                node: cst.CSTNode = assignment.as_name
                while not isinstance(node, cst.ImportAlias):
                    node = self.parent(node)
                read[node] = read.get(node, False) or is_read
            elif isinstance(assignment, metadata.Assignment) and not is_read:
                statement = self._assign_of(assignment)
                line = None if statement is None else self.parent(statement)
                if isinstance(line, cst.SimpleStatementLine) and len(line.body) == 1:
                    found.setdefault(assignment.name, []).append(line)
        for alias, is_read in read.items():
            if not is_read:
                found.setdefault(_bound(alias), []).append(alias)
        return found

    # Changes

    def take(self, node: cst.CSTNode, find: Callable[..., Change | None], *args: Any) -> None:
        """Add the change that ``find`` returns for ``node``, or else the obstacle that it raises."""
        try:
            change = find(self, node, *args)
        except Obstacle as obstacle:
            self.obstacles.append((obstacle.node, str(obstacle)))
            return
        if change is None:
            return
        for module, name in change.imports:
            if name and self.binds(name) and not self.imports(module):
                self.obstacles.append((node, f"The script has a {name} of its own; give it another name first."))
                return
        self.change.add(change)


def dotted(node: cst.CSTNode) -> str:
    """``a.b.c`` for the nodes of a dotted name; empty for another expression."""
    if isinstance(node, cst.Attribute):
        return f"{dotted(node.value)}.{node.attr.value}"
    return node.value if isinstance(node, cst.Name) else ""


def names_in(node: cst.CSTNode) -> set[str]:
    """The identifiers in ``node``."""
    return {n.value for n in _walk(node) if isinstance(n, cst.Name)}


def comments_in(node: cst.CSTNode) -> list[str]:
    """The comments in ``node``, in order."""
    return [n.value for n in _walk(node) if isinstance(n, cst.Comment)]


def _bound(alias: cst.ImportAlias) -> str:
    name = alias.asname.name if alias.asname is not None else alias.name
    return dotted(name).split(".")[0]


def _walk(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    yield node
    for child in node.children:
        yield from _walk(child)
