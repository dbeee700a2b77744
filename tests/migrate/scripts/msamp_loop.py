"""Trains a classifier of digits with MS-AMP, by the lines that MS-AMP's README adds to a loop."""

import msamp
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
digits = load_digits()
x = torch.tensor(digits.data, dtype=torch.float32, device=device) / 16
y = torch.tensor(digits.target, device=device)

# model and optimizer as usual, in FP32
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

# FP8 weights, gradients and states
model, optimizer = msamp.initialize(model, optimizer, opt_level="O2")

losses = []
for step in range(20):
    rows = slice(64 * step, 64 * (step + 1))
    with torch.autocast(device, dtype=torch.bfloat16):
        loss = F.cross_entropy(model(x[rows]), y[rows])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
