"""Small Llamas on Megatron-core, for the tests on GPUs: one process' part of a run, as ``on_processes`` starts it."""

from __future__ import annotations

import os
import time
import traceback
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import Dataset

from nemo_lowprec.compat.transformer_engine import import_te
from nemo_lowprec.compute import te_layers
from nemo_lowprec.data.loader import ResumableLoader
from nemo_lowprec.models import CausalLM
from nemo_lowprec.models.loss import IGNORE
from nemo_lowprec.models.megatron_gpt import MegatronGPT
from nemo_lowprec.plugins import LEVELS
from nemo_lowprec.report import Audit, StepProfiler
from nemo_lowprec.report.monitor import PrecisionMonitor
from nemo_lowprec.strategies import MegatronStrategy
from tests.support import level_of

__all__ = ["CASES", "Losses", "level", "make_weights", "run_all", "train", "val_loss"]

CONFIG = {"num_hidden_layers": 4, "tie_word_embeddings": False, "max_position_embeddings": 256}
VOCAB, LENGTH, MICRO, GLOBAL = 256, 128, 2, 8
# Every level that Megatron-core runs on Hopper, and those that can store their weights in FP8 once more so.
CASES = [
    "fp16_amp", "te_fp8", "msamp_o1+fp16", "msamp_o2+fp16", "msamp_o3+fp16", "fp16_mixed", "bf16_mixed",
    "bf16_with_fp8_mixed", "bf16_with_fp8_mixed+fp8_params", "fp16_with_fp8_mixed", "fp16_with_fp8_mixed+fp8_params",
    "bf16_with_fp8_current_scaling_mixed", "bf16_with_fp8_current_scaling_mixed+fp8_params",
    "bf16_with_fp8_subchannel_scaling_mixed",
]  # fmt: skip


def level(case: str, **options: Any) -> Any:
    """The plugin of a case; with a loss scale that does not overflow in the first steps."""
    name, _, variant = case.partition("+")
    if variant:
        options |= {"half": "fp16"} if variant == "fp16" else {"fp8_params": True}
    if level_of(case).has_loss_scale:
        options.setdefault("initial_loss_scale", 2.0**12)
    return LEVELS[name](**options)


class Tokens(Dataset):
    """Sequences that a small model learns: steps of one, two or three through the vocabulary.

    Args:
        masked: whether the loss leaves out the first tokens, of every sequence another number.
    """

    def __init__(self, masked: bool = False) -> None:
        self.masked = masked

    def __len__(self) -> int:
        return 512

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        start = int(torch.randint(0, 50, (1,), generator=torch.Generator().manual_seed(index)))
        tokens = (torch.arange(LENGTH + 1) * (1 + index % 3) + start) % 199
        labels = tokens[1:].clone()
        if self.masked:
            labels[: LENGTH // 8 * (1 + index % 7)] = IGNORE
        return {"input_ids": tokens[:-1], "labels": labels}


class Data(pl.LightningDataModule):
    """Micro-batches of this process, by the data-parallel rank that the strategy gives it."""

    def __init__(self, masked: bool = False) -> None:
        super().__init__()
        self.masked = masked

    def _loader(self, count: int) -> ResumableLoader:
        place = getattr(self.trainer.strategy, "distributed_sampler_kwargs", None) or {"num_replicas": 1, "rank": 0}
        return ResumableLoader(
            Tokens(self.masked), count, 3, place["rank"], place["num_replicas"], global_batch_size=GLOBAL
        )

    def train_dataloader(self) -> Any:
        self.loader = self._loader(MICRO)
        return self.loader

    def val_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(torch.utils.data.Subset(Tokens(), range(500, 512)), batch_size=4)


@torch.no_grad()
def val_loss(model: nn.Module) -> float:
    """What a transformers model comes to on the samples that a run validates on."""
    batch = [Tokens()[i] for i in range(500, 508)]
    ids, labels = (torch.stack([sample[name] for sample in batch]) for name in ("input_ids", "labels"))
    return float(F.cross_entropy(model(input_ids=ids).logits.flatten(0, 1), labels.flatten()))


class Spoiler(Callback):
    """Makes the gradient of what a layer returns infinite in one micro-batch of a step, where FP8 casts saturate it."""

    LAYERS = ("linear_fc1", "gate_proj")  # Megatron-core's and transformers': without bias

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_start(self, trainer: pl.Trainer, module: Any) -> None:
        layer = next(m for name, m in module.named_modules() if name.endswith(self.LAYERS))

        def spoil(layer: nn.Module, args: Any, output: Any) -> None:
            out = output[0] if isinstance(output, tuple) else output
            if trainer.global_step == self.step and out.requires_grad:
                self.step = -1
                out.register_hook(lambda grad: torch.full_like(grad, torch.inf))

        layer.register_forward_hook(spoil)


class Losses(Callback):
    """Losses of the steps, their gradients' norms, whether they were skipped, and the losses of validation."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.skipped: list[bool] = []
        self.val: list[float] = []
        self._micro: list[float] = []

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, i: int) -> None:
        self._micro.append(float(outputs["loss"]))
        if (i + 1) % trainer.accumulate_grad_batches == 0:
            # Lightning divides each by their number; the last one of a pipeline stands for all.
            pipelined = isinstance(module, MegatronGPT)
            self.losses.append(self._micro[-1] * len(self._micro) if pipelined else sum(self._micro))
            self._micro = []
            if isinstance(trainer.strategy, MegatronStrategy):
                self.norms.append(float(trainer.strategy.engine.optimizer.grad_norm))
                self.skipped.append(bool(trainer.strategy.engine.guard.skipped))

    def on_validation_end(self, trainer: pl.Trainer, module: Any) -> None:
        self.val.append(float(trainer.callback_metrics["val/loss"]))


def make_weights(folder: Path) -> str:
    """A transformers Llama with random weights, saved for all runs to start from."""
    model = CausalLM("llama_tiny", config=CONFIG, vocab_size=VOCAB, init_seed=7)
    model.configure_model()
    assert model.model is not None
    model.model.save_pretrained(folder)
    return str(folder)


def train(
    rank: int, case: str, sizes: dict[str, Any], weights: str | None = None, steps: int = 6,
    save: tuple[str, int] | None = None, ckpt: str | None = None, kind: str = "gpt", data_parallel: int = 1,
    world: int = 1, again: bool = False, masked: bool = False, infinite: int | None = None,
    transformer: dict[str, Any] | None = None, watched: str | None = None,
    profiled: str | None = None, **options: Any,
) -> dict[str, Any]:  # fmt: skip
    """A few steps on this process; what they came to."""
    os.environ["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] = "0"
    import_te()  # before anything loads cuDNN

    torch.cuda.set_device(rank)
    common: dict[str, Any] = {
        "config": CONFIG, "vocab_size": VOCAB, "lr": 5e-4, "warmup_steps": 2, "schedule_steps": 20, "init_seed": 7,
    }  # fmt: skip
    if kind == "gpt":
        model: CausalLM = MegatronGPT("llama_tiny", weights=weights, transformer=transformer, **common)
    else:
        model = CausalLM("llama_tiny", **common)
        model.configure_model()  # here, with the CPU's random numbers, as ``make_weights`` does
    record = Losses()
    audit = Audit()
    callbacks: list[Callback] = [record] if kind == "plain" else [record, audit]
    if infinite is not None:
        callbacks.append(Spoiler(infinite))
    if watched is not None:
        callbacks.append(PrecisionMonitor(2, watched))
    if profiled is not None:
        callbacks.append(StepProfiler(profiled))
    if save is not None:
        folder, step = save
        callbacks.append(ModelCheckpoint(dirpath=folder, filename="{step}", every_n_train_steps=step, save_top_k=-1))
    strategy = "auto" if kind == "plain" else MegatronStrategy(**sizes)
    trainer = pl.Trainer(
        accelerator="gpu", devices=world, strategy=strategy, plugins=level(case, **options), max_steps=steps,
        accumulate_grad_batches=GLOBAL // MICRO // data_parallel, gradient_clip_val=1.0, callbacks=callbacks,
        logger=False, enable_checkpointing=save is not None, enable_progress_bar=False, enable_model_summary=False,
        use_distributed_sampler=False, num_sanity_val_steps=1, limit_val_batches=2, val_check_interval=4,
        check_val_every_n_epoch=None,
    )  # fmt: skip
    trainer.fit(model, datamodule=Data(masked), ckpt_path=ckpt)
    findings = audit.report.findings if audit.report is not None else []
    found = {
        "losses": list(record.losses), "norms": list(record.norms), "val": list(record.val),
        "skipped": list(record.skipped), "nonfinite": bool(te_layers.nonfinite_amaxes(model)),
        "weights": {n: p.detach().float().cpu() for n, p in model.named_parameters()},
        "audit": [(f.column, f.part, f.declared, f.observed) for f in findings],
    }  # fmt: skip
    if not again:
        return found
    trainer.validate(model, datamodule=Data(), verbose=False)
    later = {"val": float(trainer.callback_metrics["val/loss"])}
    trainer.fit_loop.epoch_loop.max_steps = steps + 1
    trainer.fit(model, datamodule=Data())
    return {**found, "later": {**later, "loss": record.losses[-1]}}


def run_all(rank: int, jobs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Several runs, one after the other in the same processes, which take seconds to start; an error is its text."""
    found: dict[str, Any] = {}
    for name, job in jobs.items():
        start = time.perf_counter()
        try:
            found[name] = train(rank, **job)
            print(f"[{rank}] {name}: {time.perf_counter() - start:.1f} s", flush=True)  # the last one names a hang
        except Exception:
            found[name] = traceback.format_exc()
            print(f"[{rank}] {name}: {found[name]}", flush=True)
            if job.get("world", 1) > 1:
                break  # the others may be waiting in a collective
    return found
