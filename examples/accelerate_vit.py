"""A ViT on scikit-learn's digits, by Accelerate: ``accelerate launch examples/accelerate_vit.py msamp_o2``."""

import sys

import torch
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset
from transformers import ViTConfig, ViTForImageClassification

from nemo_lowprec.accelerate import prepare


def main(level: str = "msamp_o2", epochs: int = 30) -> float:
    """Train at ``level``; returns the accuracy on the last 297 digits."""
    torch.manual_seed(0)
    digits = load_digits()
    data = TensorDataset(torch.tensor(digits.images[:, None] / 16).float(), torch.tensor(digits.target))
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    model = ViTForImageClassification(ViTConfig(image_size=8, patch_size=2, num_channels=1, num_labels=10, **sizes))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    loader = DataLoader(torch.utils.data.Subset(data, range(1500)), batch_size=100, shuffle=True)
    accelerator = Accelerator(mixed_precision="fp16" if level.startswith("fp16") else "bf16")
    model, optimizer, loader = prepare(accelerator, model, optimizer, loader, level=level)
    for _ in range(epochs):
        for images, labels in loader:
            accelerator.backward(model(pixel_values=images, labels=labels).loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    images, labels = (part.to(accelerator.device) for part in data[1500:])
    accuracy = (model.eval()(pixel_values=images).logits.argmax(-1) == labels).float().mean().item()
    accelerator.print(f"{level}: accuracy {accuracy:.3f}")
    return accuracy


if __name__ == "__main__":
    main(*sys.argv[1:2])
