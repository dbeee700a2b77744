"""Kernels on the time line of a step."""

import pytest

from nemo_lowprec.report.profile.kinds import COMMUNICATION
from nemo_lowprec.report.profile.layers import Kernel
from nemo_lowprec.report.profile.timeline import WAITS, matched, shares_of, sums_of

GEMM, OTHER = "gemm", "elementwise"


def kernel(start, end, layer="a", kind=GEMM, name="k"):
    return Kernel(name, kind, layer, start, end)


def test_all_parts_add_up_to_the_time_line():
    found = shares_of([
        kernel(10, 20), kernel(25, 40, "b"), kernel(35, 50, "c", OTHER),  # the last two beside each other
        kernel(0, 4, "", OTHER),
    ])  # fmt: skip
    assert found.ns == {("", OTHER): 4, ("a", WAITS): 6, ("a", GEMM): 10, ("b", WAITS): 5, ("b", GEMM): 15,
                        ("c", OTHER): 10}  # fmt: skip
    assert sum(found.ns.values()) == 50
    assert found.launches == {"": 1, "a": 1, "b": 1, "c": 1}


def test_communication_counts_where_nothing_else_runs():
    message = [kernel(5, 30, "", COMMUNICATION), kernel(45, 60, "", COMMUNICATION)]
    found = shares_of([kernel(0, 10), kernel(25, 40, "b"), *message])
    # The messages run beside a until 10, alone until 25, and alone after the wait from 40 to 45.
    assert found.ns == {("a", GEMM): 10, ("", COMMUNICATION): 15 + 15, ("b", GEMM): 15, ("", WAITS): 5}
    between = shares_of([kernel(0, 10), kernel(12, 14, "", COMMUNICATION), kernel(20, 30, "b")])
    assert between.ns == {("a", GEMM): 10, ("b", WAITS): 2 + 6, ("", COMMUNICATION): 2, ("b", GEMM): 10}
    within = shares_of([kernel(0, 40), kernel(10, 20, "", COMMUNICATION)])
    assert within.ns == {("a", GEMM): 40}


def test_no_kernels_take_no_time():
    assert shares_of([]).ns == {} and sums_of([]).ns == {}


def test_operations_of_a_cpu_are_added():
    found = sums_of([kernel(0, 5), kernel(3, 7), kernel(4, 5, "b", OTHER)])
    assert found.ns == {("a", GEMM): 9, ("b", OTHER): 1} and found.launches == {"a": 2, "b": 1}


def test_kernels_of_a_graph_take_the_layers_of_a_step_without():
    known = [kernel(0, 1, "a", name="x"), kernel(2, 3, "b", name="x"), kernel(4, 5, "b", OTHER, name="y")]
    raw = [Kernel(name, "?", "", start, start + 2) for start, name in ((10, "x"), (20, "y"), (30, "x"))]
    raw += [one._replace(start=one.start + 100, end=one.end + 100) for one in raw]
    found, share = matched(raw, known, 2)
    assert [(one.layer, one.kind) for one in found] == [("a", GEMM), ("b", OTHER), ("b", GEMM)] * 2
    assert share == 1.0


def test_kernels_of_another_number_belong_to_the_layer_around_them():
    known = [kernel(0, 1, "a", name="x"), kernel(2, 3, "a", OTHER, name="y"), kernel(4, 5, "b", OTHER, name="z")]
    raw = [Kernel(name, "?", "", 10 * i, 10 * i + 4) for i, name in enumerate(["c", "x", "c", "y", "c", "z"])]
    found, share = matched(raw, known, 1)
    assert [one.layer for one in found] == ["", "a", "a", "a", "", "b"]
    assert [one.kind for one in found] == ["?", GEMM, "?", OTHER, "?", OTHER]
    assert share == pytest.approx(4 / 6)
    twice = [*raw, *(one._replace(start=one.start + 100, end=one.end + 104) for one in raw[1:2])]
    assert [one.layer for one in matched(twice, known, 1)[0]] == ["", "", "", "a", "", "b", ""]
