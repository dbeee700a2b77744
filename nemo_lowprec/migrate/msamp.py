"""MS-AMP's package, whose names ``nemo_lowprec.msamp`` has."""

from __future__ import annotations

import importlib
from functools import partial
from typing import Any

import libcst as cst

from nemo_lowprec.migrate.script import Notes, Script, dotted

_NEW = "nemo_lowprec.msamp"


def find(script: Script) -> None:
    """Look for imports of MS-AMP, and for its names; all of them are migrated or none."""
    statements = script.imports("msamp")
    for call in script.all(cst.Call):
        if script.text(call.func).rpartition(".")[2] in ("import_module", "__import__", "find_spec") and call.args:
            named = call.args[0].value
            if isinstance(named, cst.SimpleString) and str(named.evaluated_value).split(".")[0] == "msamp":
                script.obstacles.append((call, "msamp is imported by its name as text; import nemo_lowprec.msamp."))
    if not statements:
        return
    obstacles = _unknown(script, statements)
    lines = []
    for statement in statements:
        line = script.parent(statement)
        if isinstance(statement.names, cst.ImportStar):
            obstacles.append((statement, "import * does not show which names of msamp the script uses."))
        elif not (isinstance(line, cst.SimpleStatementLine) and len(line.body) == 1):
            obstacles.append((statement, "Several statements are in this line; import msamp in a line of its own."))
        else:
            lines.append((line, statement))
    if obstacles:
        script.obstacles += obstacles
        return
    seen: set[tuple[Any, str]] = set()
    for line, statement in lines:
        new = []
        for text in _imports(statement):
            if not text or (script.parent(line), text) not in seen:
                seen.add((script.parent(line), text))
                new.append(text)
        script.change.edits[line] = partial(_lines, new)


def _unknown(script: Script, statements: list[cst.Import | cst.ImportFrom]) -> Notes:
    """Places that use a name of MS-AMP that ``nemo_lowprec.msamp`` does not have, and why."""
    found: Notes = []
    inside = set()
    for statement in statements:
        if isinstance(statement, cst.ImportFrom):
            assert statement.module is not None
            names = [] if isinstance(statement.names, cst.ImportStar) else [dotted(a.name) for a in statement.names]
            places = [f"{dotted(statement.module)}.{name}" for name in names] or [dotted(statement.module)]
        else:
            places = [name for alias in statement.names if (name := dotted(alias.name)).split(".")[0] == "msamp"]
        found += [(statement, missing) for place in places if (missing := _missing(place))]
    for node in script.all(cst.Attribute):
        name = script.name(node)
        if node in inside or not name.startswith("msamp."):
            continue
        inner: cst.CSTNode = node
        while isinstance(inner, cst.Attribute):
            inner = inner.value
            inside.add(inner)
        if missing := _missing(name):
            found.append((node, missing))
    return found


def _missing(name: str) -> str:
    """Why ``nemo_lowprec`` has no module, class or function of a name such as ``msamp.initialize``; empty if it has."""
    try:
        found: Any = importlib.import_module(_NEW)
        path = _NEW
        for part in name.split(".")[1:]:
            path = f"{path}.{part}"
            try:
                found = getattr(found, part)
            except AttributeError:
                found = importlib.import_module(path)
    except ModuleNotFoundError:
        return f"nemo_lowprec has no {name}."
    except ImportError as error:  # with a sentence that says what to do
        return str(error)
    return ""


def _imports(statement: cst.Import | cst.ImportFrom) -> list[str]:
    """The import statements that take the place of one of MS-AMP's; empty text: the statement itself."""
    if isinstance(statement, cst.ImportFrom):
        return [""]
    texts = []
    for alias in statement.names:
        module = dotted(alias.name)
        given = f" as {dotted(alias.asname.name)}" if alias.asname is not None else ""  # type: ignore[arg-type]
        if module.split(".")[0] != "msamp":
            texts.append(f"import {module}{given}")
        elif given and "." in module:
            parent, _, name = module.rpartition(".")
            texts.append(f"from nemo_lowprec.{parent} import {name}{given}")
        else:  # ``import msamp.optim`` binds msamp
            texts.append(f"from nemo_lowprec import msamp{given}")
    return texts


def _lines(texts: list[str], old: cst.SimpleStatementLine) -> Any:
    if texts == [""]:
        statement = old.body[0]
        assert isinstance(statement, cst.ImportFrom) and statement.module is not None
        module = cst.parse_expression(f"nemo_lowprec.{dotted(statement.module)}")
        return old.with_changes(body=[statement.with_changes(module=module)])
    if not texts:
        return cst.RemoveFromParent()
    first, *more = [cst.parse_statement(text) for text in texts]
    assert isinstance(first, cst.SimpleStatementLine)
    line = old.with_changes(body=first.body)
    return cst.FlattenSentinel([line, *more]) if more else line
