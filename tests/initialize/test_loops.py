"""Plain loops at the MS-AMP levels: FP32, FP16 autocast with GradScaler, BF16 autocast; accumulation and clipping."""

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from low_bit import values
from sklearn.datasets import load_digits
from torch import nn, optim

import nemo_lowprec
from nemo_lowprec.tensors import GradientTensor

LEVELS = ["O1", "O2", "O3"]
LOOPS = {"fp32": None, "fp16": torch.float16, "bf16": torch.bfloat16}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.conv = nn.Conv2d(1, 16, 3, padding=1)
        self.fc1 = nn.Linear(256, 64)
        self.fc2 = nn.Linear(64, 64)
        self.head = nn.Linear(64, 10)

    def forward(self, x):
        x = F.max_pool2d(torch.tanh(self.conv(x)), 2).flatten(1)
        return self.head(torch.tanh(self.fc2(torch.tanh(self.fc1(x)))))


@pytest.fixture(scope="module")
def digits():
    data = load_digits()
    return torch.tensor(data.images, dtype=torch.float32)[:, None] / 16, torch.tensor(data.target)


def train(digits, loop, level=None, steps=60, make=optim.AdamW, clip=None):
    """Losses of the loop, and the accuracy on images that it has not seen."""
    images, target = digits
    model = Net()
    optimizer = make(model.parameters(), lr=5e-3)
    if level:
        model, optimizer = nemo_lowprec.initialize(model, optimizer, opt_level=level)
    half = LOOPS[loop]
    scaler = torch.amp.GradScaler("cpu", enabled=loop == "fp16", init_scale=2.0**20, growth_interval=20)
    schedule = optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    losses = []
    for step in range(steps):
        part = slice(step % 40 * 32, (step % 40 + 1) * 32)
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=half) if half else nullcontext():
            loss = F.cross_entropy(model(images[part]), target[part])
        scaler.scale(loss).backward()
        if clip is not None:
            scaler.unscale_(optimizer)
            clip(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        schedule.step()
        losses.append(loss.item())
    with torch.no_grad():
        accuracy = (model(images[1400:]).argmax(1) == target[1400:]).float().mean().item()
    return torch.tensor(losses), accuracy


@pytest.fixture(scope="module")
def plain(digits):
    return {make: train(digits, "fp32", make=make) for make in (optim.AdamW, optim.Adam)}


@pytest.mark.parametrize(
    "level,loop,make", [*((level, loop, optim.AdamW) for level in LEVELS for loop in LOOPS), ("O2", "fp16", optim.Adam)]
)
def test_the_loss_falls_as_in_fp32(digits, plain, loop, level, make):
    losses, accuracy = train(digits, loop, level, make=make)
    want, best = plain[make]
    assert losses[0] == pytest.approx(float(want[0]), rel=0.02)
    assert abs(losses[-20:].mean() - want[-20:].mean()) < 0.1 and losses[-20:].mean() < 0.3 * losses[0]
    assert accuracy > best - 0.04 > 0.75


@pytest.mark.parametrize("level", ["O1", "O3"])
@pytest.mark.parametrize("clip", [nemo_lowprec.clip_grad_norm_, nn.utils.clip_grad_norm_])
def test_clipping_of_ours_and_of_torch(digits, level, clip):
    losses, _ = train(digits, "fp16", level, steps=30, clip=clip)
    want, _ = train(digits, "fp32", steps=30, clip=nn.utils.clip_grad_norm_)
    assert abs(losses[-5:].mean() - want[-5:].mean()) < 0.15


@pytest.mark.parametrize("level", LEVELS)
def test_an_overflow_skips_the_step_and_training_goes_on(digits, level):
    images, target = digits
    model = Net()
    model, optimizer = nemo_lowprec.initialize(model, optim.AdamW(model.parameters(), lr=2e-3), opt_level=level)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def step(spoil=1.0):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.cross_entropy(model(images[:32]), target[:32])
        scaler.scale(loss * spoil).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.item()

    first = [step() for _ in range(3)]
    before = [values(p) for p in model.parameters()]
    step(float("inf"))
    assert scaler.get_scale() == 512
    assert all(torch.equal(values(p), old) for p, old in zip(model.parameters(), before, strict=True))
    later = [step() for _ in range(5)]
    assert scaler.get_scale() == 512 and first[-1] > later[0] > later[-1]


@pytest.mark.parametrize("level", LEVELS)
def test_accumulation_agrees_with_the_full_batch(digits, level):
    images, target = digits
    grads = []
    for parts in (1, 4):
        model, _ = nemo_lowprec.initialize(Net(), opt_level=level)
        for x, y in zip(images[:64].chunk(parts), target[:64].chunk(parts), strict=True):
            (F.cross_entropy(model(x), y) / parts).backward()
        grads.append([p.grad for p in model.parameters()])
    for whole, summed in zip(*grads, strict=True):
        assert isinstance(summed, GradientTensor) == (whole.dim() > 1)
        assert (values(summed) - values(whole)).norm() <= 0.2 * values(whole).norm()


@pytest.mark.parametrize("level", LEVELS)
def test_evaluation_in_the_middle_changes_nothing(digits, level):
    images, target = digits
    runs = []
    for evaluates in (False, True):
        model = Net()
        model, optimizer = nemo_lowprec.initialize(model, optim.AdamW(model.parameters(), lr=2e-3), opt_level=level)
        losses = []
        for _ in range(4):
            if evaluates:
                model.eval()
                with torch.no_grad():
                    model(images[100:140] * 50)
                model.train()
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images[:32]), target[:32])
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        runs.append(losses)
    assert runs[0] == runs[1]
