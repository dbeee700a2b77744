"""The commands show no message of another library that would worry a newcomer, and every one of ours."""

import logging
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import lightning_utilities.core.rank_zero as rank_zero_module
import pytest
from lightning.fabric.accelerators import cuda
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.connectors.data_connector import _worker_check
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from support import loader

from nemo_lowprec.chart import CHART
from nemo_lowprec.quiet import LOGGED, WARNED, quiet
from tests.commands import answer
from tests.processes import of_a_shell

ROOT = Path(__file__).parents[2]
TINY = [
    "+model.config={hidden_size:32,intermediate_size:512,num_hidden_layers:1,num_attention_heads:2,num_key_value_heads:1}",
    "data=megatron",
    "data.seq_length=32",
    "data.micro_batch_size=4",
    "data.validation_samples=8",
    "trainer.accelerator=cpu",
    "trainer.max_steps=2",
    "trainer.val_check_interval=2",
]
NOISE = (
    "UserWarning", "DeprecationWarning", "FutureWarning", "warn", "site-packages",  # what warnings have in their lines
    "not supported by the model summary", "FLOPs", "/-2", "Tip", "litlogger", "TPU", "Apex", "sync_dist", "workers",
    "dirpath has changed", "`Trainer.fit` stopped", "model shards", "destroy_process_group", "socket",
    "[transformers]",
)  # fmt: skip
ON_CPU = [level.name for level in CHART.values() if level.scaling not in ("mxfp8", "nvfp4")]


@pytest.fixture
def tiny(data_dir: Path) -> list[str]:
    return [*TINY, f"data.train_prefix={data_dir / 'train'}", f"data.validation_prefix={data_dir / 'validation'}"]


def run(folder: Path, *arguments: str, status: int = 0) -> str:
    """What the command writes to stdout and stderr."""
    environment = {**of_a_shell(), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "nemo_lowprec.cli", *arguments], cwd=folder, env=environment, text=True, timeout=500,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
    )  # fmt: skip
    assert done.returncode == status, done.stdout
    return done.stdout


def run_at_once(folder: Path, *arguments: str) -> str:
    """The same where torch and Lightning are imported already: what imports write, the other runs show."""
    done = answer(folder, arguments)
    assert done.status == 0, done.printed
    return done.printed


def no_noise(text: str) -> None:
    found = [line for line in text.splitlines() if any(noise in line for noise in NOISE)]
    assert not found


def test_pretrain_at_every_level(tiny: list[str], tmp_path: Path) -> None:
    text = run(tmp_path, "pretrain", *tiny, "-m", f"precision={','.join(ON_CPU)}")
    no_noise(text)
    for name in ON_CPU:
        assert len(re.findall(rf"^Precision: {name}\(", text, re.MULTILINE)) == 1
        assert len(re.findall(rf"^  Level +{name}$", text, re.MULTILINE)) == 1
    # But for Hydra's log lines, and paths, which are whole.
    rest = [line for line in text.splitlines() if not line.startswith("[") and not line.endswith(".ckpt")]
    assert max(map(len, rest)) <= 80
    assert "Epoch 0 " in text and " 2/2 " in text


def test_a_run_its_resume_its_export_and_an_audit(tiny: list[str], tmp_path: Path) -> None:
    of_gpt2 = [*tiny[1:], "model=gpt2_tiny", "+model.config={n_embd:32,n_layer:1,n_head:2}"]
    no_noise(run_at_once(tmp_path, "pretrain", *of_gpt2, "output_dir=first"))
    last = "ckpt_path=first/checkpoints/last.ckpt"
    resumed = run_at_once(tmp_path, "pretrain", *of_gpt2, "output_dir=second", last, "trainer.max_steps=3")
    no_noise(resumed)
    assert " 3/3 " in resumed
    no_noise(run(tmp_path, "export", "second/checkpoints/last.ckpt", "exported"))
    audit = run(tmp_path, "audit", *tiny, "precision=msamp_o2")
    no_noise(audit)
    assert max(map(len, (line for line in audit.splitlines() if not line.startswith("[")))) <= 80


@pytest.mark.parametrize("strategy", ["lowprec_sharded", "ddp"])
def test_two_processes(strategy: str, tiny: list[str], tmp_path: Path) -> None:
    text = run(tmp_path, "pretrain", *tiny, "gpus=2", f"strategy={strategy}")
    no_noise(text)
    for once in ("Precision: ", "GEMM backend: ", "\nPretraining\n"):
        assert text.count(once) == 1


def test_an_error_comes_alone(tmp_path: Path) -> None:
    text = run(tmp_path, "pretrain", "experiment=megatron_tiny", "trainer.accelerator=cpu", status=2)
    assert re.fullmatch(r"nemo-lowprec pretrain: MegatronStrategy needs .*\n", text)


def test_a_warning_of_ours_is_shown(tiny: list[str], tmp_path: Path) -> None:
    text = run_at_once(tmp_path, "pretrain", *tiny, "precision=bf16_with_fp8_mixed", "precision.convert=[]")
    [start] = [i for i, line in enumerate(text.splitlines()) if line.startswith("Warning: ")]
    said = " ".join(line.strip() for line in text.splitlines()[start:][:4])
    assert said.startswith("Warning: bf16_with_fp8_mixed: no matrix that this model multiplies with is in a converted")
    assert max(map(len, text.splitlines()[start:])) <= 80
    no_noise(text)


def test_a_message_is_left_out_by_its_text_and_its_source(recwarn: pytest.WarningsRecorder) -> None:
    texts = {
        "lightning.pytorch.utilities._pytree": "`isinstance(treespec, LeafSpec)` is deprecated, use another",
        "megatron.core.optimizer.clip_grads": "Transformer Engine and Apex are not installed. Falling back to Torch",
        "megatron.core.models.backends": "Apex is not installed. Falling back to Torch Norm",
        "lightning.pytorch.callbacks.model_checkpoint": "The dirpath has changed from 'a' to 'b'",
        "lightning.pytorch.trainer.connectors.logger_connector.result":
            "It is recommended to use `self.log('val/loss', ..., sync_dist=True)` when logging",
    }  # fmt: skip
    own = "It is recommended to use `self.log('my/metric', ..., sync_dist=True)` when logging"
    with quiet():
        for module, text in texts.items():
            warnings.warn_explicit(text, UserWarning, "file.py", 1, module=module)
            warnings.warn_explicit(text, UserWarning, "file.py", 1, module="of_the_user")
            warnings.warn_explicit("another", UserWarning, "file.py", 1, module=module)
        result = "lightning.pytorch.trainer.connectors.logger_connector.result"
        warnings.warn_explicit(own, UserWarning, "file.py", 1, module=result)
    assert [str(w.message) for w in recwarn] == [s for text in texts.values() for s in (text, "another")] + [own]


def test_lightnings_own_calls_are_left_out(
    recwarn: pytest.WarningsRecorder, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that a machine with a GPU, or with more cores, would show."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    trainer = Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
    with quiet():
        _worker_check(trainer, loader(), "val_dataloader")
        assert not recwarn
        _worker_check(trainer, loader(), "train_dataloader")
        assert len(recwarn) == 1
    source = Path(cuda.__file__).read_text()
    assert "You are using a CUDA device (" in source and "that has Tensor Cores" in source
    for package in ("lightning.pytorch", "pytorch_lightning"):  # the other is the name where both are imported
        caplog.clear()
        monkeypatch.setattr(rank_zero_module, "log", logging.getLogger(f"{package}.utilities.rank_zero"))
        with caplog.at_level(logging.INFO, f"{package}.utilities.rank_zero"), quiet():
            rank_zero_info("You are using a CUDA device ('NVIDIA H100') that has Tensor Cores. To properly")
            rank_zero_info("GPU available: True")
        assert [record.getMessage() for record in caplog.records] == ["GPU available: True"]


def test_everything_is_as_before_afterwards() -> None:
    filters, form = list(warnings.filters), warnings.formatwarning
    loggers = {noise.source: logging.getLogger(noise.source) for noise in LOGGED}
    before = {name: list(logger.filters) for name, logger in loggers.items()}
    with pytest.raises(KeyError), quiet():
        assert warnings.filters != filters
        raise KeyError
    assert (list(warnings.filters), warnings.formatwarning) == (filters, form)
    assert {name: list(logger.filters) for name, logger in loggers.items()} == before


def test_every_message_has_a_reason() -> None:
    assert all(noise.why.endswith(".") and re.compile(noise.text) for noise in (*WARNED, *LOGGED))
