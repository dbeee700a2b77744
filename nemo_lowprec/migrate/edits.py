"""Makes the new source of a script: edits of nodes, new arguments of calls, imports added and removed.

Comments of removed code go to the statement that follows, or to the end of the block.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import libcst as cst
from libcst.codemod import CodemodContext
from libcst.codemod.visitors import AddImportsVisitor

from nemo_lowprec.migrate.script import Edit, Script, comments_in, names_in

_LONGEST = 88  # letters in a line of a call

__all__ = ["argument", "edited", "with_arguments"]


def edited(script: Script) -> cst.Module:
    """The module of ``script`` after its changes, without imports and variables that only replaced code has read."""
    change = script.change
    if not change.edits:
        return script.module
    names = set().union(*(names_in(node) for node in change.edits if not isinstance(node, cst.SimpleStatementLine)))
    unused_before = {name: _texts(script, nodes) for name, nodes in script.unused().items()}
    module = _apply(script.module, change.edits)
    context = CodemodContext()
    for wanted in change.imports:
        AddImportsVisitor.add_needed_import(context, *wanted)
    module = AddImportsVisitor(context).transform_module(module)
    while True:  # a removed variable may have been the only reader of others
        script = Script(module.bytes)
        removed: dict[cst.CSTNode, Edit] = {}
        for name, nodes in script.unused().items():
            kept = unused_before.get(name, []) if name in names else _texts(script, nodes)
            removed |= {node: _remove for node in nodes if _texts(script, [node])[0] not in kept}
        if not removed:
            return module
        names |= set().union(*map(names_in, removed))
        module = _apply(script.module, removed)


def argument(keyword: str, value: cst.BaseExpression | str) -> cst.Arg:
    """A keyword argument; ``value`` may be Python's text of the value."""
    plain = cst.MaybeSentinel.DEFAULT
    return cst.Arg(
        keyword=cst.Name(keyword),
        value=cst.parse_expression(value) if isinstance(value, str) else value,
        equal=cst.AssignEqual(cst.SimpleWhitespace(""), cst.SimpleWhitespace("")),
        comma=plain,
    )


def with_arguments(call: cst.Call, args: Sequence[cst.Arg]) -> cst.Call:
    """``call`` with other arguments, in lines as ``call`` has them.

    An argument of ``call`` may be changed by ``with_changes``.
    """
    if not args:
        return call.with_changes(args=(), whitespace_before_args=cst.SimpleWhitespace(""))
    if not call.args:
        return call.with_changes(args=args)
    last = call.args[-1]
    if len(call.args) > 1:
        between: Any = call.args[0].comma
    elif isinstance(call.whitespace_before_args, cst.ParenthesizedWhitespace):
        between = cst.Comma(whitespace_after=call.whitespace_before_args)
    else:
        between = cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))
    between = _without_comment(between)
    endings = {id(arg.comma) for arg in call.args[:-1] if isinstance(arg.comma, cst.Comma)}
    placed = [
        arg.with_changes(
            comma=arg.comma if id(arg.comma) in endings else between,
            whitespace_after_arg=cst.SimpleWhitespace(""),
        )
        for arg in args[:-1]
    ]
    end = args[-1].with_changes(comma=last.comma, whitespace_after_arg=last.whitespace_after_arg)
    made = call.with_changes(args=[*placed, end])
    lines = cst.Module([]).code_for_node(made).splitlines()
    return made if max(map(len, lines)) <= _LONGEST else _in_lines(made)


def _in_lines(call: cst.Call) -> cst.Call:
    """The call with a line for each argument."""

    def line(indent: str) -> cst.ParenthesizedWhitespace:
        return cst.ParenthesizedWhitespace(indent=True, last_line=cst.SimpleWhitespace(indent))

    *first, last = call.args
    args = [arg.with_changes(comma=cst.Comma(whitespace_after=line("    "))) for arg in first]
    args.append(last.with_changes(comma=cst.Comma(whitespace_after=line(""))))
    return call.with_changes(args=args, whitespace_before_args=line("    "))


def _without_comment(comma: cst.Comma) -> cst.Comma:
    space = comma.whitespace_after
    if isinstance(space, cst.ParenthesizedWhitespace) and comments_in(space):
        line = space.first_line.with_changes(comment=None, whitespace=cst.SimpleWhitespace(""))
        return comma.with_changes(whitespace_after=space.with_changes(first_line=line, empty_lines=()))
    return comma


def _texts(script: Script, nodes: Sequence[cst.CSTNode]) -> list[str]:
    return [script.text(node).strip(" ,\n") for node in nodes]


def _remove(_: Any) -> Any:
    return cst.RemoveFromParent()


def _apply(module: cst.Module, edits: dict[cst.CSTNode, Edit]) -> cst.Module:
    return module.visit(_Apply(edits))  # type: ignore[return-value]


class _Apply(cst.CSTTransformer):
    """Applies edits, and keeps the comments of the code that they remove."""

    def __init__(self, edits: dict[cst.CSTNode, Edit]) -> None:
        super().__init__()
        self._edits = edits
        self._gone: dict[cst.CSTNode, list[cst.EmptyLine]] = {}  # placeholders of removed statements, with comments

    def on_leave(self, original: Any, updated: Any) -> Any:  # type: ignore[override]
        if isinstance(original, cst.Import | cst.ImportFrom):
            updated = self._without_names(original, updated)
        elif original in self._edits and not isinstance(original, cst.ImportAlias):
            updated = self._edits[original](updated)
        if isinstance(original, cst.SimpleStatementLine | cst.BaseCompoundStatement):
            return self._with_comments(original, updated)
        if isinstance(original, cst.Module | cst.IndentedBlock) and self._gone:
            return self._without_gone(updated)
        return updated

    def _without_names(self, original: Any, updated: Any) -> Any:
        """An import without the names that are removed; libcst has no import statement without names."""
        if isinstance(original.names, cst.ImportStar):
            return updated
        names = [new for old, new in zip(original.names, updated.names, strict=True) if old not in self._edits]
        if len(names) == len(original.names):
            return updated
        if not names:
            return cst.RemoveFromParent()
        names[-1] = names[-1].with_changes(comma=original.names[-1].comma)
        return updated.with_changes(names=names)

    def _with_comments(self, original: Any, updated: Any) -> Any:
        if isinstance(updated, cst.RemovalSentinel) or (
            isinstance(updated, cst.SimpleStatementLine) and not updated.body
        ):
            inner = original.with_changes(leading_lines=())
            place = cst.SimpleStatementLine(body=[cst.Pass()])
            self._gone[place] = [*original.leading_lines, *map(_comment_line, comments_in(inner))]
            return place
        if not isinstance(updated, cst.CSTNode):
            return updated  # several import statements in the place of one
        statement: Any = updated
        lost = Counter(comments_in(original)) - Counter(comments_in(statement))
        lines = [*statement.leading_lines, *map(_comment_line, lost.elements())]
        return statement.with_changes(leading_lines=lines) if lost else statement

    def _without_gone(self, block: Any) -> Any:
        body: list[Any] = []
        waiting: list[cst.EmptyLine] = []
        for statement in block.body:
            if statement in self._gone:
                waiting += self._gone.pop(statement)
                continue
            if waiting:
                lines = list(statement.leading_lines)
                while waiting[-1:] and lines and waiting[-1].comment is None and lines[0].comment is None:
                    waiting.pop()  # one of two blank lines that now meet
                statement = statement.with_changes(leading_lines=[*waiting, *lines])
                waiting = []
            body.append(statement)
        if not body and isinstance(block, cst.IndentedBlock):
            body.append(cst.SimpleStatementLine(body=[cst.Pass()]))
        footer = [line for line in waiting if line.comment is not None]
        return block.with_changes(body=body, footer=[*footer, *block.footer])


def _comment_line(text: str) -> cst.EmptyLine:
    return cst.EmptyLine(comment=cst.Comment(text))
