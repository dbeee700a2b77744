"""A GAN with spectral norms, of both kinds, two optimizers and manual optimization, at every level."""

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from support import CASES, level_of, plugin, replay, trainer
from torch import nn
from torch.nn.utils import parametrizations

STEPS = 12
REAL = torch.randn(16, 32, generator=torch.Generator().manual_seed(5))


class GAN(pl.LightningModule):
    """The hinge losses of a generator and a discriminator, which step in turn."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        torch.manual_seed(1)
        self.generator = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 32))
        new, old = parametrizations.spectral_norm, nn.utils.spectral_norm
        self.discriminator = nn.Sequential(
            nn.Unflatten(-1, (2, 16)), new(nn.Conv1d(2, 8, 3, padding=1)), nn.LeakyReLU(0.1), nn.Flatten(),
            old(nn.Linear(128, 64)), nn.LeakyReLU(0.1), new(nn.Linear(64, 32)), nn.LeakyReLU(0.1), nn.Linear(32, 16),
        )  # fmt: skip
        self.noise = torch.randn(16, 16, generator=torch.Generator().manual_seed(6))
        self.losses, self.seen = [], {}

    def score(self, x):
        return self.discriminator(x).float().mean(-1)

    def training_step(self, real, index):
        noise = self.noise.to(real.device)
        of_discriminator, of_generator = self.optimizers()
        loss = F.relu(1 - self.score(real)).mean() + F.relu(1 + self.score(self.generator(noise).detach())).mean()
        self.losses.append(self.step(of_discriminator, loss))
        loss = -self.score(self.generator(noise)).mean()
        self.losses.append(self.step(of_generator, loss))
        if len(self.losses) == 2 * STEPS:
            self.seen = {
                **{name: p.detach().clone() for name, p in self.named_parameters()},
                **{name: b.clone() for name, b in self.named_buffers()},
            }

    def step(self, optimizer, loss):
        self.toggle_optimizer(optimizer)
        optimizer.zero_grad()
        self.manual_backward(loss)
        trained = [p for group in optimizer.param_groups for p in group["params"]]
        assert all(p.grad.isfinite().all() for p in trained)
        optimizer.step()
        self.untoggle_optimizer(optimizer)
        return loss.item()

    def configure_optimizers(self):
        parts = (self.discriminator, 1e-3), (self.generator, 1e-3)
        return [torch.optim.Adam(part.parameters(), lr=lr, betas=(0.0, 0.9)) for part, lr in parts]


def train(case, accelerator="cpu", **options):
    model = GAN()
    fit = trainer(case and plugin(case, **options), max_epochs=STEPS, accelerator=accelerator)
    fit.fit(model.train(), replay([REAL]))
    return model


@pytest.mark.parametrize("case", CASES)
def test_it_trains_as_in_fp32(case):
    assert_learns_alike(train(case), train(None), case)


def assert_learns_alike(model, plain, case):
    bound = 0.05 if level_of(case).compute == "nvfp4" else 0.02
    assert len(model.losses) == 2 * STEPS
    far = [abs(a - b) for a, b in zip(model.losses, plain.losses, strict=True)]
    assert sum(far) / len(far) < bound * (max(plain.losses) - min(plain.losses)), (model.losses, plain.losses)
    # As far in the power iteration as FP32 is: nothing but the training has computed a weight.
    computed = {n: v for n, v in model.seen.items() if "original" in n or n.endswith(("_orig", "._u", "_u", "_v"))}
    assert len(computed) == 3 * 3
    for name, values in computed.items():
        assert values.dtype == torch.float32, name
        assert F.cosine_similarity(values.flatten(), plain.seen[name].flatten(), dim=0) > 1 - bound, name
        if name.endswith(("_u", "_v")):
            torch.testing.assert_close(values.norm().cpu(), torch.tensor(1.0))
