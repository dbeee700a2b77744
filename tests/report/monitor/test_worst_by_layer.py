"""The worst operand of each layer by sample, thinned."""

from itertools import pairwise

import torch

from nemo_lowprec.report.monitor.sample import Sample
from nemo_lowprec.report.monitor.worst_by_layer import LOWEST_IS_WORST, WorstByLayer


def sample(step, rows, sqnr, underflow=None):
    numbers = torch.tensor(sqnr, dtype=torch.float64)
    others = numbers if underflow is None else torch.tensor(underflow, dtype=torch.float64)
    return Sample(step, rows, {"sqnr": numbers, "underflow": others, "saturation": others})


def test_a_layer_has_its_worst_operand_in_each_sample():
    rows, worst = [("a", "input"), ("a", "weight"), ("b", "input")], WorstByLayer()
    worst.add(sample(2, rows, [31.0, 12.0, float("nan")], [1.0, 7.0, 0.0]))
    worst.add(sample(50, rows, [9.0, float("nan"), 30.0], [5.0, 3.0, 2.0]))
    names, sqnr = worst.table("sqnr")
    assert names == ["a", "b"] and worst.steps == [2, 50]
    assert sqnr[0].tolist() == [12.0, 9.0] and sqnr[1].isnan().tolist() == [True, False] and sqnr[1, 1] == 30.0
    assert worst.table("underflow")[1].tolist() == [[7.0, 5.0], [0.0, 2.0]]


def test_a_layer_that_comes_later_has_no_numbers_before():
    worst = WorstByLayer()
    worst.add(sample(2, [("a", "input")], [31.0]))
    worst.add(sample(4, [("a", "input"), ("b", "input")], [30.0, 20.0]))
    names, sqnr = worst.table("sqnr")
    assert names == ["a", "b"] and sqnr[1].isnan().tolist() == [True, False]


def test_a_long_run_keeps_its_worst_numbers_in_200_columns():
    generator, worst, seen = torch.Generator().manual_seed(0), WorstByLayer(), []
    for step in range(1, 1200):
        numbers = torch.rand(3, generator=generator, dtype=torch.float64)
        seen.append(numbers)
        worst.add(sample(step, [("a", "input"), ("b", "input"), ("c", "input")], numbers.tolist()))
        assert len(worst.steps) <= 200
    whole = torch.stack(seen, dim=1)
    ends = [*(step - 1 for step in worst.steps[1:]), 1199]
    widths = {after - first for first, after in pairwise(worst.steps)}
    assert worst.steps[0] == 1 and len(worst.steps) > 100 and widths == {8}
    for metric, lowest in LOWEST_IS_WORST.items():
        parts = [whole[:, first - 1 : end] for first, end in zip(worst.steps, ends, strict=True)]
        wanted = torch.stack([part.amin(1) if lowest else part.amax(1) for part in parts], dim=1)
        assert torch.equal(worst.table(metric)[1], wanted), metric


def test_neighbours_of_many_layers_share_a_row():
    rows, worst = [(f"layers.{i}", "input") for i in range(2500)], WorstByLayer()
    numbers = torch.rand(2500, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    worst.add(sample(2, rows, numbers.tolist()))
    names, sqnr = worst.table("sqnr")
    assert len(names) == len(sqnr) == 834 and names[1] == "layers.3"
    assert sqnr[0, 0] == numbers[:3].min() and sqnr[-1, 0] == numbers[2499:].min()
    assert worst.table("underflow")[1][5, 0] == numbers[15:18].max()
