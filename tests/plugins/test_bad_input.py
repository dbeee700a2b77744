"""Bad input is one sentence that names the thing and the way out, before any training step."""

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from support import CASES, FP8_LEVELS, Net, level_of, loader, plugin, train, trainer

import nemo_lowprec
from nemo_lowprec import CHART, LowPrecision
from nemo_lowprec.plugins import LEVELS


@pytest.mark.parametrize(
    ("level", "options", "error", "message"),
    [
        ("bf16_mxied", {}, ValueError, "Unknown precision level 'bf16_mxied'. Choose one of: fp16_amp, te_fp8"),
        (None, {}, ValueError, "Unknown precision level None"),
        (
            "msamp_o4",
            {},
            ValueError,
            "Unknown precision level 'msamp_o4'. Choose one of: .*msamp_o1, msamp_o2, msamp_o3",
        ),
        ("bf16_mixed", {"fp8_margn": 1}, TypeError, "bf16_mixed has no argument 'fp8_margn'. It takes: graphs."),
        ("te_fp8", {"fp8_margn": 1}, TypeError, "te_fp8 has no argument 'fp8_margn'. It .* you mean 'fp8_margin'"),
        ("bf16_mixed", {"fp8_margin": 1}, TypeError, "bf16_mixed takes no 'fp8_margin'. Levels that do: te_fp8, ms"),
        ("fp16_mixed", {"backend": "torch"}, TypeError, "fp16_mixed takes no 'backend'. Levels that do: te_fp8"),
        ("te_fp8", {"fp8_params": True}, TypeError, "te_fp8 takes no 'fp8_params'. Levels that do: bf16_with_fp8"),
        ("bf16_mixed", {"loss_scale": 8.0}, TypeError, "bf16_mixed takes no 'loss_scale'. Levels that do: fp16_amp"),
        ("bf16_with_nvfp4_mixed", {"fp8": "e4m3"}, TypeError, "bf16_with_nvfp4_mixed takes no 'fp8'"),
        ("bf16_with_mxfp8_mixed", {"fp8": "hybrid"}, ValueError, "fp8='hybrid' diverges with MXFP8.* Use fp8='e4m3'"),
        ("te_fp8", {"fp8": "e5m2"}, ValueError, "fp8='e5m2' is no FP8 format. Choose one of: hybrid, e4m3"),
        ("te_fp8", {"fp8_margin": 0.5}, ValueError, "fp8_margin=0.5 must be an integer"),
        ("te_fp8", {"fp8_amax_history_len": 0}, ValueError, "fp8_amax_history_len=0 must be an integer of at least 1"),
        ("te_fp8", {"fp8_amax_compute_algo": "mean"}, ValueError, "'mean' is unknown. Choose one of: max, most_recent"),
        ("te_fp8", {"interval": True}, ValueError, "interval=True must be an integer of at least 1"),
        ("te_fp8", {"override_linear_precision": True}, ValueError, "override_linear_precision=True must be three"),
        ("te_fp8", {"backend": "cutlass"}, ValueError, "Unknown backend 'cutlass'. Choose one of: auto, torch, te"),
        ("te_fp8", {"skip": [3]}, ValueError, r"skip=\[3\] must hold names or globs of layers"),
        ("fp16_mixed", {"loss_scale": -1.0}, ValueError, "loss_scale=-1.0 must be a positive number"),
        ("fp16_mixed", {"loss_scale": torch.tensor(128.0)}, ValueError, "must be a positive number"),
        ("fp16_mixed", {"hysteresis": 0}, ValueError, "hysteresis=0 must be an integer of at least 1"),
        ("fp16_amp", {"initial_loss_scale": 0.5}, ValueError, "initial_loss_scale=0.5 lies below min_loss_scale=1.0"),
        ("bf16_mixed", {"half": "fp16"}, TypeError, "bf16_mixed takes no 'half'. Levels that do: msamp_o1, msamp_o2"),
        (
            "te_fp8",
            {"stochastic_rounding": True},
            TypeError,
            "takes no 'stochastic_rounding'. Levels that do: msamp_o1",
        ),
        ("msamp_o1", {"fp8_params": True}, TypeError, "msamp_o1 takes no 'fp8_params'. Levels that do: bf16_with_fp8"),
        ("msamp_o2", {"stochastic_rounding": 1}, ValueError, "stochastic_rounding=1 must be True or False"),
        ("msamp_o3", {"rounding_seed": -1}, ValueError, r"rounding_seed=-1 must be an integer from 0 to 2\*\*32 - 1"),
        ("msamp_o3", {"gradient_release": "yes"}, ValueError, "gradient_release='yes' must be True or False"),
        (
            "msamp_o2",
            {"gradient_release": True, "half": "fp16"},
            ValueError,
            "gradient_release=True steps before all gradients are there.* Use half='bf16'",
        ),
        *(
            ("msamp_o1", {name: value}, ValueError, f"{name}={value!r} has no effect in bf16.* pass half='fp16' to msa")
            for name, value in {
                "loss_scale": 8.0,
                "initial_loss_scale": 8.0,
                "loss_scale_window": 8,
                "hysteresis": 8,
                "min_loss_scale": 8.0,
            }.items()
        ),
    ],
)
def test_a_bad_argument_is_named(level, options, error, message):
    with pytest.raises(error, match=message):
        LowPrecision(level, **options)
    if level in CHART:
        with pytest.raises(error, match=message):
            getattr(nemo_lowprec, level)(**options)


@pytest.mark.parametrize("level", LEVELS)
def test_arguments_are_keywords_only(level):
    with pytest.raises(TypeError, match="positional"):
        LEVELS[level]("hybrid")


@pytest.mark.parametrize("backend", ["te", "torch"])
@pytest.mark.parametrize("level", FP8_LEVELS)
def test_a_forced_backend_that_cannot_work_is_refused_before_training(level, backend):
    model = Net()
    before = {name: type(module) for name, module in model.named_modules()}
    with pytest.raises(ValueError, match=f"backend='{backend}' cannot run here: "):
        train(model, plugin(level, backend=backend))
    assert not model.losses and {name: type(module) for name, module in model.named_modules()} == before
    assert all(p.dtype == torch.float32 for p in model.parameters())


@pytest.mark.parametrize("level", ["bf16_with_mxfp8_mixed", "bf16_with_nvfp4_mixed"])
def test_blackwell_levels_say_what_they_need(level):
    model = Net()
    with pytest.raises(ValueError, match=r"need a Blackwell GPU .* or backend='reference' to emulate them"):
        train(model, plugin(level, backend="auto"))
    assert not model.losses


def test_fp16_weights_of_the_models_own_are_refused_at_fp16_amp():
    model = Net()
    model.head.half()
    with pytest.raises(ValueError, match=r"head.weight is FP16: .* Use fp16_mixed, .* or model.float\(\)"):
        train(model, "fp16_amp")
    assert not model.losses
    train(model, "fp16_mixed", max_steps=1)
    assert model.head.weight.dtype == torch.float32  # of the masters


def test_a_filter_that_matches_nothing_is_refused_before_training():
    model = Net()
    with pytest.raises(ValueError, match=r"'midd' matches no linear layer or norm of the model.*for example 'inp'"):
        train(model, plugin("bf16_with_fp8_mixed", convert=["midd"]))
    assert not model.losses
    train(model, plugin("bf16_with_fp8_mixed", convert=["mid"]), max_steps=1)  # the model is as good as new
    assert len(model.losses) == 1


@pytest.mark.parametrize("case", CASES)
def test_precision_given_twice_is_refused(case):
    with pytest.raises(ValueError, match="Received both `precision=bf16-mixed` and `plugins="):
        trainer(plugin(case), precision="bf16-mixed")
    with pytest.raises(MisconfigurationException, match="Received multiple values for Precision"):
        trainer([plugin(case), plugin("bf16_mixed")])


def test_the_other_lightnings_trainer_refuses_the_plugin_by_name():
    other = pytest.importorskip("pytorch_lightning")
    with pytest.raises(Exception, match=r"Found invalid type for plugin bf16_mixed\(\)"):
        other.Trainer(plugins=plugin("bf16_mixed"), accelerator="cpu")


def test_a_run_config_in_a_real_trainer_is_refused_by_name():
    pytest.importorskip("nemo_run")
    from nemo_lowprec import recipes

    with pytest.raises(MisconfigurationException, match=r"Found invalid type for plugin <Config\[bf16_mixed"):
        trainer(recipes.bf16_mixed())


@pytest.mark.parametrize("level", ["fp16_amp", "msamp_o2"])
def test_a_plugin_is_handed_to_processes_that_are_forked(level):
    fit = trainer(plugin(level), devices=2, strategy="ddp_fork", max_steps=2)
    fit.fit(Net(stepwise=True), loader())
    assert fit.world_size == 2 and fit.state.finished


@pytest.mark.parametrize("case", CASES)
def test_repr_reads_as_the_call(case):
    precision = plugin(case)
    again = eval(repr(precision), dict(LEVELS))  # it is a call of the level's function
    assert again.options == precision.options and again.level is precision.level
    assert precision.precision == level_of(case).name
