"""One run of ``benchmarks.convergence``: trains until its last step or its deadline, from where it was stopped.

A run that stops at the deadline writes a checkpoint, and goes on from it bit for bit. A run that ends writes one JSON
object: its losses, and what its model predicts of the validation text.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

import nemo_lowprec
from benchmarks.convergence_text import KINDS, digest
from nemo_lowprec import PrecisionMonitor
from nemo_lowprec.data import TextDataModule
from nemo_lowprec.data.packed import PackedDataset
from nemo_lowprec.models import CausalLM

PRESET = "llama_100m"
SEQUENCE, BATCH, STEPS = 1024, 32, 15_360  # 503 M tokens
EVERY = 128  # steps: a point of the curve is the mean loss of so many steps
VALIDATE = 512  # steps between two validations
VALIDATED = 512  # samples of a validation; the test after the last step takes all
WORKERS = 2  # processes that read the text
BLOCK = 16  # samples of a block, of which the bootstrap draws

# Arguments of the level by variant: ``msamp_o2+coarse``. ``twin`` trains another first weight, and ``watched`` adds the
# monitor, which does not change the training.
VARIANTS: dict[str, dict[str, Any]] = {
    "stochastic": {"stochastic_rounding": True},
    "coarse": {"fp8": "e4m3", "fp8_margin": 8, "fp8_amax_history_len": 1, "fp8_amax_compute_algo": "most_recent"},
    "twin": {},
    "watched": {},
}


@dataclass(frozen=True)
class Spec:
    """``LEVEL[+VARIANT]:SEED[~STEPS][@STOP]``: the learning rate's schedule has ``STEPS`` steps; ``STOP`` run."""

    level: str
    variant: str
    seed: int
    steps: int
    stop: int

    @property
    def is_whole(self) -> bool:
        """Whether the run has ``STEPS`` steps."""
        return self.steps == self.stop == STEPS

    @property
    def row(self) -> str:
        """The level and its variant; a watched run has the row of the level, as the monitor changes no training."""
        return self.level if self.variant in ("", "watched") else f"{self.level}+{self.variant}"

    @classmethod
    def parse(cls, text: str) -> Spec:
        row, _, rest = text.partition(":")
        level, _, variant = row.partition("+")
        rest, _, stop = rest.partition("@")
        seed, _, steps = rest.partition("~")
        if level not in nemo_lowprec.CHART or (variant and variant not in VARIANTS):
            form = "LEVEL[+VARIANT]:SEED[~STEPS][@STOP]"
            raise ValueError(f"{text!r} is no {form} with a variant of {', '.join(VARIANTS)}.")
        return cls(level, variant, int(seed), int(steps or STEPS), int(stop or steps or STEPS))

    def __str__(self) -> str:
        row = f"{self.level}+{self.variant}" if self.variant else self.level
        steps = f"~{self.steps}" if self.steps != STEPS else ""
        return f"{row}:{self.seed}{steps}" + (f"@{self.stop}" if self.stop != self.steps else "")


class Course(pl.Callback):
    """The losses of a run, and its end at the deadline (seconds, as ``time.time`` counts them)."""

    def __init__(self, spec: Spec, checkpoint: Path, deadline: float) -> None:
        self._spec, self._checkpoint, self._deadline = spec, checkpoint, deadline
        self.losses = torch.zeros(spec.stop, dtype=torch.float32)
        self.validations: dict[int, float] = {}
        self.seconds = 0.0
        self.pieces = 0
        self._since = 0.0

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.losses = self.losses.to(module.device)
        self.pieces += 1
        self._since = time.time()

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, batch: Any, index: int
    ) -> None:
        step = trainer.global_step
        self.losses[step - 1] = outputs["loss"]
        # Not before a validation, which comes after this and would not be repeated.
        pauses = step % EVERY == 0 and step % VALIDATE and step < self._spec.stop
        if pauses and time.time() > self._deadline:
            self._pause()
            trainer.save_checkpoint(self._checkpoint)
            trainer.should_stop = True

    def on_validation_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        step, loss = trainer.global_step, trainer.callback_metrics["val/loss"].item()
        self.validations[step] = loss
        print(f"{self._spec}: step {step}, loss {loss:.4f}, {time.time() - self._since:.0f} s", flush=True)

    def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if not trainer.should_stop:
            self._pause()

    def _pause(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.seconds += time.time() - self._since

    def state_dict(self) -> dict[str, Any]:
        return {"losses": self.losses, "validations": self.validations, "seconds": self.seconds, "pieces": self.pieces}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value)


class Examination(Dataset[dict[str, Tensor]]):
    """The validation samples with the kind of each label."""

    def __init__(self, folder: Path) -> None:
        self._tokens = PackedDataset(folder / "validation", SEQUENCE, 0)
        self._kinds = PackedDataset(folder / "kinds", SEQUENCE, 0)  # documents of the same lengths: the same order

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {**self._tokens[index], "kinds": self._kinds[index]["labels"]}


class Subject(CausalLM):
    """The model of a run; its test is the examination.

    Attributes:
        is_twin: the first embedding is 1 % larger, so that the run differs from another by chance alone.
        is_compiled: ``torch.compile`` fuses the operations of each decoder layer.
        by_kind: FP64 [kinds, 3]: loss in nats, hits of the likeliest token, and number of tokens.
        by_sample: FP32 [batch] a batch: mean loss of each sample.
    """

    is_twin = False
    is_compiled = False

    def configure_model(self) -> None:
        new = self.model is None
        super().configure_model()
        if new and self.is_twin:
            with torch.no_grad():
                next(self.parameters())[0] *= 1.01
        if new and self.is_compiled:
            for layer in self.model.model.layers:
                layer.compile()

    def on_test_start(self) -> None:
        self.by_kind = torch.zeros(len(KINDS), 3, dtype=torch.float64, device=self.device)
        self.by_sample: list[Tensor] = []

    def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        logits = self(batch["input_ids"]).float()
        labels = batch["labels"]
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
        hits = (logits.argmax(-1) == labels).flatten()
        seen = torch.stack([loss.double(), hits.double(), torch.ones_like(loss, dtype=torch.float64)], 1)
        self.by_kind += F.one_hot(batch["kinds"].flatten(), len(KINDS)).double().T @ seen
        self.by_sample.append(loss.view(labels.shape).mean(1))

    def on_test_epoch_end(self) -> None:
        pass  # CausalLM's own test sums other numbers

    def blocks(self) -> list[float]:
        """Mean loss of each block of ``BLOCK`` samples."""
        samples = torch.cat(self.by_sample)
        whole = samples[: len(samples) // BLOCK * BLOCK]
        return [round(x, 5) for x in whole.view(-1, BLOCK).mean(1).tolist()]


def train(spec: Spec, data: Path, state: Path, deadline: float) -> None:
    """Train until the run's last step, which writes ``state/SPEC.json``, or until the deadline.

    Args:
        data: the folder that ``benchmarks.convergence_text`` prepared.
    """
    checkpoint, done = state / f"{spec}.ckpt", state / f"{spec}.json"
    pl.seed_everything(spec.seed)
    course = Course(spec, checkpoint, deadline)
    callbacks: list[pl.Callback] = [course]
    if spec.variant == "watched":
        callbacks.append(PrecisionMonitor(every_n_steps=VALIDATE, folder=state / str(spec)))
    plugin = getattr(nemo_lowprec, spec.level)(**VARIANTS.get(spec.variant, {}))
    trainer = pl.Trainer(
        accelerator="auto", devices=1, max_steps=spec.stop, plugins=plugin, callbacks=callbacks, logger=False,
        gradient_clip_val=1.0, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        num_sanity_val_steps=0, val_check_interval=VALIDATE, check_val_every_n_epoch=None,
    )  # fmt: skip
    model = Subject(
        PRESET, lr=6e-4, min_lr=6e-5, warmup_steps=spec.steps // 30, schedule_steps=spec.steps, init_seed=spec.seed
    )  # fmt: skip
    model.is_twin, model.is_compiled = spec.variant == "twin", not plugin.level.has_fp8
    texts = TextDataModule(
        train_prefix=data / "train", validation_prefix=data / "validation", seq_length=SEQUENCE,
        micro_batch_size=BATCH, seed=spec.seed, num_workers=WORKERS, validation_samples=VALIDATED,
    )  # fmt: skip
    trainer.fit(model, datamodule=texts, ckpt_path=checkpoint if checkpoint.exists() else None)
    if trainer.global_step < spec.stop:
        return
    trainer.test(model, DataLoader(Examination(data), BATCH, num_workers=WORKERS), verbose=False)
    total = model.by_kind.sum(0)
    backend = plugin.engine.columns.computation.backend
    result = {
        "benchmark": "convergence",
        "run": str(spec),
        "level": spec.level,
        "variant": spec.variant,
        "seed": spec.seed,
        "text": digest(data),
        "steps": spec.stop,
        "tokens": spec.stop * SEQUENCE * BATCH,
        "parameters": sum(p.numel() for p in model.parameters()),
        "backend": backend.name if backend is not None and plugin.level.has_fp8 else None,
        "seconds": round(course.seconds, 1),
        "pieces": course.pieces,
        "loss": (total[0] / total[2]).item(),
        "validations": {str(step): round(loss, 5) for step, loss in course.validations.items()},
        "every": EVERY,
        "train_loss": [round(x, 4) for x in course.losses.view(-1, EVERY).mean(1).tolist()],
        "by_kind": {
            name: {"tokens": int(count), "loss": round(loss / count, 5), "accuracy": round(hits / count, 5)}
            for name, (loss, hits, count) in zip(KINDS, model.by_kind.tolist(), strict=True)
            if count
        },
        "blocks": model.blocks(),
    }
    partial = done.with_suffix(".partial")
    partial.write_text(json.dumps(result))
    partial.rename(done)
    checkpoint.unlink(missing_ok=True)
