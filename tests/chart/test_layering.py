"""The package's imports only go down the house of the design."""

import ast
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import nemo_lowprec

ROOT = Path(nemo_lowprec.__file__).parent
COLUMNS = {"compute", "comm", "weights", "grads", "optim"}
FLOORS = [
    {"chart", "arguments", "column", "compat", "extras", "formats", "lazy", "lines", "observers", "quiet"},
    {"kernels"},
    {"tensors"},
    COLUMNS,
    {"engine"},
    {"checkpoint"},
    {"megatron"},
    {"plugins", "loops", "msamp", "accelerate", "transformers"},
    {"strategies"},
    {"models", "data", "report"},
    {"recipes", "run_arguments", "cli", "conf", "train", "display", "checks", "migrate"},
]
FLOOR = {name: height for height, names in enumerate(FLOORS) for name in names}


def part_of(path: Path) -> str:
    relative = path.relative_to(ROOT)
    return relative.parts[0] if len(relative.parts) > 1 else relative.stem


def imports(path: Path) -> set[str]:
    """Parts of the package that a file imports, anywhere in it (annotations' imports included)."""
    parts = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            names = [f"{node.module}.{alias.name}" if node.module == "nemo_lowprec" else node.module or "" for alias in
                     node.names]  # fmt: skip
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", None) == "import_module":
            names = [a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
        parts |= {name.split(".")[1] for name in names if name.startswith("nemo_lowprec.")}
    return parts


FILES = sorted(p for p in ROOT.rglob("*.py") if p != ROOT / "__init__.py")


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_go_down_the_house(path):
    part = part_of(path)
    assert part in FLOOR, f"{part} has no place in the house"
    for other in imports(path) - {part}:
        # A name of the root package (a level, a version) comes from the chart or is loaded when it is asked for.
        if other not in FLOOR:
            assert not (ROOT / other).exists() and not (ROOT / f"{other}.py").exists(), f"{other} has no place"
            continue
        assert FLOOR[other] <= FLOOR[part], f"{part} imports {other}, which stands above it"
        assert not {part, other} <= COLUMNS, f"the columns {part} and {other} import each other"


def files_imported(path: Path) -> set[Path]:
    """Files of the package that a file names in an import, anywhere in it."""
    files = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("nemo_lowprec"):
            module = ROOT.parent / Path(*str(node.module).split("."))
            files.add(module.with_suffix(".py"))
            for alias in node.names:  # a file of the package, or a name in its __init__
                file = module / f"{alias.name}.py"
                files.add(file if file.exists() else module / "__init__.py")
    return files & set(FILES)


def test_no_files_import_each_other_in_a_circle():
    graph = {path: files_imported(path) - {path} for path in FILES}
    assert sum(map(len, graph.values())) > 500
    TopologicalSorter(graph).prepare()  # raises a CycleError that names the files


def test_the_rows_import_nothing_of_ours():
    assert imports(ROOT / "chart" / "rows.py") == set()


@pytest.mark.parametrize("path", sorted((ROOT / "chart").glob("*.py")), ids=lambda p: p.name)
def test_arguments_of_rows_import_checks_of_values_and_words_only(path):
    assert imports(path) <= {"arguments", "chart", "lines"}
    assert imports(ROOT / "arguments.py") == imports(ROOT / "lines.py") == set()


def test_every_file_was_looked_at():
    assert {"chart", "formats", "compute", "weights", "grads", "engine", "plugins"} <= {part_of(p) for p in FILES}


def test_the_chart_loads_neither_lightning_nor_optional_packages():
    heavy = ["lightning", "transformers", "transformer_engine", "megatron", "nemo_run", "triton", "hydra"]
    code = f"import sys, nemo_lowprec; print([m for m in {heavy!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_what_a_command_line_is_checked_with_loads_no_torch():
    modules = "nemo_lowprec.chart.options, nemo_lowprec.run_arguments, nemo_lowprec.conf.app"
    code = f"import sys, {modules}; print([m for m in ('torch', 'lightning', 'transformers') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def loaded_at_import(path: Path) -> set[str]:
    """Packages that a file imports as soon as it is imported itself."""
    packages = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            packages |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            packages.add((node.module or "").split(".")[0])
    return packages


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_optional_packages_are_imported_where_they_are_used(path):
    loaded = loaded_at_import(path)
    assert "transformer_engine" not in loaded
    if not path.name.startswith("triton_"):  # loaded by name where there is Triton
        assert "triton" not in loaded
    if part_of(path) == "compat":  # a file for each package, loaded by those who have loaded the package
        assert not loaded & {"lightning", "transformers", "nemo_run", "hydra", "megatron"} - {path.stem}
    elif FLOOR[part_of(path)] < FLOOR["plugins"]:
        assert not loaded & {"lightning", "transformers", "nemo_run", "hydra"}
        # Of the part that is Megatron-core's, these are what others load.
        loaded_by_others = ("__init__", "settings", "parallel", "requirements", "nemo")
        engine = part_of(path) == "megatron" and path.stem not in loaded_by_others
        assert engine or "megatron" not in loaded
