"""Memory of training two large vision models under the Lightning Trainer: FP16 AMP beside the MS-AMP levels.

    python -m benchmarks.memory

Swin-1.0B (batch 16) and DeiT-1.2B (batch 128) of timm on synthetic images. MB are 2**20 bytes. Peaks count from the
fourth step on; the columns are bytes of the tensors that are there at the peak (see ``benchmarks.measure.Watch``).
"""

from __future__ import annotations

import statistics
import traceback
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from benchmarks.measure import DEVICE, MIB, Watch, allocated, release, reset_peak
from benchmarks.record import Record, arguments
from nemo_lowprec.plugins import LEVELS

LIGHTNING, OURS = "16-mixed", "fp16_amp"  # FP16 AMP: Lightning's own, and this project's
SCALE = 2.0**12  # loss scale that no step overflows at, so that every step counts
LEVELS_AND_ARGUMENTS = [
    LIGHTNING, OURS, "msamp_o1", "msamp_o2", "msamp_o3", "msamp_o2, activations=recompute",
    "msamp_o2, activations=fp8", "msamp_o2, activations=fp8+recompute", "msamp_o2, graphs=False",
    "msamp_o2, activations=fp8+recompute, graphs=False",
]  # fmt: skip
WARMUP = 16  # steps: CUDA graphs come at the 13th at the latest
HELD = 512 * MIB  # bytes that may outlive a contestant: workspaces of libraries
BATCH = {"swin_1b": 16, "deit_1b": 128, "tiny": 4}


def new_model(name: str) -> nn.Module:
    """Random weights in FP32 on the GPU."""
    from timm.models.swin_transformer import SwinTransformer
    from timm.models.vision_transformer import VisionTransformer

    torch.manual_seed(0)
    with DEVICE:
        if name == "swin_1b":
            return SwinTransformer(
                img_size=224, patch_size=4, window_size=7, embed_dim=448, depths=(2, 2, 18, 2),
                num_heads=(14, 28, 56, 112),
            )  # fmt: skip
        width, depth, heads = (2048, 24, 32) if name == "deit_1b" else (64, 2, 2)
        return VisionTransformer(
            img_size=224, patch_size=16, embed_dim=width, depth=depth, num_heads=heads, mlp_ratio=4, qkv_bias=True
        )


class Classifier(pl.LightningModule):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.model = new_model(name)

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        images, labels = batch
        return F.cross_entropy(self.model(images).float(), labels)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-5, fused=DEVICE.type == "cuda")


class _Same(IterableDataset):
    """One batch for ever, on the GPU already."""

    def __init__(self, batch: int) -> None:
        generator = torch.Generator(DEVICE).manual_seed(0)
        self.images = torch.randn(batch, 3, 224, 224, device=DEVICE, generator=generator)
        self.labels = torch.randint(1000, (batch,), device=DEVICE, generator=generator)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            yield self.images, self.labels


def _precision(level: str) -> dict[str, Any]:
    """The Trainer's arguments for ``level``, with arguments of the level behind it: ``msamp_o2, activations=fp8``."""
    if level == LIGHTNING:
        from lightning.pytorch.plugins.precision import MixedPrecision

        return {"plugins": MixedPrecision(LIGHTNING, DEVICE.type, torch.amp.GradScaler(DEVICE.type, init_scale=SCALE))}
    name, *options = level.split(", ")
    words: dict[str, Any] = dict(option.split("=") for option in options)
    given = {key: {"False": False}.get(word, word) for key, word in words.items()}
    return {"plugins": LEVELS[name](**given, **({"initial_loss_scale": SCALE} if name == OURS else {}))}


def run(name: str, level: str, batch: int, watch: Watch) -> int:
    """Train; returns the number of parameters."""
    trainer = pl.Trainer(
        accelerator="auto", devices=1, max_steps=watch.steps, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[watch], **_precision(level),
    )  # fmt: skip
    module = Classifier(name)
    count = sum(p.numel() for p in module.parameters())
    trainer.fit(module, DataLoader(_Same(batch), batch_size=None))
    return count


def main() -> None:
    parser = arguments(__doc__.split("\n")[0], "memory_h200.jsonl")
    parser.add_argument("--models", nargs="*", default=["swin_1b", "deit_1b"], help="swin_1b, deit_1b, tiny")
    parser.add_argument("--levels", nargs="*", default=LEVELS_AND_ARGUMENTS)
    parser.add_argument("--batch", type=int, help="images; 16 for swin_1b and 128 for deit_1b without")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of 5 steps a level and pass")
    parser.add_argument("--passes", type=int, default=1, help="times that the whole field runs")
    args = parser.parse_args()
    record = Record(args.out)
    for name in args.models:
        batch = args.batch or BATCH[name]
        watches: dict[str, list[Watch]] = {level: [] for level in args.levels}
        failed = set()
        for _ in range(args.passes):
            for level in args.levels:
                if level in failed:
                    continue
                watch = Watch(args.rounds, warmup=WARMUP)
                release()
                reset_peak()
                try:
                    if (held := allocated()) > HELD:
                        raise RuntimeError(f"{held / MIB:,.0f} MiB of an earlier contestant are still allocated")
                    count = run(name, level, batch, watch)
                    watches[level].append(watch)
                except Exception as error:
                    traceback.print_exc()
                    failed.add(level)
                    message = f"{type(error).__name__}: {error}"[:300]
                    record.add(benchmark="memory", model=name, level=level, error=message)
        for level, done in watches.items():
            if not done or level in failed:
                continue
            worst = max(done, key=lambda w: w.peak)
            ms = [s * 1e3 for w in done for s in w.rounds]
            record.add(
                benchmark="memory", model=name, parameters=count, batch=batch, level=level,
                peak_allocated_mb=round(worst.peak / MIB), peak_reserved_mb=round(worst.peak_reserved / MIB),
                ms=round(statistics.median(ms), 2), ms_min=round(min(ms), 2), ms_max=round(max(ms), 2), rounds=len(ms),
                skipped_steps=sum(w.skipped for w in done),
                mb_at_peak={k: round(v / MIB, 1) for k, v in worst.columns.items()},
            )  # fmt: skip


if __name__ == "__main__":
    main()
