"""Trains a classifier of digits with Accelerate and an FP8 recipe."""

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import FP8RecipeKwargs, GradientAccumulationPlugin
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def get_dataloader(batch_size: int) -> DataLoader:
    digits = load_digits()
    data = TensorDataset(torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target))
    return DataLoader(data, batch_size=batch_size)


def main() -> list[float]:
    torch.manual_seed(0)
    # Transformer Engine's recipe
    fp8_kwargs = FP8RecipeKwargs(backend="te", fp8_format="HYBRID", amax_history_len=32, amax_compute_algo="max")
    accelerator = Accelerator(
        mixed_precision="fp8",
        kwargs_handlers=[fp8_kwargs],
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1),
    )
    net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
    train_dataloader = get_dataloader(64)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=20)
    train_dataloader, net, optimizer, scheduler = accelerator.prepare(train_dataloader, net, optimizer, scheduler)

    losses = []
    for x, y in train_dataloader:
        with accelerator.accumulate(net):
            loss = F.cross_entropy(net(x), y)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    losses = main()
