"""``convert="auto"`` under the Trainer and in a plain loop: decided after a step, kept on resume, shown, audited."""

import logging
import warnings

import pytest
import torch
from auto import MADE_UP, made_up_times
from support import FP8_LEVELS, Net, Samples, assert_same, loader, plugin, stateful_loader, stored, train, values_of
from torch import nn

import nemo_lowprec
from nemo_lowprec.compute import gemm_plans
from nemo_lowprec.compute.gemm_times import GemmTimes, Roofline
from nemo_lowprec.report import Audit

RUN_ON_CPU = [name for name in FP8_LEVELS if nemo_lowprec.CHART[name].compute == "fp8"]
SOME = ["te_fp8", "bf16_with_fp8_mixed", "bf16_with_fp8_current_scaling_mixed", "msamp_o2", "msamp_o3"]
ALL_LEFT = GemmTimes("", Roofline(5e3, 2e3, 4.0), MADE_UP.half, 1e12, (1.0, 1e12))


@pytest.fixture(autouse=True)
def _times():
    with made_up_times():
        yield


def in_fp8(model):
    return {plan.name for m in model.modules() for plan in gemm_plans(m).values() if plan.recipe is not None}


class Seen(Net):
    """Notes before each batch which layers run in FP8."""

    def on_train_batch_start(self, batch, batch_idx):
        self.low = [*getattr(self, "low", []), in_fp8(self)]


@pytest.mark.parametrize("case", RUN_ON_CPU)
def test_a_small_layer_is_left_after_the_first_step(case, capsys):
    model = Seen()
    train(model, case, max_steps=3)
    assert model.low == [{"inp", "mid"}, {"mid"}, {"mid"}]
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80
    before, _, after = shown.partition('convert="auto" has decided')
    assert after and "has decided" not in after
    assert "are left after the first step" in " ".join(before.split())
    assert "too small: 32 × 128 at 4 rows, FP8 takes" in " ".join(after.split())
    half = "FP16" if "fp16" in case else "BF16"
    assert f"× {half}'s GPU time expected on CPU" in " ".join(after.split())


def test_it_is_decided_after_the_whole_step_of_micro_batches():
    model = Seen()
    train(model, "bf16_with_fp8_mixed", max_steps=2, accumulate_grad_batches=2)
    assert model.low == [{"inp", "mid"}, {"inp", "mid"}, {"mid"}, {"mid"}]


@pytest.mark.parametrize("convert", [None, "*", ["inp", "mid"], lambda name, module: name != "head"])
def test_names_win(convert, capsys):
    model = Seen()
    train(model, plugin("bf16_with_fp8_mixed", convert=convert), max_steps=2)
    assert {"inp", "mid"} <= model.low[-1]
    assert "decided" not in capsys.readouterr().out


def test_without_times_everything_is_converted(capsys):
    nemo_lowprec.compute.gemm_times.FAMILIES["cpu"] = None
    model = Seen()
    run = train(model, "bf16_with_fp8_mixed", max_steps=2).trainer
    assert model.low[-1] == {"inp", "mid"} and "decided" not in capsys.readouterr().out
    assert run.precision_plugin.state_dict()["speed"]["left"] == {}


@pytest.mark.parametrize("activations", [None, "fp8", "fp8+recompute"])
@pytest.mark.parametrize("case", ["bf16_with_fp8_mixed", "te_fp8", "bf16_with_fp8_current_scaling_mixed"])
def test_a_left_layer_computes_as_one_that_is_skipped(case, activations):
    decided = {"speed": {"left": {"inp": "too small"}, "expected": "", "problem": None}}
    models = Net(), Net()
    for model, options in zip(models, ({}, {"skip": "inp"}), strict=True):
        precision = plugin(case, activations=activations, **options)
        if not options:
            model.on_train_start = lambda p=precision: p.load_state_dict(decided)
        train(model, precision, max_steps=4)
    assert models[0].losses == models[1].losses
    assert_same(models[0].state_dict(), models[1].state_dict())


@pytest.mark.parametrize("case", SOME)
def test_weights_stay_stored_as_they_were(case):
    class Stored(Net):
        def on_train_batch_start(self, batch, batch_idx):
            kinds = {n: (type(p), stored(p).dtype) for n, p in self.named_parameters()}
            assert kinds == getattr(self, "kinds", kinds)
            self.kinds = kinds

    model = Stored()
    train(model, case, max_steps=3)
    assert model.kinds["inp.weight"] == model.kinds["mid.weight"]
    assert model.losses[-1] < model.losses[0] * 1.5


@pytest.mark.parametrize("case", SOME)
def test_a_resumed_run_keeps_the_choice_and_goes_on_bit_for_bit(case, tmp_path):
    path = tmp_path / "one.ckpt"
    whole = Seen()
    train(whole, case, data=stateful_loader(), max_steps=4, max_epochs=-1)
    first = Seen()
    run = train(first, case, data=stateful_loader(), max_steps=2, max_epochs=-1)
    run.trainer.save_checkpoint(path)
    assert {"inp", "mid"} - first.low[-1] == {"inp"}
    nemo_lowprec.compute.gemm_times.FAMILIES["cpu"] = None  # another machine
    resumed = Seen()
    train(resumed, case, data=stateful_loader(), max_steps=4, max_epochs=-1, ckpt=path)
    assert resumed.low == whole.low[2:]
    assert resumed.losses == whole.losses[2:]


def test_a_second_fit_keeps_the_choice(capsys):
    model, precision = Seen(), plugin("bf16_with_fp8_mixed")
    run = train(model, precision, max_steps=2, max_epochs=-1).trainer
    run.validate(model, loader(), verbose=False)
    capsys.readouterr()
    run.fit_loop.epoch_loop.max_steps = 4
    run.fit(model, loader())
    assert model.low[2:] == [{"mid"}] * 2
    assert "decided" not in capsys.readouterr().out


@pytest.mark.parametrize("level", ["msamp_o2", "msamp_o3"])
def test_a_low_bit_weight_of_a_left_layer_has_a_half_form_from_the_first_pass_of_another_fit(level):
    halves = []

    class Noting(Net):
        def on_train_batch_start(self, batch, batch_idx):
            halves.append(list(self.trainer.precision_plugin.engine.amaxes.weights.halves))

    model, precision = Noting(), plugin(level)
    run = train(model, precision, max_steps=2, max_epochs=-1).trainer
    run.fit_loop.epoch_loop.max_steps = 4
    run.fit(model, loader())
    assert halves == [[], ["inp"], ["inp"], ["inp"]]


def test_another_choice_is_loaded():
    model, precision = Seen(), plugin("bf16_with_fp8_mixed")
    train(model, precision, max_steps=2)
    state = precision.state_dict()
    state["speed"] = {"left": {"mid": "too small"}, "expected": "", "problem": None}
    model.on_train_start = lambda: precision.load_state_dict(state)
    train(model, precision, max_steps=2)
    assert model.low[-1] == {"inp"}


def test_most_flop_left_is_a_warning():
    with made_up_times(ALL_LEFT), pytest.warns(UserWarning, match="bf16_with_fp8_mixed: 100% of the FLOP"):
        train(Net(), "bf16_with_fp8_mixed", max_steps=2)
    with made_up_times(), warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*of the FLOP.*")
        train(Net(), "bf16_with_fp8_mixed", max_steps=2)


@pytest.mark.parametrize("case", SOME)
def test_the_audit_shows_it(case):
    audit = Audit()
    train(Net(), case, audit, max_steps=2)
    gemms = {f.part: (f.declared, f.observed) for f in audit.report.findings if f.column == "Computation (GEMM)"}
    half = nemo_lowprec.CHART[case].autocast
    assert gemms == {"converted": ("fp8", "fp8"), "too small": (half, half)}
    assert audit.report.agrees


def test_the_audit_says_where_nothing_is_in_fp8():
    audit = Audit()
    with made_up_times(ALL_LEFT), pytest.warns(UserWarning, match="of the FLOP"):
        train(Net(), "bf16_with_fp8_mixed", audit, max_steps=2)
    assert not audit.report.agrees


# Plain loops


class Classifier(nn.Sequential):
    def __init__(self):
        torch.manual_seed(1)
        super().__init__(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 32))


def prepared(level, **options):
    model = Classifier()
    return nemo_lowprec.prepare(
        model, torch.optim.AdamW(model.parameters(), lr=1e-2), level, backend="reference", **options
    )


def steps(model, optimizer, count):
    data, losses = Samples(8), []
    for _ in range(count):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = nn.functional.cross_entropy(model(data.x[:4]).float(), data.y[:4])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("level", ["bf16_with_fp8_mixed", "bf16_with_fp8_current_scaling_mixed", "msamp_o2"])
def test_a_plain_loop_decides_and_resumes(level, caplog):
    caplog.set_level(logging.INFO, "nemo_lowprec")
    model, optimizer = prepared(level)
    assert in_fp8(model) == {"0", "2", "4"}
    losses = steps(model, optimizer, 2)
    assert in_fp8(model) == {"2"}
    assert caplog.text.count("too small: 32 × 128 at 4 rows") == 1
    weights = {name: values_of(value).clone() for name, value in model.state_dict().items()}
    import copy

    state = copy.deepcopy(optimizer.state_dict())
    losses = steps(model, optimizer, 3)
    nemo_lowprec.compute.gemm_times.FAMILIES["cpu"] = None
    other, other_optimizer = prepared(level)
    other.load_state_dict(weights)
    other_optimizer.load_state_dict(state)
    assert in_fp8(other) == {"2"}
    again = steps(other, other_optimizer, 3)
    assert in_fp8(other) == {"2"}
    if level != "msamp_o2":  # whose masters are the weights' 16 bits
        assert again == pytest.approx(losses, rel=1e-2)


def test_a_watched_model_can_be_copied_and_pickled():
    import copy
    import io

    model, optimizer = prepared("bf16_with_fp8_mixed")
    copy.deepcopy(model)
    torch.save(model.state_dict(), io.BytesIO())
    steps(model, optimizer, 1)
    assert in_fp8(model) == {"2"}
