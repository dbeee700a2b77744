"""The documents' tables: made from the results, and figures that are set beside each other compare like with like."""

from __future__ import annotations

import re

import pytest

from benchmarks.tables import DOCUMENTS, fill, headline_rows

ATTENTION = re.compile(r"(cuDNN|torch's) attention")
MILLISECONDS = re.compile(r"\d ms\b")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_tables_are_those_of_the_results(document):
    assert fill(document.read_text()) == document.read_text()


def test_a_ratio_of_whole_steps_is_of_two_with_the_same_attention():
    rows = [row for row in headline_rows() if row[0].startswith("Whole step") and "Megatron" not in row[0]]
    assert len(rows) >= 3
    for figure, ours, other, ratio in rows:
        kinds = [ATTENTION.search(side) for side in (ours, other)]
        assert all(kinds), f"{figure}: both sides state their attention"
        assert all("head in" in side and MILLISECONDS.search(side) for side in (ours, other)), figure
        assert (kinds[0][0] == kinds[1][0]) == ("as fast" in ratio), f"{figure}: {ratio}"


def test_what_memory_costs_in_time_is_said_beside_it():
    rows = [row for row in headline_rows() if row[0].startswith("Peak memory")]
    assert len(rows) == 2
    for _, ours, other, ratio in rows:
        times = [int(re.search(r"(\d+) ms a step", side)[1]) for side in (ours, other)]
        said = re.fullmatch(r"[\d.]+ % saved, ([\d.]+) × the time", ratio)
        assert float(said[1]) == pytest.approx(times[0] / times[1], abs=0.02)


def test_every_ratio_of_steps_states_both_times():
    for figure, ours, other, ratio in headline_rows():
        if "as fast" in ratio:
            assert MILLISECONDS.search(ours) and MILLISECONDS.search(other), figure
