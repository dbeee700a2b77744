"""Accelerate's FP8 settings as levels."""

import warnings

import accelerate
import pytest
import yaml
from accelerate.commands.config.config_args import ClusterConfig
from accelerate.utils import FP8RecipeKwargs, MSAMPRecipeKwargs, TERecipeKwargs

from nemo_lowprec.accelerate import level_of
from nemo_lowprec.chart import get_level
from nemo_lowprec.chart.options import parse_options

DEFAULTS = {"fp8": "hybrid", "fp8_margin": 0, "interval": 1, "fp8_amax_history_len": 1024,
            "fp8_amax_compute_algo": "max", "override_linear_precision": (False, False, False)}  # fmt: skip
EVAL = {"use_autocast_during_eval": True}
WRITTEN = {  # by the questions of accelerate config
    "backend": "TE", "margin": 2, "interval": 3, "fp8_format": "E4M3", "amax_history_length": 16,
    "amax_compute_algorithm": "max", "override_linear_precision": [False, False, True], **EVAL,
}  # fmt: skip
READ = {"fp8": "e4m3", "fp8_margin": 2, "interval": 3, "fp8_amax_history_len": 16, "fp8_amax_compute_algo": "max",
        "override_linear_precision": (False, False, True)}  # fmt: skip


@pytest.fixture
def backends(monkeypatch):
    """Accelerate believes that the packages of its FP8 backends are there."""
    for name in ("is_msamp_available", "is_transformer_engine_available"):
        monkeypatch.setattr(accelerate.utils.dataclasses, name, lambda: True)


def read(settings):
    level, options = level_of(settings)
    parse_options(get_level(level), options)  # which checks the values
    return level, options


def test_recipes_of_accelerate(backends):
    assert read(TERecipeKwargs(**EVAL)) == ("te_fp8", DEFAULTS)
    recipe = TERecipeKwargs(
        margin=2, interval=3, fp8_format="e4m3", amax_history_len=16, amax_compute_algo="max",
        override_linear_precision=(False, False, True), **EVAL,
    )  # fmt: skip
    assert read(recipe) == ("te_fp8", READ)
    assert read(MSAMPRecipeKwargs()) == ("msamp_o2", {})
    with pytest.warns(FutureWarning):
        old = [FP8RecipeKwargs(backend="msamp", opt_level="O1"), FP8RecipeKwargs(backend="te", margin=1, **EVAL)]
    assert read(old[0]) == ("msamp_o1", {}) and read(old[1]) == ("te_fp8", {**DEFAULTS, "fp8_margin": 1})


def test_files_of_accelerate_config(tmp_path):
    path = tmp_path / "default_config.yaml"
    ClusterConfig(
        compute_environment="LOCAL_MACHINE", distributed_type="NO", mixed_precision="fp8", use_cpu=False, debug=False,
        fp8_config=WRITTEN,
    ).to_yaml_file(str(path))  # fmt: skip
    assert read(path) == read(str(path)) == ("te_fp8", READ)
    path.write_text(
        yaml.safe_dump({"mixed_precision": "fp8", "fp8_config": {"fp8_backend": "msamp", "fp8_opt_level": "O3"}})
    )
    assert read(path) == ("msamp_o3", {})
    path.write_text("mixed_precision: fp8\n")
    with pytest.raises(ValueError, match=r"default_config\.yaml has no fp8_config"):
        level_of(path)


def test_mappings_with_the_names_of_each_release():
    assert read({"backend": "TE", **EVAL}) == ("te_fp8", DEFAULTS)
    documented = {"fp8_backend": "te", "fp8_format": "E4M3", "fp8_margin": 2, "fp8_interval": 3, "amax_history_len": 16,
                  "amax_compute_algo": "max", "override_linear_precision": "(false, false, true)", **EVAL}  # fmt: skip
    assert read(documented) == ("te_fp8", READ)
    assert read({"backend": "te", "override_linear_precision": False, **EVAL}) == ("te_fp8", DEFAULTS)
    assert read({"backend": "MSAMP", "optimization_level": "O1"}) == ("msamp_o1", {})


def test_evaluation_in_fp8_is_said_once_a_level():
    with pytest.warns(UserWarning, match="converted layers compute in FP8 in evaluation, too"):
        level_of({"backend": "TE"})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        level_of({"backend": "TE", **EVAL})


def test_settings_without_an_effect_under_accelerate_are_named(backends):
    for name, value in {"interval": 3, "override_linear_precision": (False, False, True)}.items():
        with pytest.warns(UserWarning, match=rf"^{name}=.* has an effect here\. Transformer Engine 2\.20 ignores this"):
            assert read({"backend": "TE", name: value, **EVAL}) == ("te_fp8", {**DEFAULTS, name: value})
    with pytest.warns(
        UserWarning, match="Accelerate does not pass it on, and Transformer Engine computes with .* 'max'"
    ):
        read_back = read({"backend": "TE", "amax_compute_algo": "most_recent", **EVAL})
    assert read_back == ("te_fp8", {**DEFAULTS, "fp8_amax_compute_algo": "most_recent"})
    assert "amax_compute_algo" not in TERecipeKwargs(amax_compute_algo="most_recent").to_kwargs()


@pytest.mark.parametrize(("settings", "error", "message"), [
    ({"backend": "AO"}, ValueError, "bf16_with_fp8_current_scaling_mixed scales as torchao's recipe 'tensorwise'"),
    ({"backend": "cuda"}, ValueError, "The FP8 backend is CUDA"),
    ({}, ValueError, "The FP8 backend is NONE, and must be one of: TE, MSAMP"),
    ({"backend": "TE", "opt_level": "O2"}, ValueError, "opt_level='O2' has no effect with the FP8 backend TE"),
    ({"backend": "MSAMP", "margin": 1}, ValueError, "margin=1 has no effect with the FP8 backend MSAMP"),
    ({"backend": "MSAMP", "opt_level": "O4"}, ValueError, "opt_level='O4' must be one of: O1, O2, O3"),
    ({"backend": "TE", "fp8_format": "E5M2"}, ValueError, "must be HYBRID or E4M3"),
    ({"backend": "TE", "use_mxfp8_block_scaling": True}, ValueError, "bf16_with_mxfp8_mixed"),
    ({"backend": "TE", "marginn": 1}, TypeError, "unknown 'marginn'"),
    ({"backend": "TE", "override_linear_precision": "(false, yes)", **EVAL}, ValueError, "three booleans"),
    ({"backend": "TE", "override_linear_precision": True, **EVAL}, ValueError, "three booleans"),
    ({"backend": "TE", "margin": "2", **EVAL}, ValueError, "fp8_margin"),
    (object(), ValueError, "must be a recipe of Accelerate"),
])  # fmt: skip
def test_what_has_no_meaning_here_is_refused_by_name(settings, error, message):
    with pytest.raises(error, match=message):
        read(settings)
