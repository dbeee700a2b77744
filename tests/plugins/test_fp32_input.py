"""Norms and other layers that no level converts take FP32 input in training and in evaluation, at every level."""

import pytest
import torch
from support import CASES, Net, level_of, loader, plugin, train, trainer
from torch import nn

import nemo_lowprec

LAYERS = {
    "LayerNorm": lambda: nn.LayerNorm(32),
    "LayerNorm without bias": lambda: nn.LayerNorm(32, bias=False),
    "RMSNorm": lambda: nn.RMSNorm(32),
    "GroupNorm": lambda: nn.GroupNorm(4, 32),
    "InstanceNorm": lambda: nn.InstanceNorm1d(8, affine=True),
    "InstanceNorm with statistics": lambda: nn.InstanceNorm1d(8, affine=True, track_running_stats=True),
    "BatchNorm": lambda: nn.BatchNorm1d(32),
    "BatchNorm without statistics": lambda: nn.BatchNorm1d(32, track_running_stats=False),
    "Conv1d": lambda: nn.Conv1d(8, 8, 3, padding=1),
    "Bilinear": lambda: nn.Bilinear(32, 32, 32),
    "EmbeddingBag": lambda: nn.EmbeddingBag(8, 32, mode="sum"),
    "PReLU": lambda: nn.PReLU(32),
}


class First(nn.Module):
    """A layer that reads the data themselves, 8 channels of 4 where it wants channels."""

    def __init__(self, name):
        super().__init__()
        torch.manual_seed(1)
        self.first = LAYERS[name]()

    def forward(self, x):
        if isinstance(self.first, nn.EmbeddingBag):
            return self.first(torch.arange(8).repeat(len(x), 1), per_sample_weights=x[:, :8])
        if isinstance(self.first, nn.Bilinear):
            return self.first(x, x)
        if isinstance(self.first, nn.InstanceNorm1d | nn.Conv1d):
            return self.first(x.view(-1, 8, 4)).flatten(1)
        return self.first(x)


class Model(Net):
    def __init__(self, name):
        super().__init__()
        self.first = First(name)
        self.seen = []

    def forward(self, x):
        h = self.first(x)
        if not self.training:
            self.seen.append(h.detach().float())
        return super().forward(h)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("case", CASES)
def test_fit_and_validation(case, name):
    model, plain = Model(name), Model(name).eval()
    trainer(plugin(case)).validate(model, loader(), verbose=False)
    got = model.seen[0]
    want = plain.first(loader().dataset.x[:4])
    torch.testing.assert_close(got, want.detach(), rtol=0.02, atol=0.05)
    before = {n: p.detach().clone() for n, p in model.first.named_parameters()}
    train(model, case, max_steps=1)
    assert all(not torch.equal(p, before[n]) for n, p in model.first.named_parameters())


class Product(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = nn.Parameter(torch.randn(4, 32, 8) / 8)

    def forward(self, x):
        return torch.bmm(x.expand(4, -1, -1), self.experts)


EVERYWHERE = {
    **{name: make for name, make in LAYERS.items() if name not in ("EmbeddingBag", "Bilinear")},
    "Linear": lambda: nn.Linear(32, 32),
    "a small Linear": lambda: nn.Linear(32, 5),
    "Conv2d": lambda: nn.Conv2d(8, 8, 1),
    "Conv3d": lambda: nn.Conv3d(8, 8, 1),
    "ConvTranspose1d": lambda: nn.ConvTranspose1d(8, 8, 3),
    "RNN": lambda: nn.RNN(32, 16),
    "LSTM": lambda: nn.LSTM(32, 16, bidirectional=True),
    "GRU": lambda: nn.GRU(32, 16),
    "RNNCell": lambda: nn.RNNCell(32, 16),
    "LSTMCell": lambda: nn.LSTMCell(32, 16),
    "GRUCell": lambda: nn.GRUCell(32, 16),
    "spectral_norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(32, 32)),
    "weight_norm": lambda: nn.utils.parametrizations.weight_norm(nn.Conv1d(8, 8, 3)),
    "a module of one's own": Product,
    "layers": lambda: nn.Sequential(nn.Conv1d(8, 8, 1), nn.BatchNorm1d(8), nn.PReLU(), nn.Flatten(), nn.Linear(32, 32)),
    "TransformerEncoderLayer": lambda: nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0),
}
SHAPES = {"Conv2d": (-1, 8, 2, 2), "Conv3d": (-1, 8, 2, 2, 1), "Product": (-1, 32)}
CHANNELS = ("Conv1d", "ConvTranspose1d", "weight_norm", "layers", "InstanceNorm", "InstanceNorm with statistics")


def apply(name, layer, x):
    out = layer(x.view(SHAPES.get(name, (-1, 8, 4) if name in CHANNELS else (-1, 32))))
    return out[0] if isinstance(out, tuple) else out


class Callbacks(Net):
    """Calls its layers, and itself, where nobody has opened autocast."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleDict({n.replace(".", ""): make() for n, make in EVERYWHERE.items()})

    def on_train_batch_start(self, batch, batch_idx):
        x = batch["x"].repeat(4, 1)
        self.found = {}
        for name, layer in self.layers.items():
            out = apply(name, layer, x)
            self.zero_grad()
            out.sum().backward()
            assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters()), name
            self.zero_grad()
            with torch.no_grad():
                self.found[name] = out, apply(name, layer, x), apply(name, layer.eval(), x)
        assert not torch.is_autocast_enabled("cpu")
        self.found["model"] = (self(x),)
        with pytest.raises(RuntimeError):
            self(x[:, :3])
        assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("case", CASES)
def test_outside_of_autocast_every_layer_computes_as_one_with_fp32_weights_would(case):
    model, plain = Callbacks(), Callbacks()
    train(model, case, max_steps=1)
    x = loader().dataset.x[:4].repeat(4, 1)
    error = 0.4 if level_of(case).compute == "nvfp4" else 0.1
    for name, layer in plain.layers.items():
        *training, evaluated = model.found[name]
        for got, want in [*((got, apply(name, layer.train(), x)) for got in training), (evaluated, None)]:
            want = apply(name, layer.eval(), x) if want is None else want
            assert got.dtype == torch.float32, name
            assert (got - want).norm() < error * want.norm(), (name, got, want)
    assert model.found["model"][0].dtype == torch.float32
    torch.testing.assert_close(model.found["model"][0], plain(x), rtol=0.1, atol=3 * error)


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_in_a_plain_loop_without_autocast_layers_compute_in_fp32(level):
    model, _ = nemo_lowprec.initialize(First("Conv1d"), opt_level=level)
    x = loader().dataset.x
    plain = First("Conv1d").first
    want = nn.functional.conv1d(x.view(-1, 8, 4), plain.weight.half().float(), plain.bias, padding=1).flatten(1)
    torch.testing.assert_close(model(x), want, rtol=1e-6, atol=1e-6)
