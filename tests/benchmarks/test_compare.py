"""Figures of a comparison, read from the folders of its runs."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.compare import figures, main
from benchmarks.record import RESULTS, read
from nemo_lowprec.report.monitor.run_writer import FILE
from nemo_lowprec.report.monitor.runs import read_run
from nemo_lowprec.report.page.words import size
from tests.documents import block
from tests.runs import write_run

LEVELS = ("bf16_mixed", "msamp_o2")


def changed(folder: Path, old: str, new: str) -> None:
    """Change the first record of a run."""
    file = folder / FILE
    text = file.read_text()
    assert old in text.splitlines()[0]
    file.write_text(text.replace(old, new, 1))


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    """Two levels with two seeds each, as ``compare`` trains them."""
    found = [write_run(tmp_path / f"{level}_{seed}", level, seed=seed) for level in LEVELS for seed in (4, 7)]
    for folder in found:
        changed(folder, "pretrain ", f"pretrain output_dir={folder} monitor=on ckpt_path=last ")
    return found


def test_a_file_of_results_is_written_from_runs(
    folders: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "results.jsonl"
    monkeypatch.setattr(sys, "argv", ["compare", *map(str, folders), "--out", str(out)])
    main()
    (origin,), lines = read(out)
    assert origin["command"] == "nemo-lowprec compare model=llama_100m precision=bf16_mixed,msamp_o2 seeds=4,7"
    assert (origin["gpu"], origin["gpus"], origin["date"]) == ("NVIDIA H200", 1, "2026-11-27")
    assert origin["versions"] == read_run(folders[0]).about["versions"]
    runs = [read_run(folder) for folder in folders]
    reference, other = lines
    assert [line["level"] for line in lines] == list(LEVELS) and reference["gap"] is None
    assert other["val_losses"] == [run.val_losses[-1][1] for run in runs[2:]]
    assert other["val_loss"] == pytest.approx(sum(other["val_losses"]) / 2)
    gaps = [b - a for a, b in zip(reference["val_losses"], other["val_losses"], strict=True)]
    assert other["gap"] == pytest.approx(sum(gaps) / 2) and other["gap_half_interval"] > 0
    assert other["tokens_per_second"] == pytest.approx(sum(other["tokens_per_second_of_runs"]) / 2)
    lost = [np.median(run.params.matrix("lost")[:, -1]) for run in runs[2:]]
    assert other["lost_percent"] == pytest.approx(sum(lost) / 2)
    assert other["peak_bytes"] == runs[2].peak_bytes and other["seeds"] == [4, 7]


def test_runs_that_have_no_common_origin_are_refused(folders: list[Path]) -> None:
    changed(folders[1], '"torch":"2.13.0"', '"torch":"2.11.0"')
    with pytest.raises(ValueError, match="differ in their versions"):
        figures(folders)
    changed(folders[1], '"torch":"2.11.0"', '"torch":"2.13.0"')
    changed(folders[3], " monitor=on", "")
    with pytest.raises(ValueError, match="compare has not trained all of the runs"):
        figures(folders)


def test_runs_without_a_validation_at_the_same_step_are_refused(folders: list[Path]) -> None:
    write_run(folders[0], "bf16_mixed", steps=300, seed=4)
    with pytest.raises(ValueError, match="no validation loss at the same step"):
        figures(folders)


def test_the_table_in_the_documents_has_the_figures_of_the_results() -> None:
    printed = block("watching.rst", "Levels beside bf16_mixed").code
    table, said = printed.split("\nbf16_with_fp8_mixed: ")
    _, lines = read(RESULTS / "compare_h200.jsonl")
    shown = [re.split(r"\s+", row) for row in table.splitlines() if re.search(r" \d\.\d{4} ", row)]
    assert len(shown) == len(lines) == 5
    halves = iter(re.findall(r"±(\d\.\d{4})", table))
    for row, line in zip(shown, lines, strict=True):
        gap, band = line["gap"], line["leaves_band"]
        wanted = [str(len(line["seeds"])), f"{line['val_loss']:.4f}", "–" if gap is None else f"{gap:+.4f}"]
        wanted += ["–" if band is None else str(band), f"{line['tokens_per_second']:,.0f}"]
        wanted += [*size(line["peak_bytes"]).split(), f"{line['bytes_per_param']:.2f}"]
        assert line["level"].startswith(row[0]) and row[1:] == wanted
        assert gap is None or next(halves) == f"{line['gap_half_interval']:.4f}"
    for line in lines[1:]:
        assert f"The loss is {line['gap']:+.4f} ± {line['gap_half_interval']:.4f} beside" in " ".join(said.split())
