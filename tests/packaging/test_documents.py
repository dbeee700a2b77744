"""Every command and every piece of Python in README.rst and docs/ runs as printed.

What takes long is made short by overrides behind the printed line; what needs a GPU runs up to where it needs one.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader

import nemo_lowprec
from benchmarks.screenshots import MOST_BYTES
from nemo_lowprec import CHART
from nemo_lowprec.conf.compare_line import CompareLine
from nemo_lowprec.report.findings import LevelDiffersError
from nemo_lowprec.report.monitor import read_run
from nemo_lowprec.report.profile.step_profile import read_profile
from tests.commands import answer
from tests.documents import DOCUMENTS, ROOT, block, blocks, inline_commands, python
from tests.processes import of_a_shell

SHORT = [
    *("trainer.max_steps=1", "trainer.val_check_interval=1", "trainer.limit_val_batches=1"),
    *("trainer.accumulate_grad_batches=1", "trainer.accelerator=cpu", "trainer.enable_progress_bar=false"),
]
SIZES = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16,
}  # fmt: skip
SMALL = [
    *(f"model.config.{name}={size}" for name, size in SIZES.items()),
    *("data.seq_length=16", "data.micro_batch_size=2", "data.validation_samples=8", "data.num_workers=0"),
]
WITHOUT_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="asks for more GPUs than a machine may have")

# Pages of faces and of those who come from elsewhere, with the first words of their blocks.
GUIDES = {
    "from_transformer_engine": ("import torch", "nemo-lowprec migrate", "from lightning.pytorch import Trainer"),
    "from_msamp": (
        *("import msamp", "nemo-lowprec migrate", "from nemo_lowprec import msamp", "from torch.nn.parallel"),
        "from lightning.pytorch import Trainer",
    ),
    "from_accelerate": (
        *(f"from accelerate import Accelerator\n{second}" for second in ("from nemo", "from accel", "import nemo")),
        *("nemo-lowprec migrate", "fp8_config:"),
        *("from nemo_lowprec.accelerate import level_of", "from transformers import TrainingArguments"),
    ),
    "from_nemo": ("from nemo_lowprec import bf16_with_fp8_mixed", "from nemo_lowprec import LowPrecision"),
    "fabric": (
        *("from lightning.fabric import Fabric", "fabric.clip_gradients", "for index, batch", "import torch"),
        *("state = ", "watch = "),
    ),
    "lightning_cli": ("from lightning.pytorch.cli", "python train.py fit", "trainer:"),
}
# Blocks that another test runs, or none can: the first words, and where or why.
ELSEWHERE = {
    ("README.rst", "python3 -m venv .venv && .venv/bin/pip install -c constraints.txt -e '.[recipes]'"): ".ci/run",
    ("README.rst", "python3 -m venv .venv && .venv/bin/pip install -c constraints.txt -e '.[test]'"): ".ci/run",
    ("quickstart.rst", "python3 -m venv .venv"): ".ci/run, which installs [test]",
    ("planning.rst", "nemo-lowprec plan model=llama3_70b precision=msamp_o3"): "tests/cli/test_plan.py",
    ("planning.rst", "nemo-lowprec plan model=llama3_70b precision=bf16_mixed"): "tests/cli/test_plan.py",
    ("launching.rst", "torchrun --nnodes"): "tests/packaging/test_launching.py",
    ("launching.rst", "#!/bin/bash\n#SBATCH"): "tests/packaging/test_launching.py",
    ("launching.rst", "import nemo_run as run"): "tests/packaging/test_launching.py",
    ("megatron.rst", "from nemo.collections import llm"): "tests/megatron/test_in_nemo.py",
    **{(f"{page}.rst", start): "tests/packaging/test_guides.py" for page, starts in GUIDES.items() for start in starts},
    ("from_accelerate.rst", "pip install ./distributions/msamp"): "tests/packaging/test_msamp.py",
    ("from_accelerate.rst", "accelerator = Accelerator(mixed_precision"): "tests/packaging/test_msamp.py",
    ("from_nemo.rst", "from nemo.collections import llm"): "tests/megatron/test_in_nemo.py",
    ("megatron.rst", "pip install torch=="): "an environment of its own, of several gigabytes",
}
HERE = {
    ("README.rst", "from lightning.pytorch import Trainer"),
    ("README.rst", "model, optimizer = nemo_lowprec.prepare("),
    ("index.rst", "from lightning.pytorch import Trainer"),
    ("quickstart.rst", "import torch\nfrom lightning.pytorch import"),
    ("quickstart.rst", "import nemo_lowprec\n\nmodel = MyModel()"),
    ("quickstart.rst", "model, optimizer = nemo_lowprec.initialize("),
    ("quickstart.rst", "nemo-lowprec levels"),
    ("quickstart.rst", "import nemo_run as run"),
    ("quickstart.rst", "nemo-lowprec report runs/quick"),
    ("your_text.rst", "nemo-lowprec prepare-data"),
    ("your_text.rst", "nemo-lowprec pretrain -m"),
    ("your_text.rst", "defaults:"),
    ("your_text.rst", "nemo-lowprec pretrain --config-dir"),
    ("your_text.rst", "nemo-lowprec export"),
    ("your_text.rst", "model = transformers."),
    ("processes.rst", "Trainer(plugins=msamp_o2(), strategy="),
    ("megatron.rst", 'Trainer(plugins=msamp_o2(half="fp16"), strategy=MegatronStrategy('),
    ("extending.rst", "from dataclasses import replace"),
    ("vision.rst", "import torch\nfrom lightning.pytorch import"),
    ("experts.rst", "import torch\nfrom transformers import"),
    *((f"levels/{name}.rst", "from lightning.pytorch import Trainer") for name in CHART),
    ("launching.rst", "nemo-lowprec pretrain model=llama3_8b"),
    ("megatron.rst", "from lightning.pytorch import Trainer"),
    ("advising.rst", "nemo-lowprec plan model=llama3_8b"),
    ("advising.rst", "nemo-lowprec advise"),
    ("advising.rst", "import nemo_lowprec\n\nadvice"),
    ("fine_tuning.rst", "import torch\nfrom lightning.pytorch import"),
    ("fine_tuning.rst", "import nemo_lowprec\nfrom peft import PeftModel"),
    ("watching.rst", "nemo-lowprec pretrain monitor=on\n"),
    ("profiling.rst", "nemo-lowprec profile"),
    ("profiling.rst", "from nemo_lowprec import bf16_with_fp8_mixed"),
    ("watching.rst", "from nemo_lowprec import PrecisionMonitor"),
    ("watching.rst", "nemo-lowprec pretrain monitor=on hydra.run.dir"),
    ("watching.rst", "nemo-lowprec compare"),
    ("watching.rst", "model, optimizer = nemo_lowprec.prepare("),
    ("watching.rst", "nemo-lowprec inspect"),
    ("watching.rst", "nemo-lowprec doctor"),
    ("watching.rst", "from lightning.pytorch import Trainer"),
    ("watching.rst", "nemo-lowprec audit"),
}


def test_each_block_is_run_somewhere() -> None:
    starts = [*HERE, *ELSEWHERE]
    code = [b for b in blocks() if b.language != "text"]  # text is what a command prints
    for b in code:
        of = [start for start in starts if start[0] == b.document and b.code.startswith(start[1])]
        assert len(of) == 1, (b, of)
    for document, start in starts:
        assert block(document, start) in code
    for place in ELSEWHERE.values():
        assert " " in place or (ROOT / place).is_file()


def run(line: str, folder: Path, more: list[str] | None = None, timeout: int = 300) -> str:
    """A line as a shell reads it, with ``more`` behind it; what it prints."""
    scripts = Path(sys.executable).parent
    env = {**of_a_shell(), "PATH": f"{scripts}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        " ".join([line, *(f"'{word}'" for word in more or [])]),
        shell=True, cwd=folder, env=env, capture_output=True, text=True, timeout=timeout, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0, (line, done.stdout, done.stderr)
    return done.stdout


def run_at_once(line: str, folder: Path, more: list[str]) -> str:
    """The same without a shell, in a process that need not import torch first."""
    program, *words = shlex.split(line)
    done = answer(folder, [*words, *more])
    assert (program, done.status) == ("nemo-lowprec", 0), (line, done.printed)
    return done.printed


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder where the first run leaves the data that it prepares."""
    return tmp_path_factory.mktemp("place")


@WITHOUT_GPU
def test_the_first_example_is_a_trainer() -> None:
    trainer = python(block("README.rst", "from lightning.pytorch import Trainer"))["trainer"]
    assert trainer.precision_plugin.level.name == "msamp_o2"
    from nemo_lowprec import LowPrecision

    assert LowPrecision("msamp_o2").level.name == "msamp_o2"
    with pytest.raises(ValueError, match="Precision 'msamp_o2' is invalid"):
        Trainer(precision="msamp_o2")
    with pytest.raises(MisconfigurationException, match="invalid type for plugin"):
        Trainer(plugins="msamp_o2")


@WITHOUT_GPU
def test_the_examples_of_strategies_are_trainers(monkeypatch: pytest.MonkeyPatch) -> None:
    from nemo_lowprec import msamp_o2
    from nemo_lowprec.strategies import MegatronStrategy

    monkeypatch.setattr("nemo_lowprec.strategies.megatron.check_megatron", lambda: None)
    starts = {
        "processes.rst": "Trainer(plugins=msamp_o2(), ",
        "megatron.rst": 'Trainer(plugins=msamp_o2(half="fp16"), ',
    }
    for page, start in starts.items():
        python(block(page, f"{start}strategy="), Trainer=Trainer, msamp_o2=msamp_o2, MegatronStrategy=MegatronStrategy)


@pytest.mark.parametrize("name", CHART)
def test_the_example_of_a_level_s_page_is_a_trainer(name: str) -> None:
    trainer = python(block(f"levels/{name}.rst", "from lightning.pytorch import Trainer"))["trainer"]
    assert trainer.precision_plugin.level is CHART[name] and trainer.precision_plugin.options


def test_the_rows_of_the_other_examples_are_trained() -> None:
    trainer = python(block("index.rst", "from lightning.pytorch import Trainer"))["trainer"]
    assert trainer.precision_plugin.level is CHART["bf16_with_fp8_mixed"]
    trainer = python(block("extending.rst", "from dataclasses import replace"))["trainer"]
    level = trainer.precision_plugin.level
    assert (level.name, level.optimizer_states, level.weight) == ("bf16_with_low_bit_adam", ("fp8", "fp16"), "bf16")


@WITHOUT_GPU
def test_the_example_of_megatron_core_gets_to_its_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    fitted: list[Any] = []
    monkeypatch.setattr("nemo_lowprec.strategies.megatron.check_megatron", lambda: None)
    monkeypatch.setattr(Trainer, "fit", lambda self, *args, **kwargs: fitted.append((self, args, kwargs)))
    python(block("megatron.rst", "from lightning.pytorch import Trainer"))
    ((trainer, (model,), kwargs),) = fitted
    assert trainer.strategy.layout.tensor == 2 and model.hparams["preset"] == "llama3_8b"
    assert kwargs["datamodule"].seq_length == 8192


def test_the_recipe_is_one_that_nemo_run_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    import fiddle as fdl
    import nemo_run

    handed: dict[str, Any] = {}
    monkeypatch.setattr(nemo_run, "run", lambda recipe, executor: handed.update(recipe=recipe, executor=executor))
    python(block("quickstart.rst", "import nemo_run as run"))
    assert fdl.build(handed["recipe"].trainer.plugins).level.name == "fp16_mixed"
    assert isinstance(handed["executor"], nemo_run.LocalExecutor)


@pytest.mark.parametrize(
    ("page", "call", "level"),
    [("README.rst", "prepare", "bf16_with_fp8_mixed"), ("quickstart.rst", "initialize", "msamp_o2")],
)
def test_a_loop_of_one_s_own(page: str, call: str, level: str) -> None:
    from nemo_lowprec.engine import Engine

    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    names: dict[str, Any] = {"model": model, "optimizer": torch.optim.AdamW(model.parameters()), "torch": torch}
    names |= {"nemo_lowprec": nemo_lowprec, "device": "cpu", "batches": [torch.ones(16, 32)]}
    before = [p.detach().float().clone() for p in model.parameters()]
    start = f"model, optimizer = nemo_lowprec.{call}("
    made = python(block(page, start), loss_of=lambda model, batch: model(batch).float().sum(), **names)
    if "loss" not in made:  # the block has no loop
        made["model"](torch.ones(16, 32)).sum().backward()
        made["optimizer"].step()
    engine = Engine.of(made["model"])
    assert engine is not None and engine.level.name == level
    for p, old in zip(made["model"].parameters(), before, strict=True):
        assert not torch.equal(p.detach().float(), old)


def test_the_model_of_the_quickstart_trains_under_the_trainer_and_in_a_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names = python(block("quickstart.rst", "import torch\nfrom lightning"))
    assert names["trainer"].global_step == 16 and (tmp_path / "last.ckpt").is_file()
    plain = names["MyModel"]()
    plain.load_state_dict(torch.load(tmp_path / "last.ckpt", weights_only=False)["state_dict"])
    loss = python(block("quickstart.rst", "import nemo_lowprec\n\nmodel = MyModel()"), **names)["loss"]
    assert loss.isfinite()


def test_the_first_commands_and_what_is_made_of_their_run(place: Path) -> None:
    levels, pretrain, recipe = block("quickstart.rst", "nemo-lowprec levels").lines
    assert "bf16_with_fp8_subchannel_scaling_mixed" in run(levels, place)
    assert "Pretraining" in run(pretrain, place, [*SHORT[1:], "trainer.max_steps=2"])
    assert "Pretraining" in run_at_once(recipe, place, SHORT)
    report, look, export = block("quickstart.rst", "nemo-lowprec report runs/quick").lines
    assert run_at_once(report, place, []).strip() == "runs/quick/report.html"
    assert "Level        bf16_with_fp8_mixed(" in run_at_once(look, place, [])
    run_at_once(export, place, [])
    assert (place / "my_llama" / "model.safetensors").is_file()


def test_text_of_one_s_own_is_prepared_trained_on_compared_and_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = tmp_path / "my_texts"
    texts.mkdir()
    for i in range(400):
        (texts / f"{i}.txt").write_text(f"Text number {i}: {' '.join(map(str, range(i, i + 300)))}\n")
    prepare, pretrain = block("your_text.rst", "nemo-lowprec prepare-data").lines
    run_at_once(prepare, tmp_path, [])
    assert "Pretraining" in run_at_once(pretrain, tmp_path, [*SHORT, *SMALL, "hydra.run.dir=run"])
    (sweep,) = block("your_text.rst", "nemo-lowprec pretrain -m").lines
    table = run_at_once(sweep, tmp_path, [*SHORT, *SMALL]).rpartition("Runs of this sweep")[2]
    assert "0_bf16_mixed" in table and "1_msamp_o2" in table and "failed" not in table

    shutil.copy(tmp_path / "run" / "checkpoints" / "last.ckpt", tmp_path)
    (export,) = block("your_text.rst", "nemo-lowprec export").lines
    run_at_once(export, tmp_path, [])
    import transformers

    monkeypatch.chdir(tmp_path)
    model = python(block("your_text.rst", "model = transformers."), transformers=transformers)["model"]
    assert model.dtype == torch.bfloat16


def test_adapters_under_the_trainer_and_in_a_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoModelForCausalLM, LlamaConfig

    monkeypatch.chdir(tmp_path)
    config = LlamaConfig(vocab_size=64, use_cache=False, **SIZES)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained("llama")
    ids = torch.randint(64, (2, 2, 9), generator=torch.Generator().manual_seed(0))
    batches = DataLoader([{"input_ids": tokens, "labels": tokens} for tokens in ids], batch_size=None)
    names = python(block("fine_tuning.rst", "import torch\nfrom lightning"), batches=batches)
    assert names["trainer"].global_step == 2 and (tmp_path / "adapter" / "adapter_model.safetensors").is_file()
    model = python(block("fine_tuning.rst", "import nemo_lowprec\nfrom peft"), **names)["model"]
    merged, base = (AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32) for name in ("tuned", "llama"))
    assert merged.state_dict().keys() == base.state_dict().keys() and model.base_model is not None
    weight, before = (m.model.layers[0].mlp.up_proj.weight for m in (merged, base))
    assert 0 < (weight - before).abs().max() < 0.01


def test_a_vision_model_is_fine_tuned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.faces import batches, make_model

    monkeypatch.chdir(tmp_path)
    make_model("vit").save_pretrained("vit")
    images = DataLoader(batches("vit", 4), batch_size=None)  # type: ignore[arg-type]
    names = python(block("vision.rst", "import torch\nfrom lightning"), images=images)
    assert names["trainer"].global_step == 4 and names["trainer"].precision_plugin.level.name == "msamp_o2"
    assert (tmp_path / "tuned_vit" / "model.safetensors").is_file()


def test_experts_are_trained_in_a_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.families import FAMILIES

    monkeypatch.chdir(tmp_path)
    make_model, _ = FAMILIES["mixtral"]
    make_model().save_pretrained("mixtral")
    ids = torch.randint(64, (2, 2, 16), generator=torch.Generator().manual_seed(0))
    batches = [{"input_ids": tokens, "labels": tokens} for tokens in ids]
    names = python(block("experts.rst", "import torch\nfrom transformers"), batches=batches)
    assert names["loss"].isfinite() and (tmp_path / "trained_mixtral" / "model.safetensors").is_file()
    converted = [m for m in names["model"].modules() if type(m).__name__.endswith("Experts")]
    assert converted and nemo_lowprec.compute.is_converted(names["model"])


def test_plans_over_lists_print_what_is_shown(place: Path) -> None:
    (line,) = block("advising.rst", "nemo-lowprec plan model=llama3_8b").lines
    printed = run_at_once(line, place, [])
    assert printed.split() == block("advising.rst", "Plans of llama3_8b").code.split()


def test_advice_on_the_command_line_and_in_python(place: Path, capsys: pytest.CaptureFixture) -> None:
    (line,) = block("advising.rst", "nemo-lowprec advise").lines
    assert "\n  plugins=" in run_at_once(line, place, [*SMALL, "precision=bf16_mixed,msamp_o2"])
    from transformers import AutoModelForCausalLM, LlamaConfig

    model = AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=64, use_cache=False, **SIZES))
    ids = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(0))
    python(block("advising.rst", "import nemo_lowprec\n\nadvice"), model=model, batch={"input_ids": ids, "labels": ids})
    assert "\n  plugins=" in capsys.readouterr().out


def test_yaml_of_one_s_own(place: Path) -> None:
    mine = place / "my_conf" / "precision" / "mine.yaml"
    mine.parent.mkdir(parents=True)
    mine.write_text(block("your_text.rst", "defaults:").code + "\n")
    (line,) = block("your_text.rst", "nemo-lowprec pretrain --config-dir").lines
    short = [word for word in SHORT if "limit_val_batches" not in word]
    printed = run_at_once(line, place, [*short, *SMALL, "precision.backend=reference"])
    assert "msamp_o2(" in printed and "stochastic_rounding=True" in printed


def test_several_processes_of_one_machine(place: Path) -> None:
    (line,) = block("launching.rst", "nemo-lowprec pretrain model=llama3_8b").lines
    line = line.replace("model=llama3_8b", "model=llama_tiny").replace("gpus=8", "gpus=2")
    assert "Pretraining" in run(line, place, [*SHORT, *SMALL])


@pytest.mark.parametrize("line", block("watching.rst", "nemo-lowprec pretrain monitor=on\n").lines)
def test_a_run_is_monitored(line: str, place: Path) -> None:
    before = set(place.rglob("monitor.jsonl"))
    sizes = [
        "model.config=" + json.dumps(SIZES),
        *SMALL[len(SIZES) :],
        "trainer.max_steps=2",
        "trainer.accelerator=cpu",
    ]
    more = sizes if " run " in line else [*SHORT[1:], *SMALL, "trainer.max_steps=2"]
    run_at_once(line, place, more)
    found = [read_run(path.parent) for path in set(place.rglob("monitor.jsonl")) - before]
    assert len(found) == (2 if "," in line else 1)
    assert all(one.steps == [2] and one.ended for one in found)


def test_a_run_has_a_page(place: Path) -> None:
    pretrain, report, elsewhere = block("watching.rst", "nemo-lowprec pretrain monitor=on hydra.run.dir").lines
    run_at_once(pretrain, place, [*SHORT[1:], *SMALL, "trainer.max_steps=2"])
    assert run_at_once(report, place, []).strip() == "runs/first/report.html"
    run_at_once(elsewhere, place, [])
    assert (place / "first.html").read_bytes() == (place / "runs" / "first" / "report.html").read_bytes()


def test_levels_are_trained_and_compared(place: Path) -> None:
    compare, of_folders = block("watching.rst", "nemo-lowprec compare").lines
    printed = CompareLine.of(shlex.split(compare)[2:])
    assert len(printed.levels) == 5 and printed.seeds == (1, 2, 3)
    fewer = ["precision=bf16_mixed,msamp_o2", "seeds=1", "data=stdlib_small", "trainer.max_steps=2"]
    table = run_at_once(compare, place, [*SHORT[1:], *SMALL, *fewer])
    assert "Levels beside bf16_mixed" in table and "msamp_o2: The loss is" in table
    assert run(of_folders, place).split("first_seed")[0].strip() in table
    assert (place / "first_seed.html").is_file()


def test_pictures_are_there_and_small_and_have_words_in_their_place() -> None:
    shown = set()
    for document in DOCUMENTS:
        text = document.read_text()
        pictures = re.findall(r"^\.\. image:: (.+)\n   :alt: .{60}", text, re.MULTILINE)
        assert len(pictures) == text.count(".. image::")
        shown |= {(document.parent / picture).resolve() for picture in pictures}
    assert all(picture.is_file() and picture.stat().st_size <= MOST_BYTES for picture in shown)
    assert shown >= set((ROOT / "docs" / "pictures").iterdir())


def test_a_monitor_among_callbacks_and_in_a_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = {"MyModel": Lit, "my_data": batches, "Trainer": lambda **given: Trainer(**given | QUIET | {"max_steps": 2})}
    python(block("watching.rst", "from nemo_lowprec import PrecisionMonitor"), **names)
    assert read_run(tmp_path).steps == [2]
    model = nn.Linear(32, 32)
    names = {"nemo_lowprec": nemo_lowprec, "model": model, "optimizer": torch.optim.AdamW(model.parameters())}
    names |= {"batches": batches(), "loss_of": lambda model, batch: model(batch).float().square().mean()}
    python(block("watching.rst", "model, optimizer = nemo_lowprec.prepare("), **names)
    assert read_run("runs/first").steps == [2] and read_run("runs/first").ended


def test_steps_are_profiled(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    beside, kept = block("profiling.rst", "nemo-lowprec profile").lines
    fewer = [*SHORT[1:], *SMALL, "data=stdlib_small"]
    printed = run(beside, place, fewer)
    assert "ms of a step" in printed and "by layer" in printed
    before = set(place.rglob("*"))
    found = json.loads(run(kept, place, fewer))
    assert found["bf16"]["about"]["level"] == "bf16_mixed" and found["level"]["about"]["level"] == "msamp_o2"
    assert found["level"]["about"]["arguments"] == {"fp8_margin": 1}
    assert "× as fast" in found["summary"] and found["verdict"].startswith("On a CPU FP8 is emulated")
    folder = place / "outputs" / "profile"
    made = set(place.rglob("*")) - before - {folder.parent}
    assert made == {folder, folder / "profile.json", folder / "profile_bf16.json"}
    assert read_profile(folder / "profile.json").layers == found["level"]["layers"]
    assert read_profile(folder / "profile_bf16.json").ms == found["bf16"]["ms"]
    monkeypatch.chdir(tmp_path)
    names = {"MyModel": Lit, "my_data": batches, "Trainer": lambda **given: Trainer(**given | QUIET)}
    found = python(block("profiling.rst", "from nemo_lowprec import bf16_with_fp8_mixed"), **names)
    assert found["profiler"].profile.ms > 0 and (tmp_path / "profile.json").is_file()


def test_a_checkpoint_is_inspected_and_the_machine_is_looked_at(tmp_path: Path) -> None:
    lit = trained(tmp_path / "last.ckpt", "bf16_with_fp8_mixed")
    for line in block("watching.rst", "nemo-lowprec inspect").lines:
        printed = run_at_once(line, tmp_path, [])
        assert "bf16_with_fp8_mixed(" in printed and f"Amaxes of input: {len(lit.layers)} layers" in printed
    machine, model = block("watching.rst", "nemo-lowprec doctor").lines
    assert "bf16_with_nvfp4_mixed" in run_at_once(machine, tmp_path, [])
    assert "GEMMs of one layer" in run_at_once(model, tmp_path, [])


QUIET: dict[str, Any] = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False}


class Lit(LightningModule):
    """Two layers that every level converts."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        return self.layers(batch).float().square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def batches() -> DataLoader[torch.Tensor]:
    return DataLoader(torch.randn(32, 32, generator=torch.Generator().manual_seed(0)), batch_size=16)  # type: ignore[arg-type]


def trained(path: Path, level: str) -> Lit:
    """A module after two steps, saved while it trains."""
    from nemo_lowprec import LowPrecision

    lit = Lit()
    saver = ModelCheckpoint(path.parent, path.stem, every_n_train_steps=2)
    trainer = Trainer(plugins=LowPrecision(level), callbacks=[saver], max_steps=2, **QUIET)
    trainer.fit(lit, batches())
    return lit


class FullMoments(Lit):
    """Its first moments become FP32 after the second step, which no level with FP8 states declares."""

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        if self.trainer.global_step == nemo_lowprec.Audit.STEP:  # counted when this returns
            for parameter, state in self.trainer.optimizers[0].state.items():
                state["exp_avg"] = torch.zeros(parameter.shape, dtype=torch.float32)


def test_a_test_of_one_s_own_passes_and_fails_as_it_should(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    count = sum(p.numel() for p in Lit().parameters())
    names = {"MyModel": Lit, "my_data": batches, "number_of_parameters": count}
    test = block("watching.rst", "from lightning.pytorch import Trainer")

    def run(**changed: Any) -> None:
        python(test, **(names | changed))["test_my_model_trains_at_its_level"]()

    run()
    with pytest.raises(AssertionError, match=r"Optimizer states of converted: .* declared, .* found"):
        run(MyModel=FullMoments)
    with pytest.raises(AssertionError) as error:
        run(number_of_parameters=count // 2)
    assert not isinstance(error.value, LevelDiffersError)  # the bytes of the optimizer states are too many


def test_an_audit_is_json_with_a_status(tmp_path: Path) -> None:
    (line,) = block("watching.rst", "nemo-lowprec audit").lines
    found = json.loads(run(line, tmp_path, [*SHORT[-2:], *SMALL]))
    assert found["level"] == "msamp_o2" and found["agrees"]


@pytest.mark.parametrize("command", inline_commands())
def test_a_command_in_a_sentence_or_a_comment_is_one(command: str) -> None:
    from hydra import compose, initialize_config_dir

    from nemo_lowprec.conf.check import check_values
    from nemo_lowprec.conf.choices import CONF_DIR, register_levels
    from nemo_lowprec.conf.combinations import combinations, take_own
    from nemo_lowprec.conf.command_line import CommandLine
    from nemo_lowprec.conf.overrides import check_overrides, with_plus, with_strategy
    from nemo_lowprec.run_arguments import check_run_arguments

    _, name, *arguments = shlex.split(command)
    if name == "run":
        check_run_arguments(arguments)
        return
    _, line = take_own(CommandLine.of(arguments), name)
    check_overrides(line)
    register_levels()
    for one in [] if line.is_multirun else combinations(with_plus(line)):
        one = with_strategy(one) if name == "plan" else one
        with initialize_config_dir(str(CONF_DIR), version_base="1.3"):
            cfg = compose("config", overrides=["output_dir=out", *one.overrides])
        check_values(cfg, complete=False)
