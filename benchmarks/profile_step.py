"""Where the time of a training step goes: kernels by total GPU time, for one level.

python -m benchmarks.profile_step bf16_with_fp8_mixed
"""

from __future__ import annotations

import sys

import lightning.pytorch as pl
import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.llama import Llama, loader
from nemo_lowprec.plugins import LEVELS


class _Profile(pl.Callback):
    def on_train_batch_start(self, trainer, module, batch, index) -> None:
        if index == 5:
            torch.cuda.synchronize()
            self.profiler = profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU])
            self.profiler.__enter__()
        if index == 7:
            torch.cuda.synchronize()
            self.profiler.__exit__(None, None, None)

    def table(self) -> str:
        averages = self.profiler.key_averages()
        return averages.table(sort_by="self_cuda_time_total", row_limit=45, max_name_column_width=90)


def main() -> None:
    watch = _Profile()
    if sys.argv[1] in LEVELS:
        dtype, plugins = torch.float32, LEVELS[sys.argv[1]]()
    else:
        from lightning.pytorch.plugins.precision import TransformerEnginePrecision

        dtype, plugins = torch.bfloat16, TransformerEnginePrecision(weights_dtype=torch.bfloat16)
    trainer = pl.Trainer(
        accelerator="gpu", devices=1, max_steps=9, logger=False, enable_checkpointing=False, plugins=plugins,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[watch],
    )  # fmt: skip
    trainer.fit(Llama(dtype), loader())
    # Two steps were recorded.
    print(watch.table())


if __name__ == "__main__":
    main()
