"""The tables that the Trainer shows at its start."""

import warnings

import pytest
import torch
from support import CASES, Net, level_of, loader, plugin, train, trainer
from torch import nn


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "250")


@pytest.mark.parametrize("case", CASES)
def test_the_level_is_shown_once(case, capsys):
    train(Net(), case, data=(loader(), loader()), max_steps=2)
    shown = capsys.readouterr().out
    for title, cell in level_of(case).columns(fp8_params="fp8_params" in case).items():
        if title == "Level":  # in the heading
            continue
        assert title in shown and cell in shown
    assert shown.count(f"Precision: {level_of(case).name}(") == 1
    assert shown.count("Layers") == (1 if level_of(case).has_fp8 else 0)


def test_nothing_is_shown_for_validation_alone(capsys):
    trainer(plugin("bf16_with_fp8_mixed")).validate(Net(), loader(), verbose=False)
    assert "Precision:" not in capsys.readouterr().out


def test_layers_that_were_left_alone_are_shown_with_the_reason(capsys):
    class Various(Net):
        def __init__(self):
            super().__init__()
            self.odd = nn.Linear(30, 32)
            self.blocks = nn.ModuleList(nn.Linear(32, 32) for _ in range(5))
            self.skipped = nn.Linear(32, 32)

    train(Various(), plugin("bf16_with_fp8_mixed", skip=["skipped"]), max_steps=1)
    rows = capsys.readouterr().out.splitlines()

    def row(*cells):
        [found] = [line for line in rows if all(cell in line for cell in cells)]
        return found

    assert "7 " in row("FP8 (delayed, reference)", "inp, mid, blocks.*")
    assert "half precision" in row("a side of 30 is no multiple of 16", "odd")
    assert "half precision" in row("in skip", "skipped")
    assert "half precision" in row("the head (name it in convert to convert it)", "head")
    assert "1 " in row("norm with half output", "norm")


def test_a_model_without_linear_layers_is_said_so(capsys):
    class Nothing(Net):
        def __init__(self):
            super().__init__()
            self.inp = self.mid = nn.Identity()
            self.norm = nn.LayerNorm(32)
            self.head = nn.Linear(32, 32)

    train(Nothing(), "bf16_with_fp8_mixed", max_steps=1)
    assert "no layer of the model can be converted" in capsys.readouterr().out


class Experts(Net):
    """Most of its elements are in a matrix of three dimensions."""

    def __init__(self):
        super().__init__()
        self.experts = nn.Parameter(torch.zeros(8, 128, 128))

    def middle(self, x):
        return super().middle(x) + (self.experts.sum(0) @ x.t()).t()


@pytest.mark.parametrize("case", CASES)
def test_matrices_of_no_layer_are_in_the_table_and_worth_a_warning(case, capsys):
    fp8 = level_of(case).has_fp8
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        train(Experts(), case, max_steps=1)
    said = [str(w.message) for w in found if "of the elements of the matrices" in str(w.message)]
    rows = [line for line in capsys.readouterr().out.splitlines() if "a parameter of Experts" in line]
    assert len(said) == len(rows) == int(fp8)
    total = 8 * 128 * 128 + 32 * 128 + 128 * 128 + 128 * 32
    if fp8:
        low = (32 * 128 + 128 * 128) / total
        assert said[0].startswith(f"{level_of(case).name}: only {low:.0%} of the elements of the matrices")
        assert f"{100 * 8 * 128 * 128 / total:.1f} %" in rows[0] and "experts" in rows[0]


def test_a_model_that_is_converted_is_no_warning(recwarn):
    train(Net(), "bf16_with_fp8_mixed", max_steps=1)
    assert not [w for w in recwarn if "in a converted layer" in str(w.message)]


def test_nothing_converted_is_a_warning():
    with pytest.warns(UserWarning, match="no matrix that this model multiplies with is in a converted layer"):
        train(Net(), plugin("bf16_with_fp8_mixed", convert=[]), max_steps=1)
