"""LightningCLI: arguments of every kind, saved configs, strategies, and messages of ``LevelArgumentParser``."""

import re
from inspect import signature

import lightning.pytorch as pl
import pytest
import yaml
from torch.utils.data import DataLoader

from nemo_lowprec.chart import ALIASES
from nemo_lowprec.plugins import ALIASED, LEVELS, LowPrecision
from tests import faces
from tests.plugins.test_lightning_cli import Data, Model

pytest.importorskip("jsonargparse")
cli = pytest.importorskip("lightning.pytorch.cli")
from nemo_lowprec.plugins.argument_parser import LevelArgumentParser  # noqa: E402

QUIET = {
    "accelerator": "cpu", "devices": 1, "max_steps": 1, "logger": False, "enable_checkpointing": False,
    "enable_progress_bar": False, "enable_model_summary": False,
}  # fmt: skip
O2 = "nemo_lowprec.msamp_o2"
SHARDED = "nemo_lowprec.strategies.LowPrecisionShardedStrategy"
ANY_PARSER = pytest.mark.parametrize("parser", [cli.LightningArgumentParser, LevelArgumentParser])


class Digits(pl.LightningDataModule):
    """The batches of a task."""

    def train_dataloader(self):
        return DataLoader(faces.batches("vit"), batch_size=None)


def only_mid(name, module):
    return name == "mid"


def run(*words, parser=LevelArgumentParser, fit=True, model=Model, data=Data, save=False, trainer=(), **options):
    saving = {} if save else {"save_config_callback": None}
    return cli.LightningCLI(
        model, data, args=["fit", *words] if fit else list(words), run=fit, parser_class=parser,
        trainer_defaults=QUIET | dict(trainer), **saving, **options,
    )  # fmt: skip


def made(*words, **options):
    """The plugin that a command line makes, without training."""
    return run(*words, fit=False, **options).trainer.precision_plugin


def one_sentence(capsys, *words):
    with pytest.raises(SystemExit) as ended:
        run(*words, fit=False)
    printed = capsys.readouterr().err
    assert ended.value.code == 2 and printed.startswith("error: ") and printed.count("\n") == 1
    return printed


@pytest.mark.parametrize("level", faces.FACE_LEVELS)
def test_the_losses_are_the_trainers(level):
    trained = run(
        f"--trainer.plugins=nemo_lowprec.{level}", "--model.task=vit", model=faces.Task, data=Digits,
        trainer={"max_steps": faces.STEPS}, seed_everything_default=False,
    )  # fmt: skip
    assert trained.model.losses == faces.trainer_losses("vit", level)


@ANY_PARSER
@pytest.mark.parametrize(
    "words,given",
    [
        (
            "fp8_margin=1 override_linear_precision=[false,false,true] convert=[mid,inp] skip=[mid] weight_cache=true "
            "activations=fp8 states=fp8+fp8 graphs=false",
            "fp8_margin=1, override_linear_precision=(False, False, True), convert=('mid', 'inp'), skip=('mid',), "
            "weight_cache=True, activations='fp8', states='fp8+fp8', graphs=False",
        ),
        ("convert=null activations=null loss_scale=null graphs=auto weight_cache=auto skip=[]", "convert=None"),
        (f"convert={__name__}.only_mid half=fp16 loss_scale=8", f"convert={only_mid!r}, half='fp16', loss_scale=8.0"),
        ("convert=auto", ""),
    ],
    ids=["values", "null and auto", "a function", "auto"],
)
def test_arguments_of_each_kind(words, given, parser):
    plugin = made(f"--trainer.plugins={O2}", *[f"--trainer.plugins.{word}" for word in words.split()], parser=parser)
    assert sorted(repr(plugin)) == sorted(f"msamp_o2({given})")


@pytest.mark.parametrize("name", [*LEVELS, *ALIASED])
def test_each_level_and_alias_has_a_help_page(name, capsys):
    with pytest.raises(SystemExit) as ended:
        LevelArgumentParser().parse_args(["fit", f"--trainer.plugins.help=nemo_lowprec.{name}"])
    page = capsys.readouterr().out
    assert ended.value.code == 0 and page.startswith(f"usage: --trainer.plugins=nemo_lowprec.{name} [options]\n")
    assert set(re.findall(r"^  --trainer\.plugins\.(\w+)", page, re.M)) == set(
        signature((LEVELS | ALIASED)[name]).parameters
    )


def test_an_alias_is_its_level_with_the_arguments():
    name = "nemotron_h_bf16_with_fp8_current_scaling_mixed"
    plugin = made(f"--trainer.plugins=nemo_lowprec.{name}", "--trainer.plugins.num_layers_at_end_in_half=1")
    assert repr(plugin) == repr(
        LowPrecision(ALIASES[name].level, **{**ALIASES[name].options, "num_layers_at_end_in_half": 1})
    )


@ANY_PARSER
def test_the_command_line_overrides_an_argument_of_a_file(tmp_path, parser):
    file = tmp_path / "config.yaml"
    arguments = {"fp8_margin": 1, "skip": ["mid"]}
    for plugins in (
        {"class_path": O2, "init_args": arguments},
        {"class_path": "nemo_lowprec.LowPrecision", "init_args": {"level": "msamp_o2"}, "dict_kwargs": arguments},
    ):
        file.write_text(yaml.safe_dump({"trainer": {"plugins": plugins}}))
        assert repr(made(f"--config={file}", parser=parser)) == "msamp_o2(fp8_margin=1, skip=('mid',))"
    file.write_text(yaml.safe_dump({"trainer": {"plugins": {"class_path": O2, "init_args": arguments}}}))
    overridden = made(f"--config={file}", "--trainer.plugins.fp8_margin=2", parser=parser)
    assert repr(overridden) == "msamp_o2(fp8_margin=2, skip=('mid',))"
    other = made(f"--config={file}", "--trainer.plugins=nemo_lowprec.bf16_mixed", parser=parser)
    assert repr(other) == "bf16_mixed()"


@ANY_PARSER
@pytest.mark.parametrize(
    "plugins",
    [O2, [O2], [{"class_path": O2}], [{"class_path": O2}, "lightning.pytorch.plugins.io.TorchCheckpointIO"]],
    ids=["short", "list of short", "list", "two plugins"],
)
def test_forms_in_a_file(plugins, tmp_path, parser):
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"trainer": {"plugins": plugins}}))
    assert made(f"--config={tmp_path / 'config.yaml'}", parser=parser).level.name == "msamp_o2"


@ANY_PARSER
def test_a_printed_config_starts_the_same_run(tmp_path, capsys, parser):
    words = [f"--trainer.plugins={O2}", "--trainer.plugins.fp8_margin=1", "--seed_everything=3"]
    words += ["--trainer.plugins.override_linear_precision=[false,true,false]"]
    words += [f"--trainer.plugins.convert={__name__}.only_mid", "--trainer.plugins.loss_scale=null"]
    with pytest.raises(SystemExit):
        made(*words, "--print_config", parser=parser)
    file = tmp_path / "printed.yaml"
    file.write_text(capsys.readouterr().out)
    first, again = run(*words, parser=parser, fit=False), run(f"--config={file}", parser=parser, fit=False)
    for each in (first, again):
        each.trainer.fit(each.model, each.datamodule)
    assert repr(again.trainer.precision_plugin) == repr(first.trainer.precision_plugin)
    assert again.trainer.precision_plugin.parsed.layers.convert is only_mid
    assert again.model.losses == first.model.losses and len(first.model.losses) == 1


@ANY_PARSER
def test_a_config_is_saved_beside_the_logs_and_starts_the_same_run(tmp_path, parser):
    words = [f"--trainer.plugins={O2}", "--trainer.plugins.skip=[mid]", "--seed_everything=3"]
    trainer = {"logger": True, "default_root_dir": str(tmp_path)}
    first = run(*words, parser=parser, save=True, trainer=trainer)
    (saved,) = tmp_path.rglob("config.yaml")
    assert saved.parent.samefile(first.trainer.log_dir)
    again = run(f"--config={saved}", parser=parser, trainer=trainer)
    assert again.model.losses == first.model.losses
    assert repr(again.trainer.precision_plugin) == "msamp_o2(skip=('mid',))"


def test_subclass_mode(tmp_path):
    words = [
        f"--model={Model.__module__}.Model",
        "--model.dropout=0.5",
        f"--data={Data.__module__}.Data",
        f"--trainer.plugins={O2}",
    ]
    trained = run(
        *words, model=pl.LightningModule, data=pl.LightningDataModule, subclass_mode_model=True, subclass_mode_data=True
    )
    assert trained.model.drop.p == 0.5 and len(trained.model.losses) == 1


@ANY_PARSER
@pytest.mark.parametrize(
    "words,shard_size",
    [
        (["--trainer.strategy=lowprec_sharded"], None),
        ([f"--trainer.strategy={SHARDED}", "--trainer.strategy.shard_size=1"], 1),
    ],
    ids=["name", "class"],
)
def test_strategies(words, shard_size, parser):
    made = run(*words, "--trainer.plugins=nemo_lowprec.bf16_mixed", fit=False, parser=parser)
    assert type(made.trainer.strategy).__name__ == "LowPrecisionShardedStrategy"
    assert made.trainer.strategy.agreement()["shard_size"] == shard_size


@pytest.mark.parametrize(
    "words,sentence",
    [
        (["fp8_margn=1"], "msamp_o2 has no argument 'fp8_margn'. It takes: .* Did you mean 'fp8_margin'"),
        (["fp8_params=true"], "msamp_o2 takes no 'fp8_params'. Levels that do: [^?]*$"),
        (["fp8=e5m2"], "fp8='e5m2' is no FP8 format"),
        (["fp8_margin=99"], "fp8_margin=99 must be an integer of at least -1 and at most 8"),
        (["fp8_margin=much"], "fp8_margin='much' must be an integer"),
        (["override_linear_precision=[true]"], "override_linear_precision="),
        (["convert=mid"], "convert='mid' must be one of: auto or a list or a function or None"),
        (["graphs=perhaps"], "graphs='perhaps' must be 'auto', True or False"),
        (["loss_scale=8"], "loss_scale=8.0 has no effect in bf16"),
    ],
    ids=lambda words: words[0].partition("=")[0] if isinstance(words, list) else "",
)
def test_a_wrong_argument_is_one_sentence(words, sentence, capsys):
    printed = one_sentence(capsys, f"--trainer.plugins={O2}", *[f"--trainer.plugins.{word}" for word in words])
    assert re.match(f"error: {sentence}", printed)


def test_a_wrong_argument_in_a_file_is_one_sentence(tmp_path, capsys):
    file = tmp_path / "config.yaml"
    for node, sentence in (
        ({"class_path": O2, "init_args": {"fp8_margn": 1}}, "msamp_o2 has no argument 'fp8_margn'"),
        ({"class_path": O2, "init_args": {"fp8_margin": 99}}, "fp8_margin=99 must be"),
        (
            {"class_path": "nemo_lowprec.LowPrecision", "init_args": {"level": "msamp_o4"}},
            "Unknown precision level 'msamp_o4'",
        ),
        ("msamp_o2", "msamp_o2 is no import path. Write nemo_lowprec.msamp_o2."),
    ):
        for plugins in (node, [node]):
            file.write_text(yaml.safe_dump({"trainer": {"plugins": plugins}}))
            assert sentence in one_sentence(capsys, f"--config={file}")


def test_a_wrong_argument_of_a_strategy_is_one_sentence(capsys):
    printed = one_sentence(capsys, f"--trainer.strategy={SHARDED}", "--trainer.strategy.shard_sze=2")
    assert printed == "error: LowPrecisionShardedStrategy has no argument 'shard_sze'. Did you mean 'shard_size'?\n"


def test_other_mistakes_keep_lightnings_message(capsys):
    with pytest.raises(SystemExit):
        made("--trainer.max_steps=many")
    assert 'Parser key "trainer.max_steps"' in capsys.readouterr().err
