"""``assert_level`` as a user's test calls it: after a fit with an ``Audit``."""

import pytest
import torch

from nemo_lowprec import Audit, assert_level
from nemo_lowprec.report.findings import LevelDiffersError
from tests.support import Net, loader, plugin, trainer


def fitted(case, *callbacks, module=None, **options):
    run = trainer(plugin(case), *callbacks, **options)
    run.fit(module or Net(), loader())
    return run


@pytest.mark.parametrize("case", ["bf16_mixed", "te_fp8", "msamp_o3"])
def test_the_report_of_a_level_that_does_what_it_declares(case):
    report = assert_level(fitted(case, Audit(), max_steps=2))
    assert report.agrees and report.level.name == case


class HalfMoments(Net):
    """Whose first moments something makes BF16 after the second step."""

    def optimizer_step(self, *args, **kwargs):
        super().optimizer_step(*args, **kwargs)
        if self.trainer.global_step == Audit.STEP:  # counted when this returns
            for state in self.trainer.optimizers[0].state.values():
                state["exp_avg"] = state["exp_avg"].bfloat16()


def test_the_columns_that_differ_are_named():
    run = fitted("bf16_mixed", Audit(), module=HalfMoments(), max_steps=2)
    with pytest.raises(AssertionError) as error:
        assert_level(run)
    assert type(error.value) is LevelDiffersError
    assert str(error.value) == (
        "bf16_mixed differs from the chart. Optimizer states of converted: fp32 declared, bf16 found; "
        "Optimizer states of rest: fp32 declared, bf16 found."
    )


def test_a_trainer_without_the_callback_or_the_step_is_one_sentence():
    with pytest.raises(ValueError, match=r"needs an Audit that has watched the fit: Trainer\(callbacks="):
        assert_level(fitted("bf16_mixed", max_steps=2))
    with pytest.raises(ValueError, match=r"watches optimizer step 2, and this Trainer has made 1\. Fit at least 2"):
        assert_level(fitted("bf16_mixed", Audit(), max_steps=1))
    with pytest.raises(ValueError, match="has made 0"):
        assert_level(trainer(plugin("bf16_mixed"), Audit()))


def test_the_report_as_json():
    report = assert_level(fitted("te_fp8", Audit(), max_steps=2))
    found = report.to_json()
    assert found["level"] == "te_fp8" and found["agrees"] is True
    (gemm,) = (f for f in found["findings"] if f["column"].startswith("Computation"))
    assert (gemm["declared"], gemm["observed"], gemm["agrees"]) == ("fp8", "fp8", True)
    assert found["total_bytes"]["Weight"] == 4 * sum(p.numel() for p in Net().parameters())
    assert not torch.is_tensor(found["total_bytes"]["Weight"])
