"""A small network on scikit-learn's digits by Lightning Fabric, at a level of the precision chart.

python examples/fabric_digits.py
"""

import torch
import torch.nn.functional as F
from lightning.fabric import Fabric
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from nemo_lowprec import msamp_o2


def main(epochs: int = 5) -> float:
    """Train for ``epochs``; the share of the training images that are told right at the end."""
    fabric = Fabric(plugins=msamp_o2(), devices=1)  # devices=8, strategy="ddp" on eight GPUs
    fabric.seed_everything(1)
    digits = load_digits()
    data = TensorDataset(torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target))
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 10))
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    right = 0
    for epoch in range(epochs):
        right = 0
        for images, target in fabric.setup_dataloaders(DataLoader(data, 32, shuffle=True)):
            output = model(images)
            optimizer.zero_grad()
            fabric.backward(F.cross_entropy(output, target))
            fabric.clip_gradients(model, optimizer, max_norm=1.0, error_if_nonfinite=False)
            optimizer.step()
            right += int((output.argmax(1) == target).sum())
        fabric.print(f"epoch {epoch + 1}: {right / len(data):.3f} of the images are told right")
    return right / len(data)


if __name__ == "__main__":
    main()
