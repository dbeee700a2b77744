"""The pages of other faces and of those who come from elsewhere: each block trains, or is what ``migrate`` makes."""

from __future__ import annotations

import runpy
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import accelerate
import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
import yaml
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, Dataset

import nemo_lowprec
from nemo_lowprec.cli import main
from nemo_lowprec.engine import Engine
from nemo_lowprec.report.monitor import read_run
from tests.documents import Block, block, python
from tests.faces import batches, make_model, make_optimizer
from tests.support import Net, loader

QUIET = {"accelerator": "cpu", "devices": 1, "max_steps": 1, "logger": False, "enable_progress_bar": False}


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The pages write into the working folder, and each may start an Accelerator."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_DISABLED", "true")
    yield
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()


def names_of(task: str = "vit", steps: int = 4) -> dict[str, Any]:
    """A model, its optimizer and data by the names that the pages have for them."""
    model, data = make_model(task), DataLoader(batches(task, steps), batch_size=None)  # type: ignore[arg-type]
    made = {"model": model, "optimizer": make_optimizer(model), "batches": data, "loader": data}
    others = {"torch": torch, "nemo_lowprec": nemo_lowprec, "device": "cpu"}
    return made | others | {"loss_of": lambda model, batch: model(**batch).loss}


def level_of_model(model: Any) -> str:
    engine = Engine.of(model)
    assert engine is not None
    return engine.level.name


def shorter(b: Block, *pairs: tuple[str, str]) -> Block:
    """The block with fewer steps or processes."""
    code = b.code
    for old, new in pairs:
        assert code.count(old) == 1
        code = code.replace(old, new)
    return Block(b.document, b.language, code)


# Scripts

MIGRATED = [
    ("from_transformer_engine.rst", "import torch", "from lightning.pytorch import Trainer"),
    ("from_accelerate.rst", *(f"from accelerate import Accelerator\n{second}" for second in ("from accel", "import"))),
    ("from_msamp.rst", "import msamp", "from nemo_lowprec import msamp"),
]  # fmt: skip


@pytest.mark.parametrize(("page", "before", "after"), MIGRATED)
def test_the_command_makes_the_second_block_of_the_first(page: str, before: str, after: str) -> None:
    for line in block(page, "nemo-lowprec migrate").lines:
        _, command, *arguments = shlex.split(line)
        Path(arguments[0]).write_text(block(page, before).code + "\n")
        assert main([command, *arguments]) == 0
    assert Path(arguments[0]).read_text() == block(page, after).code + "\n"


def test_transformer_engine_s_trainer_trains_at_the_level() -> None:
    made = python(block("from_transformer_engine.rst", "from lightning.pytorch import Trainer"))
    assert made["trainer"].precision_plugin.level.name == "bf16_with_fp8_mixed"


def test_ms_amp_s_loop_trains_and_its_strategy_is_a_trainer_s() -> None:
    names = python(block("from_msamp.rst", "from nemo_lowprec import msamp"), **names_of())
    assert level_of_model(names["model"]) == "msamp_o2" and names["loss"].isfinite()
    if not torch.cuda.is_available():  # asks for eight GPUs
        trainer = python(block("from_msamp.rst", "from lightning.pytorch import Trainer"))["trainer"]
        assert type(trainer.strategy).__name__ == "LowPrecisionShardedStrategy"


# Accelerate and transformers


def test_accelerate_trains_in_the_loop_and_by_a_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    start = "from accelerate import Accelerator\n"
    made = python(block("from_accelerate.rst", f"{start}from nemo_lowprec"), **names_of())
    assert level_of_model(made["model"]) == "bf16_with_fp8_mixed"

    path = Path("default_config.yaml")
    path.write_text(block("from_accelerate.rst", "fp8_config:").code)
    from nemo_lowprec.accelerate import prepare

    given = names_of() | {"prepare": prepare, "accelerator": made["accelerator"]}
    read = python(block("from_accelerate.rst", "from nemo_lowprec.accelerate import level_of"), **given)
    assert read["options"]["fp8_amax_history_len"] == 16 and level_of_model(read["model"]) == "te_fp8"
    migrated = python(block("from_accelerate.rst", f"{start}import nemo_lowprec"), **names_of())
    assert level_of_model(migrated["model"]) == "te_fp8"


def test_the_half_formats_of_accelerate_are_those_of_the_levels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    for precision, half in {"bf16": "bf16", "no": "bf16", "fp16": "fp16"}.items():
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        accelerator = accelerate.Accelerator(mixed_precision=precision)
        for level in ("fp16_mixed", "bf16_mixed", "msamp_o2"):
            agrees = level.partition("_")[0] in (half, "msamp")
            model = torch.nn.Linear(32, 32)
            if not agrees:
                with pytest.raises(ValueError, match="it trains with Accelerator"):
                    nemo_lowprec.accelerate.prepare(accelerator, model, level=level)
                continue
            model, _ = nemo_lowprec.accelerate.prepare(accelerator, model, level=level)
            engine = Engine.of(model)
            assert engine is not None and engine.level.autocast == half


def test_the_trainer_of_transformers_trains_at_the_level() -> None:
    class Samples(Dataset):
        def __len__(self) -> int:
            return 64

        def __getitem__(self, index: int) -> dict[str, Any]:
            return {name: values[index % 16] for name, values in batches("llama")[index // 16].items()}

    one = shorter(
        block("from_accelerate.rst", "from transformers import TrainingArguments"),
        ("max_steps=1000", "max_steps=1, use_cpu=True, disable_tqdm=True, report_to='none'"),
    )
    made = python(one, model=make_model("llama"), data=Samples())
    assert made["trainer"].state.global_step == 1 and level_of_model(made["model"]) == "msamp_o2"
    assert Path("outputs/tuned/model.safetensors").is_file()


# NeMo


def test_a_recipe_s_name_is_a_level_with_arguments(capsys: pytest.CaptureFixture) -> None:
    python(block("from_nemo.rst", "from nemo_lowprec import bf16_with_fp8_mixed"))
    assert capsys.readouterr().out.split() == ["hybrid", "delayed", "True", "16"]
    plugin = python(block("from_nemo.rst", "from nemo_lowprec import LowPrecision"))["plugin"]
    assert plugin.level.name == "bf16_with_fp8_current_scaling_mixed" and plugin.parsed.recipe.fp8_params
    layers = plugin.parsed.layers
    assert (layers.num_layers_at_start_in_half, layers.num_layers_at_end_in_half) == (2, 4)


# Fabric


def test_fabric_trains_clips_saves_and_watches() -> None:
    names = python(block("fabric.rst", "from lightning.fabric import Fabric"), **names_of("llama"))
    assert level_of_model(names["model"].module) == "bf16_with_fp8_mixed"
    python(block("fabric.rst", "watch = "), **names)
    before = names["loss_of"](names["model"], batches("llama")[0]).item()
    micro = python(block("fabric.rst", "for index, batch"), **names)
    assert micro["loss_of"](micro["model"], batches("llama")[0]).item() < before
    python(block("fabric.rst", "fabric.clip_gradients"), **names)
    python(block("fabric.rst", "state = "), **names)
    assert Path("run.ckpt").is_file() and read_run("runs/first").attempts


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[None]:
    """This process is the only one of a group; tests of the strategies have several."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("process_group")
def test_a_model_is_sharded_by_fabric_and_wrapped_by_ddp() -> None:
    one = shorter(
        block("fabric.rst", "import torch"),
        ("data_parallel_size=8", "data_parallel_size=1"),
        ("devices=8", "devices=1, accelerator='cpu'"),
    )
    names = names_of("llama", 8)
    names = python(one, **names)
    assert isinstance(next(names["model"].parameters()), DTensor)
    assert level_of_model(names["model"].module) == "msamp_o2"
    before = names["loss_of"](names["model"], batches("llama")[0]).item()
    python(block("fabric.rst", "for index, batch"), **names)
    assert names["loss_of"](names["model"], batches("llama")[0]).item() < before

    from nemo_lowprec import msamp

    names = python(block("from_msamp.rst", "from torch.nn.parallel"), msamp=msamp, **names_of())
    names["loss_of"](names["model"], batches("vit")[0]).backward()
    before = names["loss_of"](names["model"], batches("vit")[0]).item()
    names["optimizer"].step()
    assert names["loss_of"](names["model"], batches("vit")[0]).item() < before


# LightningCLI


class Model(Net):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__(dropout)


class Data(pl.LightningDataModule):
    def train_dataloader(self) -> Any:
        return loader()


def test_lightning_cli_takes_the_lines_and_the_file(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    project = ModuleType("my_project")
    project.MyModel, project.MyData = Model, Data  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "my_project", project)
    script = block("lightning_cli.rst", "from lightning.pytorch.cli")
    Path("train.py").write_text(script.code)
    fitted: list[pl.Trainer] = []
    fit = pl.Trainer.fit
    monkeypatch.setattr(pl.Trainer, "fit", lambda self, *a, **k: (fitted.append(self), fit(self, *a, **k)))
    short = [f"--trainer.{name}={value}" for name, value in QUIET.items() if name != "devices"]
    short.append("--trainer.enable_checkpointing=false")

    def run(line: str, *more: str) -> str:
        program, file, *words = shlex.split(line.partition(" > ")[0])
        assert (program, file) == ("python", "train.py")
        monkeypatch.setattr(sys, "argv", [file, *words, *more])
        try:
            runpy.run_path(file, run_name="__main__")
        except SystemExit as ended:
            assert ended.code == 0
        return str(capsys.readouterr().out)

    first, page, write, again = block("lightning_cli.rst", "python train.py fit").lines
    run(first, *short)
    assert repr(fitted[-1].precision_plugin) == "bf16_with_fp8_mixed(fp8_margin=1)"
    assert "--trainer.plugins.fp8_amax_history_len" in run(page)
    Path("config.yaml").write_text(run(write))
    run(again, *short, "--trainer.default_root_dir=again")
    assert "stochastic_rounding=True" in repr(fitted[-1].precision_plugin)

    config = yaml.safe_load(block("lightning_cli.rst", "trainer:").code)
    path = Path("mine.yaml")
    path.write_text(yaml.safe_dump(config | {"trainer": QUIET | config["trainer"]}))
    monkeypatch.setattr(sys, "argv", ["train.py", f"--config={path}"])
    python(shorter(script, ("parser_class=LevelArgumentParser", "parser_class=LevelArgumentParser, run=False")))
    monkeypatch.setattr(sys, "argv", ["train.py", "fit", "--trainer.plugins=nemo_lowprec.msamp_o2"])
    sys.argv.append("--trainer.plugins.fp8_margin=99")
    with pytest.raises(SystemExit):
        python(script)
    said = block("lightning_cli.rst", "error: ").code.split()
    assert capsys.readouterr().err.split() == said
