"""A profiled training on a CPU."""

import json

import lightning.pytorch as pl
import pytest
from lightning.pytorch.demos.boring_classes import BoringModel

from nemo_lowprec import CHART
from nemo_lowprec.report import StepProfiler
from nemo_lowprec.report.profile.beside import beside
from nemo_lowprec.report.profile.step_profile import PARTS, read_profile
from tests.profiled import LINEARS, profiled
from tests.support import Net, loader, plugin, trainer


@pytest.mark.parametrize("level", ["bf16_mixed", "bf16_with_fp8_mixed", "msamp_o3"])
def test_a_profiled_training(level, tmp_path):
    losses, _ = profiled(level, None, "cpu")
    watched, found = profiled(level, tmp_path / "found.json", "cpu")
    assert watched == losses
    assert read_profile(tmp_path / "found.json") == found
    assert found.about["level"] == level and found.about["device"] == "CPU" and found.matched == 1.0
    assert set().union(*(us for us in found.layers.values())) <= set(PARTS)
    assert sum(found.parts().values()) == pytest.approx(found.ms, rel=1e-3)
    assert found.low == (LINEARS if CHART[level].has_fp8 else []) and set(LINEARS) < set(found.linears)
    parts = found.parts()
    assert parts["gemm"] > 0 and parts["attention"] > 0 and parts["optimizer"] > 0


def test_a_step_of_several_batches_is_one_step(tmp_path):
    single, several = (
        profiled("bf16_with_fp8_mixed", tmp_path / f"{count}", "cpu", accumulate=count)[1] for count in (1, 3)
    )
    name = "model.model.layers.0.self_attn.o_proj"
    assert several.launches[name] > 2.5 * single.launches[name]


def test_a_validation_is_no_part_of_a_step(tmp_path):
    without, found = (
        profiled("bf16_with_fp8_mixed", tmp_path / f"{validates}", "cpu", accumulate=2, validates=validates)[1]
        for validates in (False, True)
    )
    for name in ("model.model.norm", "model.model.embed_tokens"):
        assert found.launches[name] == without.launches[name] > 0


def test_layers_beside_bf16(tmp_path):
    half, low = (profiled(level, tmp_path / level, "cpu")[1] for level in ("bf16_mixed", "bf16_with_fp8_mixed"))
    found = beside(half, low)
    of_linears = [one for one in found.layers if one.low]
    assert sorted(name for one in of_linears for name in one.low) == sorted(LINEARS)
    assert all(one.half_us["gemm"] > 0 and one.low_us["gemm"] > 0 for one in of_linears)


def test_a_precision_of_lightnings_own_is_refused():
    trainer = pl.Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[StepProfiler()],
    )  # fmt: skip
    with pytest.raises(ValueError, match="StepProfiler needs a Trainer with a level of nemo_lowprec"):
        trainer.fit(BoringModel())


def fit(**limits):
    """Train ``Net`` on a CPU with a profiler."""
    trainer(plugin("bf16_with_fp8_mixed"), StepProfiler(), **limits).fit(Net(), loader())


def test_too_few_steps_are_refused_before_the_first_one():
    with pytest.raises(ValueError, match=r"StepProfiler needs 7 steps, and max_steps=6 leaves 6\."):
        fit(max_steps=6)


def test_a_training_that_ends_too_early_is_warned_of():
    with pytest.warns(UserWarning, match=r"has ended after 3 steps\. A profile takes 7\."):
        fit(limit_train_batches=3)


@pytest.mark.parametrize("text", [None, "", "[]", json.dumps({"ms": 1})])
def test_a_file_without_a_profile_is_one_sentence(text, tmp_path):
    path = tmp_path / "profile.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(
        ValueError, match=r"profile\.json holds no profile of a step: nemo-lowprec profile writes one\."
    ):
        read_profile(path)
