"""CausalLM under a real Trainer."""

import csv
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader

from nemo_lowprec import bf16_with_fp8_mixed
from nemo_lowprec.data import TextDataModule
from nemo_lowprec.models import CausalLM

SMALL = {
    "llama_tiny": {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    },
    "gpt2_tiny": {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64},
}


def small(preset: str = "llama_tiny", **options: Any) -> CausalLM:
    return CausalLM(preset, config=SMALL[preset], lr=1e-2, min_lr=1e-3, **options)


class Prepared(TextDataModule):
    """Data that exist already: nothing to prepare."""

    def prepare_data(self) -> None:
        pass


def prepared(data_dir: Path, **options: Any) -> Prepared:
    return Prepared(data_dir, **{"seq_length": 32, "micro_batch_size": 4, "validation_samples": 8, **options})


def trainer(folder: Path, **options: Any) -> Trainer:
    defaults = {
        "accelerator": "cpu",
        "max_steps": 4,
        "default_root_dir": folder,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "log_every_n_steps": 1,
        "num_sanity_val_steps": 0,
    }
    return Trainer(**{**defaults, **options})


@pytest.mark.parametrize("preset", SMALL)
def test_trains_and_logs(preset: str, data_dir: Path, tmp_path: Path) -> None:
    model = small(preset, warmup_steps=1)
    logger = CSVLogger(tmp_path, name="", version="")
    trainer(tmp_path, max_steps=12, logger=logger, accumulate_grad_batches=2).fit(model, prepared(data_dir))
    with open(tmp_path / "metrics.csv") as file:
        rows = list(csv.DictReader(file))
    train = [row for row in rows if row["train/loss"]]
    assert [int(row["step"]) for row in train] == list(range(12))
    assert float(train[-1]["train/loss"]) < float(train[0]["train/loss"]) - 0.5
    for row in train:
        assert float(row["train/perplexity"]) == pytest.approx(math.exp(float(row["train/loss"])), rel=1e-4)
    assert float(train[0]["lr"]) == pytest.approx(1e-2)  # the rate that the first step used
    assert not train[0]["train/tokens_per_sec"]
    assert all(float(row["train/tokens_per_sec"]) > 0 for row in train[1:])


def test_gpt2_trains_at_fp8(data_dir: Path, tmp_path: Path) -> None:
    model = small("gpt2_tiny")
    plugin = bf16_with_fp8_mixed(backend="reference")
    run = trainer(tmp_path, plugins=plugin)
    run.fit(model, prepared(data_dir))
    assert "model.transformer.h.0.attn.c_attn" in plugin.engine.columns.computation.conversion.low
    assert torch.isfinite(run.callback_metrics["train/loss"])


def test_validation_loss_is_the_mean_over_tokens(data_dir: Path, tmp_path: Path) -> None:
    """Not the mean over batches: one of these has two tokens only."""
    model = small(vocab_size=128)
    ids = torch.randint(0, 128, (2, 2, 8))
    labels = torch.randint(0, 128, (2, 2, 8))
    labels[1] = -100
    labels[1, 0, :2] = 5
    batches = [{"input_ids": i, "labels": t} for i, t in zip(ids, labels, strict=True)]
    (found,) = trainer(tmp_path).validate(model, DataLoader(batches, batch_size=None), verbose=False)
    with torch.no_grad():
        logits = torch.cat([model(i) for i in ids]).flatten(0, 1)
    expected = F.cross_entropy(logits, labels.flatten()).item()
    assert found["val/loss"] == pytest.approx(expected, rel=1e-5)
    assert found["val/perplexity"] == pytest.approx(math.exp(expected), rel=1e-4)


def test_initial_weights_follow_the_seed_alone() -> None:
    def weights(seed: int, global_seed: int) -> torch.Tensor:
        torch.manual_seed(global_seed)
        model = small(vocab_size=128, init_seed=seed)
        model.configure_model()
        return torch.cat([p.flatten() for p in model.parameters()])

    assert torch.equal(weights(1, 10), weights(1, 20))
    assert not torch.equal(weights(1, 10), weights(2, 10))
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    small(vocab_size=128).configure_model()
    assert torch.equal(torch.rand(1), expected)  # the global state is left as it was


def test_configure_model_makes_the_weights_once() -> None:
    model = small(vocab_size=128)
    with pytest.raises(RuntimeError, match="configure_model"):
        model(torch.zeros(1, 4, dtype=torch.int64))
    model.configure_model()
    first = model.model
    model.configure_model()
    assert model.model is first


def test_vocabulary_is_padded_and_a_checkpoint_opens_without_the_data(data_dir: Path, tmp_path: Path) -> None:
    model = small()
    run = trainer(tmp_path, max_steps=2)
    run.fit(model, prepared(data_dir))
    vocab_size = run.datamodule.vocab_size
    assert vocab_size % 128
    assert model.model.config.vocab_size == -(-vocab_size // 128) * 128
    run.save_checkpoint(tmp_path / "x.ckpt")
    loaded = CausalLM.load_from_checkpoint(tmp_path / "x.ckpt")
    ids = torch.arange(16)[None]
    with torch.no_grad():
        assert torch.equal(loaded(ids), model(ids))


def test_best_checkpoint_is_tested(data_dir: Path, tmp_path: Path) -> None:
    best = ModelCheckpoint(tmp_path, monitor="val/loss")
    run = trainer(tmp_path, enable_checkpointing=True, callbacks=[best], val_check_interval=2, max_steps=6)
    datamodule = prepared(data_dir)
    run.fit(small(), datamodule)
    (found,) = run.test(ckpt_path="best", datamodule=datamodule, verbose=False)
    assert found["test/loss"] == pytest.approx(float(best.best_model_score), abs=1e-5)


def test_activation_checkpointing_recomputes_and_changes_no_gradient() -> None:
    grads, calls = [], []
    for on in (False, True):
        model = small(vocab_size=128, activation_checkpointing=on)
        model.configure_model()
        count: list[int] = []
        model.model.model.layers[0].mlp.register_forward_pre_hook(lambda *_, count=count: count.append(0))
        ids = torch.arange(32).view(2, 16)
        total, tokens = model._loss_sum({"input_ids": ids, "labels": ids})
        (total / tokens).backward()
        grads.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
        calls.append(len(count))
    assert calls == [1, 2]
    torch.testing.assert_close(grads[0], grads[1])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "one of preset"),
        ({"preset": "gpt2", "model_type": "gpt2"}, "one of preset"),
        ({"preset": "llama_7t"}, "llama_tiny, llama_100m"),
        ({"preset": "gpt2", "lr": 0}, "lr=0"),
        ({"preset": "gpt2", "lr": "fast"}, "lr='fast'"),
        ({"preset": "gpt2", "lr": 1e-4, "min_lr": 1e-3}, "min_lr=0.001"),
        ({"preset": "gpt2", "betas": (0.9, 1.0)}, "betas"),
        ({"preset": "gpt2", "warmup_steps": -1}, "warmup_steps=-1"),
        ({"preset": "gpt2", "schedule_steps": 0}, "schedule_steps=0"),
    ],
)
def test_bad_argument_is_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CausalLM(**options)


def test_model_that_does_not_fit_the_data_is_refused(data_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="vocab_size=128 is too small"):
        trainer(tmp_path).fit(small(vocab_size=128), prepared(data_dir))
    with pytest.raises(ValueError, match="longer than the model's 64 positions"):
        trainer(tmp_path).fit(small("gpt2_tiny"), prepared(data_dir, seq_length=65))
    with pytest.raises(ValueError, match="no vocab_size"):
        small().configure_model()
    with pytest.raises(ValueError, match="no model_type 'llamma'"):
        CausalLM(model_type="llamma", vocab_size=128).configure_model()
    with pytest.raises(ValueError, match="no end"):
        trainer(tmp_path, max_steps=-1, max_epochs=-1).fit(small(), prepared(data_dir))
