"""Optimizers of plain loops that are given a closure, though they need none."""

from itertools import pairwise

import pytest
import torch
from torch import nn

from nemo_lowprec import CHART, prepare


@pytest.mark.parametrize("level", list(CHART))
def test_the_step_takes_the_gradients_that_the_closure_has_made(level):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(32, 48), nn.Linear(48, 16))
    try:
        net, optimizer = prepare(net, torch.optim.AdamW(net.parameters(), lr=2e-3), level)
    except ValueError as error:
        pytest.skip(str(error))
    x = torch.randn(16, 32, generator=torch.Generator().manual_seed(0))
    half = torch.float16 if level.startswith("fp16") else torch.bfloat16

    def closure():
        optimizer.zero_grad()
        with torch.autocast("cpu", half):
            loss = net(x).float().square().mean()
        loss.backward()
        return loss

    losses = [optimizer.step(closure).item() for _ in range(5)]
    losses += [optimizer.step(closure=closure).item() for _ in range(5)]
    assert all(after < before for before, after in pairwise(losses)), losses
    assert losses[-1] < 0.6 * losses[0]
