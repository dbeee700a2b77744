"""Tables of the numbers of samples."""

from __future__ import annotations

import numpy as np

from nemo_lowprec.report.monitor.run_table import Table, sampled, table_of

FIRST, SECOND, THIRD = ("first", "input"), ("second", "input"), ("third", "input")


def table() -> Table:
    """Of two samples that have one row in common."""
    return table_of(
        [
            sampled([FIRST, SECOND], {"sqnr": [30.5, None]}),
            sampled([SECOND, THIRD], {"sqnr": [20.25, 10.0], "amax": [2.0, 4.0]}),
        ]
    )


def test_each_row_has_a_number_of_each_sample_or_none() -> None:
    found = table()
    assert found.rows == [FIRST, SECOND, THIRD]
    assert found.metrics == {
        "sqnr": {FIRST: [30.5, None], SECOND: [None, 20.25], THIRD: [None, 10.0]},
        "amax": {FIRST: [None, None], SECOND: [None, 2.0], THIRD: [None, 4.0]},
    }
    assert found.of("amax", THIRD) == [None, 4.0]
    np.testing.assert_array_equal(found.matrix("sqnr"), [[30.5, np.nan], [np.nan, 20.25], [np.nan, 10.0]])


def test_the_numbers_of_a_row_can_be_replaced() -> None:
    found = table()
    found.metrics["sqnr"][SECOND] = [None, 1.5]
    assert found.of("sqnr", SECOND) == [None, 1.5] and found.of("sqnr", THIRD) == [None, 10.0]
    np.testing.assert_array_equal(found.matrix("sqnr")[1], [np.nan, 1.5])


def test_a_matrix_has_the_rows_of_its_table_and_is_a_copy() -> None:
    found = table()
    found.rows.remove(SECOND)
    found.matrix("amax")[:] = 0
    np.testing.assert_array_equal(found.matrix("amax"), [[np.nan, np.nan], [np.nan, 4.0]])


def test_samples_without_rows_make_an_empty_table() -> None:
    assert table_of([sampled([], {"sqnr": []})]) == table_of([]) == Table()
