"""Accuracy on images: a small ViT of timm on scikit-learn's digits, at each level and several seeds.

    python -m benchmarks.image_parity

Runs of one seed share weights and the order of the data. A third of the images is the test set, the same for all.
A file of results that is there is continued.
"""

from __future__ import annotations

import statistics
import time
import traceback
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.record import Record, arguments, earlier
from nemo_lowprec import CHART
from nemo_lowprec.models.optimizer import default_warmup, warmup_cosine
from nemo_lowprec.plugins import LEVELS

BASELINE = "fp16_amp"
BATCH, LAST = 128, 50


def digits() -> tuple[TensorDataset, TensorDataset]:
    """8x8 images of [-1, 1] and their labels, to train and to test."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    images, labels = load_digits(return_X_y=True)
    parts = train_test_split(images / 8 - 1, labels, test_size=1 / 3, stratify=labels, random_state=0)
    x, x_test, y, y_test = map(torch.from_numpy, parts)
    shape = (-1, 1, 8, 8)
    return TensorDataset(x.float().view(shape), y), TensorDataset(x_test.float().view(shape), y_test)


class Vit(pl.LightningModule):
    def __init__(self, steps: int) -> None:
        super().__init__()
        from timm.data import Mixup
        from timm.models.vision_transformer import VisionTransformer

        self.steps = steps
        # A third of two thousand images is held out: without mixing a ViT learns the others by heart (88 % right).
        self.mixup = Mixup(mixup_alpha=0.4, label_smoothing=0.0, num_classes=10)
        self.losses: list[Tensor] = []
        # 16 patches and no class token: rows of a multiple of 16 fit FP8 GEMMs.
        self.model = VisionTransformer(
            img_size=8, patch_size=2, in_chans=1, num_classes=10, embed_dim=192, depth=4, num_heads=6, mlp_ratio=4,
            qkv_bias=True, class_token=False, global_pool="avg",
        )  # fmt: skip

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        images, targets = self.mixup(*batch)
        loss = F.cross_entropy(self.model(images).float(), targets)
        self.losses = [*self.losses[1 - LAST :], loss.detach()]
        return loss

    def test_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        images, labels = batch
        logits = self.model(images).float()
        accuracy = (logits.argmax(-1) == labels).float().mean()
        self.log_dict({"accuracy": accuracy, "loss": F.cross_entropy(logits, labels)}, batch_size=len(labels))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3, weight_decay=0.2)
        schedule = LambdaLR(optimizer, warmup_cosine(default_warmup(self.steps), self.steps, 0.01))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def train(level: str, seed: int, steps: int) -> dict[str, Any]:
    """One run."""
    pl.seed_everything(seed)
    train_set, test_set = digits()
    module = Vit(steps)
    options = {"convert": None} if CHART[level].has_fp8 else {}  # on a GPU these layers are too small to gain
    plugin = LEVELS[level](**options)
    trainer = pl.Trainer(
        accelerator="auto", devices=1, max_steps=steps, plugins=plugin, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    order = torch.Generator().manual_seed(seed)
    start = time.perf_counter()
    trainer.fit(module, DataLoader(train_set, BATCH, shuffle=True, drop_last=True, generator=order))
    seconds = time.perf_counter() - start
    (metrics,) = trainer.test(module, DataLoader(test_set, len(test_set)), verbose=False)
    backend = plugin.engine.columns.computation.backend
    return {
        "parameters": sum(p.numel() for p in module.parameters()),
        "backend": backend.name if backend is not None and plugin.level.has_fp8 else None,
        "test_images": len(test_set),
        "accuracy": metrics["accuracy"],
        "loss": metrics["loss"],
        "train_loss": torch.stack(module.losses).mean().item(),
        "seconds": round(seconds, 1),
    }


def summarize(record: Record, runs: list[dict[str, Any]]) -> None:
    """Mean and spread over seeds by level, and the gap to the baseline seed by seed."""
    base = {r["seed"]: r["accuracy"] for r in runs if r["level"] == BASELINE}
    for level in dict.fromkeys(r["level"] for r in runs):
        own = [r for r in runs if r["level"] == level]
        accuracy = [r["accuracy"] for r in own]
        losses = [r["loss"] for r in own]
        record.add(
            benchmark="image_parity_summary", level=level, seeds=len(own), accuracy_mean=statistics.mean(accuracy),
            accuracy_spread=max(accuracy) - min(accuracy), loss_mean=statistics.mean(losses),
            loss_spread=max(losses) - min(losses),
            accuracy_gap=[r["accuracy"] - base[r["seed"]] for r in own if r["seed"] in base],
        )  # fmt: skip


def main() -> None:
    parser = arguments(__doc__.split("\n")[0], "image_parity_h200.jsonl")
    levels = [BASELINE, "bf16_mixed", "msamp_o1", "msamp_o2", "msamp_o3"]
    parser.add_argument("--levels", nargs="*", default=levels)
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=1000)
    args = parser.parse_args()
    kept = [line for line in earlier(args.out, "image_parity") if "error" not in line]
    runs = [line for line in kept if "command" not in line]
    have = {(run["level"], run["seed"]) for run in runs}
    record = Record(args.out, kept)
    for seed in args.seeds:
        for level in args.levels:
            if (level, seed) in have:
                continue
            about = {"benchmark": "image_parity", "level": level, "seed": seed, "steps": args.steps}
            try:
                runs.append({**about, **train(level, seed, args.steps)})
                record.add(**runs[-1])
            except Exception as error:
                traceback.print_exc()
                record.add(**about, error=f"{type(error).__name__}: {error}"[:300])
    summarize(record, runs)


if __name__ == "__main__":
    main()
