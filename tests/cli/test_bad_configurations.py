"""Bad values for every field of every face are refused in one sentence; what is accepted has a meaning.

``NEMO_LOWPREC_BAD_CONFIGURATIONS=10000 pytest tests/cli/test_bad_configurations.py -k long -s`` is the long run.
"""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nemo_lowprec.cli import main
from tests.bad_configurations import FACES, SPECIAL, examples, long_run, outcome

SAMPLE = settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("face", FACES)
def test_any_value_of_any_field_is_refused_in_a_sentence_or_means_something(face: str) -> None:
    @SAMPLE
    @given(examples(face))
    def run(example: tuple[str, Any]) -> None:
        assert outcome(face, *example) in ("refused", "accepted")

    run()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("face", FACES)
def test_a_field_that_there_is_not_and_a_default_tell_the_two_outcomes_apart(face: str) -> None:
    known, unknown = {
        "hydra": ("default|model.lr", "default|model.nobody"),
        "nemo_run": ("tiny|model.lr", None),  # whose configs refuse it themselves
        "python": ("CausalLM|lr", "CausalLM|nobody"),
    }[face]
    assert outcome(face, known, 1e-2) == "accepted"
    assert outcome(face, known, float("inf")) == "refused"
    assert unknown is None or outcome(face, unknown, 1) == "refused"


@pytest.mark.skipif(not long_run(), reason="long: set NEMO_LOWPREC_BAD_CONFIGURATIONS to a number of examples")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("face", FACES)
def test_a_long_run(face: str) -> None:
    found: Counter[str] = Counter()

    @settings(SAMPLE, max_examples=long_run(), derandomize=False)
    @given(examples(face))
    def run(example: tuple[str, Any]) -> None:
        found[outcome(face, *example)] += 1

    began = time.monotonic()
    run()
    assert found["refused"] > found["accepted"] > 0
    print(f"{face}: {dict(found)} of {len(FACES[face][1])} fields in {time.monotonic() - began:.0f} s")


# What was met, by the command itself. A list is one override by each of its entries.
MET = [
    ("+model.config.num_hidden_layers=-1", "model.config.num_hidden_layers=-1 must be an integer from 1"),
    ("+model.config.num_hidden_layers=1000000000", "must be an integer from 1 to 10000"),
    ("+model.config.num_attention_heads=0", "model.config.num_attention_heads=0 must be an integer from 1"),
    ("+model.config.num_key_value_heads=3", "model.config.num_key_value_heads=3 must divide the 4 attention heads"),
    ("+model.config.hidden_act=swisch", "model.config.hidden_act='swisch' must be one of:"),
    ("+model.config.hidden_size=wide", "model.config does not make a LlamaConfig: "),
    ("+model.config.hiden_size=64", "model.config.hiden_size: a LlamaConfig has no such field. It has:"),
    ("+model.config.rms_norm_eps=nan", "model.config.rms_norm_eps=nan must be a finite number"),
    ("+model.config.attention_dropout=2.0", "attention_dropout=2.0 must be a number from 0 to below 1"),
    ("+model.config.rope_parameters={rope_type: spiral}", "rope_type='spiral' must be one of:"),
    ("ckpt_path=outputs", "ckpt_path='outputs' is a folder, and no checkpoint"),
    ("ckpt_path=\'\'", "ckpt_path='' must be text that is not empty"),
    ("ckpt_path=best", "ckpt_path='best' is known only after a run"),
    ("ckpt_path=http://127.0.0.1:9/last.ckpt", "ckpt_path='http://127.0.0.1:9/last.ckpt' "),
    ("ckpt_path=warp://x/last.ckpt", "ckpt_path='warp://x/last.ckpt' cannot be read: Protocol not known"),
    ("seed=-1", "seed=-1 must be an integer from 0 to 2**32 - 1"),
    ("seed=4294967296", "seed=4294967296 must be an integer from 0 to 2**32 - 1"),
    ("data.seed=4294967296", "data.seed=4294967296 must be an integer from 0 to 2**32 - 1"),
    ("data.num_workers=null", "data.num_workers=None must be an integer from 0 to 256"),
    ("trainer.accumulate_grad_batches=0", "trainer.accumulate_grad_batches=0 must be an integer of at least 1"),
    ("trainer.accumulate_grad_batches=-1", "trainer.accumulate_grad_batches=-1 must be an integer of at least 1"),
    ("trainer.gradient_clip_val=-1", "trainer.gradient_clip_val=-1 must be a number of at least 0"),
    ("model.lr=inf", "model.lr=inf must be a number greater than 0"),
    ("model.eps=1e300", "model.eps=1e+300 must be a number from 0 to 1"),
    ("model.weight_decay=nan", "model.weight_decay=nan must be a number from 0"),
    (["strategy=lowprec_sharded", "trainer.strategy.async_checkpoints=abc"],
     "trainer.strategy.async_checkpoints='abc' must be True or False"),
    ("+trainer.plugins=[]", "trainer.plugins is not read: use the precision group"),
    ("+trainer.callbacks=[]", "trainer.callbacks is not read"),
    (["strategy=ddp", "trainer.devices=1000"], "trainer.devices=1000 is more than the"),
    (["strategy=ddp", "gpus=1000"], "gpus=1000 is more than the"),
    (["strategy=ddp", "gpus=-5"], "gpus=-5 must be at least 1"),
    ("+nobody=1", "There is no setting 'nobody'"),
    ("checkpoint.monitor=val/los", "checkpoint.monitor='val/los' must be one of: val/loss"),
    ("logger=abc", "Unknown logger 'abc'"),
    ("trainer.logger=abc", "trainer.logger='abc' must be a logger"),
    ("model._target_=nowhere.Model", "model._target_='nowhere.Model' cannot be imported"),
    ("output_dir=${nowhere}", "nowhere"),
    ("trainer.max_steps=0", "max_steps=0 trains nothing"),
    ("hydra.run.dir=/dev/null/x", "Hydra cannot begin with these settings of its own (hydra.*): "),
    ("hydra.verbose=3", "Hydra cannot begin with these settings of its own (hydra.*): "),
    ("+hydra.nobody=3", "hydra.nobody is no setting of Hydra's"),
    (["-m", "model.lr=inf,nan"], "model.lr=inf must be a number greater than 0"),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("overrides", "message"), MET)
def test_what_was_met_ends_the_command_with_a_sentence(
    overrides: str | list[str], message: str, capsys: pytest.CaptureFixture
) -> None:
    overrides = [overrides] if isinstance(overrides, str) else overrides
    Path("outputs").mkdir()
    assert main(["pretrain", "trainer.accelerator=cpu", "hydra.run.dir=.", *overrides]) == 2
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.lr=inf", "lr=inf must be a number greater than 0"),
        ("data.num_workers=-1", "num_workers=-1 must be an integer from 0 to 256"),
        ("data.seed=4294967296", "seed=4294967296 must be an integer from 0"),
        ("trainer.accumulate_grad_batches=0", "accumulate_grad_batches=0 must be an integer of at least 1"),
        ("trainer.gradient_clip_val=-1.0", "gradient_clip_val=-1.0 must be a number of at least 0"),
        ("trainer.devices=1000", "devices=1000 is more than the"),
        ("trainer.plugins.fp8_margin=100", "fp8_margin=100 must be an integer of at least -1"),
        ("trainer.max_time=soon", "`Timer(duration='soon')` is not a valid duration"),
        ("ckpt_path=best", "ckpt_path='best' is known only after a run"),
    ],
)
def test_nemo_runs_command_says_the_same(override: str, message: str, capsys: pytest.CaptureFixture) -> None:
    arguments = ["--factory", "tiny", "--yes", "trainer.accelerator=cpu", "trainer.strategy=ddp", override]
    assert main(["run", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error


@given(st.sampled_from(SPECIAL))
@settings(SAMPLE, max_examples=40)
@pytest.mark.parametrize("name", ["accumulate_grad_batches", "gradient_clip_val", "num_workers", "lr", "seed"])
def test_special_values_are_told_from_numbers(name: str, value: Any) -> None:
    from nemo_lowprec.arguments import RANGES, check_value

    kind = RANGES[name]
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or value != value or abs(value) == float("inf") or value < 0:
        with pytest.raises(ValueError, match=f"^{name}=.* must be an? "):
            check_value(name, value, kind)
