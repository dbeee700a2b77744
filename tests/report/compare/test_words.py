"""What a comparison says about a level, in words."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from nemo_lowprec.report.compare.comparison import Comparison, Fall, Outcome, compare
from nemo_lowprec.report.compare.groups import Group, read_groups
from nemo_lowprec.report.compare.words import sentences
from tests.runs import write_run

LAYER = "model.layers.1.mlp.down_proj"
NO_FALL = "leaves the band of the reference's seeds at step 784; there no layer's SQNR fell by 1 dB or more."


def said(fall: Fall | None) -> str:
    """The sentence on a level that has left the band."""
    reference, other = (Outcome(Group(name, []), [1], np.zeros((2, 1))) for name in ("reference", "other"))
    other.gap, other.gap_half, other.leaves, other.fall = 0.01, 0.02, 784, fall
    ((label, sentence, _),) = sentences(Comparison([reference, other], by_validation=True, band=True))
    assert label == "other"
    return sentence


@pytest.mark.parametrize(
    ("after", "is_named"), [(31.5, False), (30.51, False), (30.5, True), (9.0, True), (33.0, False)]
)
def test_a_layer_is_named_where_its_sqnr_fell_by_a_decibel_or_more(after: float, is_named: bool) -> None:
    sentence = said(Fall(LAYER, "input", 31.5, after))
    named = f"at step 784; there the SQNR of {LAYER} (input) fell most, from 31.5 to {after:.1f} dB."
    assert (named in sentence) is is_named
    assert (NO_FALL in sentence) is not is_named


def test_where_no_sqnr_is_known_none_is_told() -> None:
    assert said(None).endswith("leaves the band of the reference's seeds at step 784.")


def test_runs_whose_loss_rises_while_every_sqnr_stays_name_no_layer(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / f"a{seed}", "bf16_mixed", steps=600, seed=seed) for seed in (1, 2)]
    folders += [
        write_run(tmp_path / f"b{seed}", "msamp_o2", steps=600, seed=seed, worse=0.5, worse_from=400) for seed in (1, 2)
    ]
    comparison = compare(read_groups(folders))
    found = comparison.outcomes[1]
    assert found.leaves is not None and 380 < found.leaves <= 401 and abs(found.fall.before - found.fall.after) < 1
    ((_, sentence, state),) = sentences(comparison)
    assert "no layer's SQNR fell by 1 dB or more" in sentence and "down_proj" not in sentence and state == "bad"


@pytest.mark.parametrize(
    ("gap", "half", "leaves", "nonfinite_from", "state"),
    [
        (0.01, 0.02, None, None, "good"), (-0.03, 0.02, 300, None, "good"), (0.01, None, None, None, "good"),
        (0.01, 0.02, 300, None, "unclear"), (0.01, None, 300, None, "unclear"),
        (0.03, 0.02, 300, None, "bad"), (0.03, 0.02, None, None, "bad"), (None, None, None, 400, "bad"),
    ],
)  # fmt: skip
def test_the_state_of_a_level(
    gap: float | None, half: float | None, leaves: int | None, nonfinite_from: int | None, state: str
) -> None:
    reference, other = (Outcome(Group(name, []), [1], np.zeros((2, 1))) for name in ("reference", "other"))
    other.gap, other.gap_half, other.leaves, other.nonfinite_from = gap, half, leaves, nonfinite_from
    ((_, _, found),) = sentences(Comparison([reference, other], by_validation=True, band=True))
    assert found == state
