"""The heatmap of amax histories: what is drawn, and which rows of a long model."""

import torch
from rich.console import Console

from nemo_lowprec.report.inspection.amaxes import AmaxHistory
from nemo_lowprec.report.inspection.heatmap import heatmaps

LAYERS, STEPS = 40, 1024
SPOILED, OUTLIER = 17, 5


def histories(steps=STEPS):
    """40 alike layers, one with small amaxes, and one whose amax grows over the last quarter of the steps."""
    values = torch.rand(LAYERS, steps, generator=torch.Generator().manual_seed(0)) + 1
    values[SPOILED] /= 1e4
    values[OUTLIER, -steps // 4 :] *= 1e3
    return [AmaxHistory(f"model.layers.{i}.mlp", "input", tuple(row.tolist()), 1.0) for i, row in enumerate(values)]


def drawn(of, all_rows=False, colour=False):
    system = "truecolor" if colour else None
    console = Console(width=80, color_system=system, force_terminal=colour, highlight=False)
    with console.capture() as captured:
        console.print(heatmaps(of, all_rows))
    return captured.get()


def rows(text):
    return {line.split()[0]: line.split()[1] for line in text.splitlines() if ".mlp " in line}


def test_a_row_is_read_without_colours():
    text = drawn(histories())
    found = rows(text)
    assert max(map(len, text.splitlines())) <= 80
    assert set(found[f"{SPOILED}.mlp"]) == {"▁"} and found[f"{OUTLIER}.mlp"].endswith("███")
    quarter = len(found[f"{OUTLIER}.mlp"]) // 4
    assert "█" not in found[f"{OUTLIER}.mlp"][: 3 * quarter - 1]
    assert "steps a column" in text and "1,024 steps" in text


def test_what_stands_out_is_shown_in_the_model_s_order_and_the_rest_is_counted():
    text = drawn(histories())
    numbers = [int(name.partition(".")[0]) for name in rows(text)]
    assert len(numbers) == 16 and numbers == sorted(numbers) and {SPOILED, OUTLIER} <= set(numbers)
    assert "24 layers nearer to the median are left out (--all shows them)" in text
    whole = drawn(histories(), all_rows=True)
    assert len(rows(whole)) == LAYERS and "left out" not in whole


def test_colours_are_added_to_the_blocks():
    plain, coloured = drawn(histories()), drawn(histories(), colour=True)
    assert "\x1b[" not in plain and "\x1b[38;2;210;59;59m█" in coloured


def test_few_steps_equal_amaxes_and_steps_without_amax():
    short = [AmaxHistory("a.b.first", "input", (0.5, 0.5, 0.0), 1.0), AmaxHistory("a.b.second", "input", (0.5,), 1.0)]
    text = drawn(short)
    lines = {line.split()[0]: line for line in text.splitlines() if line.startswith(("first", "second"))}
    assert "▅▅·" in lines["first"] and "··▅" in lines["second"] and "5.0e-01  0.0e+00" in lines["first"]
    assert "all are zero" in drawn([AmaxHistory("a", "grad_output", (0.0, 0.0), 1.0)])


def test_layers_that_read_one_tensor_share_a_row():
    names = ["0.q_proj", "0.k_proj", "0.v_proj", "0.o_proj", "1.q_proj"]
    amaxes = [(1.0, 2.0)] * 3 + [(4.0, 8.0), (1.0, 2.0)]
    text = drawn([AmaxHistory(name, "input", own, 1.0) for name, own in zip(names, amaxes, strict=True)])
    found = [line.split(" ")[:2] for line in text.splitlines() if "_proj" in line]
    assert found == [["0.q_proj", "+2"], ["0.o_proj", ""], ["1.q_proj", ""]]
    assert "5 layers, 2 steps" in text and "+2: and the next 2 layers, with the same amaxes" in text


def test_a_long_name_keeps_its_end():
    names = [f"{'very.long.' * 5}x{i}.{'inner' * 9}.linear{i}" for i in range(2)]
    text = drawn([AmaxHistory(name, "input", (1.0, 2.0 + i), 1.0) for i, name in enumerate(names)])
    assert max(map(len, text.splitlines())) <= 80
    assert "linear0 " in text and "linear1 " in text and "…" in text
