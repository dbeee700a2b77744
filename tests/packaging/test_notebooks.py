"""The notebooks of docs/ run from the first cell to the last, and hold the outputs of such a run."""

from __future__ import annotations

import re

import nbformat
import pytest
from nbclient import NotebookClient
from nbformat import NotebookNode

from tests.documents import DOCS, ROOT
from tests.processes import of_a_shell

NOTEBOOKS = sorted((DOCS / "notebooks").glob("*.ipynb"))


def code_of(notebook: NotebookNode) -> list[NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def kinds_of(cell: NotebookNode) -> list[str]:
    """How a cell answers: by text, on stderr, or by a picture."""
    return sorted({out.get("name") or max(out.get("data", {"error": ""})) for out in cell.outputs})


def text_of(cells: list[NotebookNode]) -> str:
    return "".join(out.get("text", "") for cell in cells for out in cell.outputs)


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[NotebookNode]]:
    """The code cells of each notebook after a run.

    One kernel runs all, as their imports take longer than their cells; names of one notebook are gone in the next.
    """
    folder = tmp_path_factory.mktemp("notebooks")
    notebooks = {path.stem: nbformat.read(path, as_version=4) for path in NOTEBOOKS}
    every = nbformat.v4.new_notebook()
    for notebook in notebooks.values():
        every.cells += [*code_of(notebook), nbformat.v4.new_code_cell("%reset -f")]
    client = NotebookClient(every, timeout=120, resources={"metadata": {"path": str(folder)}}, record_timing=False)
    client.execute(env=of_a_shell(PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1"))
    return {name: code_of(notebook) for name, notebook in notebooks.items()}


@pytest.fixture(scope="module")
def stored() -> dict[str, list[NotebookNode]]:
    return {path.stem: code_of(nbformat.read(path, as_version=4)) for path in NOTEBOOKS}


@pytest.mark.parametrize("name", [path.stem for path in NOTEBOOKS])
def test_the_stored_outputs_are_those_of_a_whole_run(
    name: str, ran: dict[str, list[NotebookNode]], stored: dict[str, list[NotebookNode]]
) -> None:
    assert [cell.source for cell in stored[name]] == [cell.source for cell in ran[name]]
    assert [cell.execution_count for cell in stored[name]] == list(range(1, len(stored[name]) + 1))
    assert [kinds_of(cell) for cell in stored[name]] == [kinds_of(cell) for cell in ran[name]]
    assert not any("stderr" in kinds_of(cell) or "error" in kinds_of(cell) for cell in stored[name])


def test_fine_tuning_in_fp8_is_as_good_as_in_bf16(ran: dict[str, list[NotebookNode]]) -> None:
    said = text_of(ran["vision_fine_tuning"])
    before, fp8, bf16, saved = map(float, re.findall(r"\b0\.\d{3}\b", said))
    assert before < 0.6 < 0.7 < fp8 and abs(fp8 - bf16) < 0.1 and saved == fp8, said


def test_no_layer_of_the_language_model_is_warned_of(ran: dict[str, list[NotebookNode]]) -> None:
    said = text_of(ran["language_model_and_report"])
    assert "samples at steps [2, 4, 8, 12, 16, 20, 24]" in said and "warnings of the monitor: 0" in said
