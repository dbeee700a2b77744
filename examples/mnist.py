"""A small convolutional network on handwritten digits: plain torch with FP16 AMP, or at an MS-AMP level.

    python examples/mnist.py
    python examples/mnist.py --enable-msamp --opt-level O2

What --enable-msamp changes is one line: the call of ``nemo_lowprec.initialize``. Images are scikit-learn's digits
(8 x 8); ``--data FOLDER`` trains on MNIST in that folder, which needs torchvision.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, Dataset, TensorDataset, random_split

from nemo_lowprec import msamp


class Net(nn.Module):
    """Two convolutions and two linear layers, for images of ``side`` pixels."""

    def __init__(self, side: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3, padding=1)
        self.conv2 = nn.Conv2d(16, 32, 3, padding=1)
        self.dropout = nn.Dropout(0.25)
        self.fc1 = nn.Linear(32 * (side // 2) ** 2, 128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Log-probabilities of the ten digits."""
        x = F.relu(self.conv2(F.relu(self.conv1(x))))
        x = self.dropout(F.max_pool2d(x, 2).flatten(1))
        return F.log_softmax(self.fc2(F.relu(self.fc1(x))), dim=1)


def parse_arguments(description: str | None, argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The arguments of both examples."""
    parser = argparse.ArgumentParser(
        description=(description or "").split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--enable-msamp", action="store_true", help="train at an MS-AMP level")
    parser.add_argument("--opt-level", default="O1", help="O1, O2 or O3")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=32, help="of each process")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--gamma", type=float, default=0.7, help="the learning rate's factor after each epoch")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--data", help="folder with MNIST for torchvision")
    parser.add_argument("--no-cuda", action="store_true", help="train on the CPU")
    return parser.parse_args(argv)


def load_data(folder: str | None) -> tuple[Dataset, Dataset, int]:
    """Images and classes to train on and to test on, and the side of an image."""
    if folder is not None:
        from torchvision import datasets, transforms

        change = transforms.Compose([transforms.ToTensor(), transforms.Normalize(0.1307, 0.3081)])
        return datasets.MNIST(folder, True, change), datasets.MNIST(folder, False, change), 28
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
    whole = TensorDataset(images, torch.tensor(digits.target))
    train, test = random_split(whole, [0.8, 0.2], torch.Generator().manual_seed(0))
    return train, test, 8


def train_epoch(model: nn.Module, device: torch.device, loader: DataLoader, optimizer: Optimizer) -> float:
    """One pass over the data; returns the last loss."""
    scaler = torch.amp.GradScaler(device.type)
    model.train()
    for images, target in loader:
        images, target = images.to(device), target.to(device)
        optimizer.zero_grad()
        with torch.autocast(device.type, dtype=torch.float16):
            output = model(images)
        loss = F.nll_loss(output.float(), target)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    return loss.item()


@torch.no_grad()
def evaluate(model: nn.Module, device: torch.device, loader: DataLoader) -> float:
    """The share of images that are told right."""
    model.eval()
    correct = count = 0
    for images, target in loader:
        with torch.autocast(device.type, dtype=torch.float16):
            guess = model(images.to(device)).argmax(1).cpu()
        correct += int((guess == target).sum())
        count += len(target)
    return correct / count


def main(argv: Sequence[str] | None = None) -> tuple[nn.Module, float]:
    """Train and test; returns the model and its accuracy."""
    args = parse_arguments(__doc__, argv)
    torch.manual_seed(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() and not args.no_cuda else "cpu")
    train, test, side = load_data(args.data)
    train_loader = DataLoader(train, args.batch_size, shuffle=True)
    test_loader = DataLoader(test, 256)

    model: nn.Module = Net(side).to(device)
    optimizer: Optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    if args.enable_msamp:
        model, optimizer = msamp.initialize(model, optimizer, opt_level=args.opt_level)

    scheduler = StepLR(optimizer, step_size=1, gamma=args.gamma)
    accuracy = 0.0
    for epoch in range(1, args.epochs + 1):
        loss = train_epoch(model, device, train_loader, optimizer)
        accuracy = evaluate(model, device, test_loader)
        print(f"epoch {epoch}: last loss {loss:.4f}, test accuracy {accuracy:.3f}", flush=True)
        scheduler.step()
    return model, accuracy


if __name__ == "__main__":
    main()
