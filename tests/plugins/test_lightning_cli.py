"""LightningCLI: a level by its class_path, from a file and from the command line."""

import lightning.pytorch as pl
import pytest
import yaml
from support import CASES, Net, level_of, loader

jsonargparse = pytest.importorskip("jsonargparse")
LightningCLI = pytest.importorskip("lightning.pytorch.cli").LightningCLI


class Model(Net):
    """Net with arguments that a parser can read."""

    def __init__(self, dropout: float = 0.0):
        super().__init__(dropout)


class Data(pl.LightningDataModule):
    """The usual samples."""

    def train_dataloader(self):
        return loader()


def fit(folder, plugins, save=False, name="config.yaml"):
    config = {
        "trainer": {
            "accelerator": "cpu", "max_steps": 1, "logger": False, "enable_checkpointing": False,
            "enable_progress_bar": False, "enable_model_summary": False, "default_root_dir": str(folder),
            "plugins": plugins,
        }
    }  # fmt: skip
    (folder / name).write_text(yaml.safe_dump(config))
    saving = {} if save else {"save_config_callback": None}
    return LightningCLI(Model, Data, args=["fit", "--config", str(folder / name)], **saving)


@pytest.mark.parametrize("case", CASES)
def test_a_level_by_the_path_of_its_function(case, tmp_path):
    arguments = {"fp8_margin": 1} if level_of(case).scaling in ("delayed", "current") else {}
    arguments |= {"backend": "reference"} if level_of(case).has_fp8 else {}
    arguments |= {"fp8_params": True} if "+" in case else {}
    arguments |= {"loss_scale": 512.0} if level_of(case).has_loss_scale else {}
    cli = fit(tmp_path, {"class_path": f"nemo_lowprec.{level_of(case).name}", "init_args": arguments})
    precision = cli.trainer.precision_plugin
    assert precision.level is level_of(case) and arguments.items() <= precision.options.items()
    assert len(cli.model.losses) == 1


@pytest.mark.parametrize(
    "plugins",
    [
        {"class_path": "nemo_lowprec.LowPrecision", "init_args": {"level": "bf16_mixed"}},
        {
            "class_path": "nemo_lowprec.LowPrecision",
            "init_args": {"level": "bf16_with_fp8_mixed"},
            "dict_kwargs": {"fp8_margin": 2, "skip": ["mid"]},
        },
        [{"class_path": "nemo_lowprec.te_fp8"}],
    ],
)
def test_other_ways_to_name_a_level(plugins, tmp_path):
    cli = fit(tmp_path, plugins)
    assert type(cli.trainer.precision_plugin).__name__ == "LowPrecision" and len(cli.model.losses) == 1


def test_the_saved_config_runs_again(tmp_path):
    plugins = {"class_path": "nemo_lowprec.bf16_with_fp8_mixed", "init_args": {"fp8_margin": 1, "convert": ["mid"]}}
    first = fit(tmp_path, plugins, save=True, name="first.yaml")
    again = LightningCLI(
        Model, Data, args=["fit", "--config", str(tmp_path / "config.yaml")], save_config_callback=None
    )
    assert again.trainer.precision_plugin.options == first.trainer.precision_plugin.options
    assert again.trainer.precision_plugin.engine.columns.computation.conversion.low == ["mid"]


@pytest.mark.parametrize("arguments", [{"fp8_margn": 1}, {"fp8": "e5m2"}])
def test_a_bad_argument_ends_the_program_and_is_named(arguments, tmp_path, capsys):
    with pytest.raises(SystemExit):
        fit(tmp_path, {"class_path": "nemo_lowprec.bf16_with_fp8_mixed", "init_args": arguments})
    assert next(iter(arguments)) in capsys.readouterr().err
