"""The tables that the Trainer shows at its start, and what Lightning's summary says of the size."""

import logging
import math
import re
import warnings

import pytest
import torch
from lightning.pytorch.callbacks import ModelSummary, RichModelSummary
from lightning.pytorch.tuner import Tuner
from support import CASES, Net, level_of, loader, plugin, train, trainer
from torch import nn

from nemo_lowprec.report.tensor_storage import Bytes


@pytest.mark.parametrize("case", CASES)
def test_the_level_is_shown_once(case, capsys):
    train(Net(), case, data=(loader(), loader()), max_steps=2)
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80
    for title, cell in level_of(case).columns(fp8_params="fp8_params" in case).items():
        if title == "Level":  # in the heading
            continue
        assert re.search(rf"^  {re.escape(title)} +{re.escape(cell)}$", shown, re.MULTILINE)
    assert f"Parameters           {sum(p.numel() for p in Net().parameters()):,}\n" in shown
    assert shown.count(f"Precision: {level_of(case).name}(") == 1
    assert shown.count("Layers") == (1 if level_of(case).has_fp8 else 0)


def test_nothing_is_shown_for_anything_but_a_fit(capsys):
    alone = trainer(plugin("bf16_with_fp8_mixed"))
    alone.validate(Net(), loader(), verbose=False)
    alone.test(Net(), loader(), verbose=False)
    alone.predict(Net(), loader())
    assert "Precision:" not in capsys.readouterr().out


def test_each_fit_shows_it_once_whatever_comes_between(capsys):
    run, model = trainer(plugin("bf16_with_fp8_mixed"), max_steps=1), Net()

    def shown():
        return capsys.readouterr().out.count("Precision:")

    run.validate(model, loader(), verbose=False)
    run.fit(model, loader(), loader())
    assert shown() == 1
    run.test(model, loader(), verbose=False)
    run.validate(model, loader(), verbose=False)
    assert shown() == 0
    run.fit_loop.epoch_loop.max_steps = 2
    run.fit(model, loader(), loader())
    assert shown() == 1


def test_a_search_of_the_batch_size_is_one_fit(capsys, tmp_path):
    class Sized(Net):
        batch_size = 2

        def train_dataloader(self):
            return loader(self.batch_size)

        val_dataloader = train_dataloader

    run = trainer(plugin("bf16_mixed"), max_steps=1, default_root_dir=tmp_path)
    Tuner(run).scale_batch_size(Sized(), max_trials=2, steps_per_trial=1)
    assert capsys.readouterr().out.count("Precision:") == 1


def test_frozen_parameters_are_counted_apart(capsys):
    model = Net()
    model.inp.requires_grad_(False)
    count, frozen = (sum(p.numel() for p in m.parameters()) for m in (model, model.inp))
    train(model, "bf16_mixed", max_steps=1)
    assert f"{count:,}, of which {count - frozen:,} are trained\n" in capsys.readouterr().out


@pytest.mark.parametrize("kind", [ModelSummary, RichModelSummary])
@pytest.mark.parametrize("case", CASES)
def test_lightnings_summary_says_the_bytes_that_the_weights_have(case, kind, capsys, caplog, recwarn):
    model, stored = Net(), []

    class Measured(kind):
        def on_fit_start(self, trainer, pl_module):
            stored.append(Bytes(pl_module.parameters()).total)
            super().on_fit_start(trainer, pl_module)

    summary = Measured()
    with caplog.at_level(logging.INFO, "lightning.pytorch.callbacks.model_summary"):
        run = trainer(plugin(case), summary, max_steps=1)
        run.fit(model, loader())
    [line] = [s for s in (capsys.readouterr().out + caplog.text).splitlines() if "estimated model params size" in s]
    assert math.isclose(float(re.search(r"[\d.]+", line.replace("(MB)", ""))[0]), stored[0] / 1e6, abs_tol=6e-4)
    assert stored[0] == 4 * sum(p.numel() for p in model.parameters()) or level_of(case).weight != "fp32"
    assert not [w for w in recwarn if "model summary" in str(w.message)]
    assert "_summary" not in vars(summary)


def test_another_precision_of_the_trainer_is_warned_of_as_ever():
    summary = RichModelSummary()
    trainer(plugin("bf16_mixed"), summary, max_steps=1).fit(Net(), loader())
    with pytest.warns(UserWarning, match="Precision bf16-mixed is not supported by the model summary"):
        trainer(None, summary, max_steps=1, precision="bf16-mixed").fit(Net(), loader())


def test_layers_that_were_left_alone_are_shown_with_the_reason(capsys):
    class Various(Net):
        def __init__(self):
            super().__init__()
            self.odd = nn.Linear(30, 32)
            self.blocks = nn.ModuleList(nn.Linear(32, 32) for _ in range(5))
            self.skipped = nn.Linear(32, 32)

    train(Various(), plugin("bf16_with_fp8_mixed", skip=["skipped"]), max_steps=1)
    lines = capsys.readouterr().out.splitlines()

    def names(count, what):
        """Below the line with the group."""
        [index] = [i for i, line in enumerate(lines) if line.split()[:1] == [count] and line.endswith(what)]
        return lines[index + 1].strip()

    assert names("7", "FP8 (delayed, reference)") == "inp, mid, blocks.*"
    assert names("1", "half precision: a side of 30 is no multiple of 16") == "odd"
    assert names("1", "half precision: in skip") == "skipped"
    assert names("1", "half precision: the head (head='fp8' converts it)") == "head"
    assert names("1", "norm with half output") == "norm"


def test_a_model_without_linear_layers_is_said_so(capsys):
    class Nothing(Net):
        def __init__(self):
            super().__init__()
            self.inp = self.mid = nn.Identity()
            self.norm = nn.LayerNorm(32)
            self.head = nn.Linear(32, 32)

    train(Nothing(), "bf16_with_fp8_mixed", max_steps=1)
    assert "no layer can be converted" in capsys.readouterr().out


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
    said = [str(w.message) for w in found if "of the FLOP of the matrices" in str(w.message)]
    lines = capsys.readouterr().out.splitlines()
    rows = [line for line in lines if "a parameter of Experts" in line]
    assert len(said) == len(rows) == int(fp8)
    total = 8 * 128 * 128 + 32 * 128 + 128 * 128 + 128 * 32
    if fp8:
        low = (32 * 128 + 128 * 128) / total
        assert said[0].startswith(f"{level_of(case).name}: only {low:.0%} of the FLOP of the matrices")
        assert f"{100 * 8 * 128 * 128 / total:.1f} %" in rows[0]
        assert lines[lines.index(rows[0]) + 1].strip() == "experts"


def test_a_model_that_is_converted_is_no_warning(recwarn):
    train(Net(), "bf16_with_fp8_mixed", max_steps=1)
    assert not [w for w in recwarn if "in a converted layer" in str(w.message)]


def test_nothing_converted_is_a_warning():
    with pytest.warns(UserWarning, match="no matrix that this model multiplies with is in a converted layer"):
        train(Net(), plugin("bf16_with_fp8_mixed", convert=[]), max_steps=1)
