"""Kinds of modules under ``lowprec_sharded``: they learn as in one process, whatever reads their parameters."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard

from nemo_lowprec.data.loader import ResumableLoader
from nemo_lowprec.strategies import LowPrecisionShardedStrategy
from nemo_lowprec.tensors.dtensor import local_shard
from tests.processes import on_processes
from tests.support import Net, Samples, level_of, linear_optimizer, loader, plugin, save_at, trainer

CASES = ["fp16_amp", "msamp_o2", "msamp_o3", "fp16_mixed", "bf16_mixed", "bf16_with_fp8_mixed+fp8_params"]
AT_CASES = pytest.mark.parametrize("case", CASES)


class Block(nn.Module):
    def __init__(self, odd, call):
        super().__init__()
        self.odd, self.call, self.lin = odd, call, nn.Linear(64, 64)

    def forward(self, x):
        return x + self.call(self.odd, self.lin(x)).to(x.dtype).reshape(x.shape)


class Kind(Net):
    """The module in question in each of two blocks, and outside of any."""

    def __init__(self, **options):
        super().__init__(**options)
        self.inp = nn.Linear(32, 64)
        self.norm = self.mid = nn.Identity()
        self.blocks = nn.ModuleList(Block(self.odd(), self.call) for _ in range(2))
        self.outside = self.odd()
        self.head = nn.Linear(64, 32)
        self.dtypes = set()

    def forward(self, x):
        out = self.call(self.outside, self.inp(x))
        self.dtypes |= {str(p.dtype) for p in self.outside.parameters()}
        x = self.inp(x) + out.reshape(len(x), 64)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def kind(make, call=lambda odd, x: odd(x), **options):
    return type("Of", (Kind,), {"odd": lambda self: make(), "call": staticmethod(call), "level": options})


class Unread(nn.Module):
    """Reads a layer's weight, and does not call it."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(64, 64, bias=False)

    def forward(self, x):
        return F.linear(x, self.inner.weight)


class Gain(nn.Module):
    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(2, 32))

    def forward(self, x):
        return x * self.gain.view(-1)


def tall(odd, x):
    return odd(x.view(len(x), 16, 4))


def attend(odd, x):
    x = x.view(len(x), 2, 32)
    return odd(x, x, x)[0]


KINDS = {
    "batchnorm": kind(lambda: nn.BatchNorm1d(64)),
    "instancenorm": kind(lambda: nn.InstanceNorm1d(16, affine=True, track_running_stats=True), tall),
    "groupnorm": kind(lambda: nn.GroupNorm(4, 16), tall),
    "attention": kind(lambda: nn.MultiheadAttention(32, 2, batch_first=True), attend),
    "other sizes": kind(
        lambda: nn.MultiheadAttention(32, 2, kdim=64, vdim=64, batch_first=True),
        lambda odd, x: odd(x.view(len(x), 2, 32), x[:, None], x[:, None])[0],
    ),
    "encoder": kind(
        lambda: nn.TransformerEncoderLayer(32, 2, 64, 0.0, batch_first=True), lambda odd, x: odd(x.view(len(x), 2, 32))
    ),
    "lstm": kind(lambda: nn.LSTM(4, 4, batch_first=True), lambda odd, x: tall(odd, x)[0]),
    "embedding": kind(lambda: nn.EmbeddingBag(32, 64), lambda odd, x: odd(x.new_ones(len(x), 1, dtype=torch.long))),
    "convolution": kind(lambda: nn.Conv1d(16, 16, 3, padding=1), tall),
    "patches": kind(lambda: nn.Conv1d(16, 64, 4, 4), tall, convert=None),
    "weight norm": kind(lambda: nn.utils.parametrizations.weight_norm(nn.Linear(64, 64))),
    "spectral norm": kind(lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(64, 64))),
    "unread": kind(Unread),
    "gain": kind(Gain),
    "bilinear": kind(lambda: nn.Bilinear(64, 64, 64), lambda odd, x: odd(x, x) * 0.01),
}
# At fewer levels, and Bilinear at none where torch's autocast of CPUs gives it no common dtype.
FEW = {"groupnorm", "other sizes", "embedding", "convolution", "gain", "bilinear"}
AT_FEW = {"patches": ["msamp_o3", "bf16_with_fp8_mixed+fp8_params"]}
AT_FEW |= {name: ["fp16_mixed", "bf16_mixed"] if name in ("groupnorm", "bilinear") else ["msamp_o3"] for name in FEW}
KINDS_AT = [(name, case) for name in KINDS for case in AT_FEW.get(name, CASES)]


class CutByUser(KINDS["batchnorm"]):
    """Sharded by its user."""

    def configure_model(self):
        if getattr(self, "cut", False):
            for module in (*self.blocks, self):
                fully_shard(module, mesh=self.device_mesh["data_parallel"])


class InTheStep(Net):
    """A step that calls nothing of the root before it reads a layer's weight."""

    def training_step(self, batch, batch_idx):
        x = F.linear(batch["x"], self.inp.weight, self.inp.bias)
        x = F.linear(x, self.mid.weight)
        loss = F.cross_entropy(self.head(x).float(), batch["y"])
        self.losses.append(loss.item())
        return loss


def run(case, net, rank=None, folder=None, ckpt=None, steps=2):
    model = net(optimizer=linear_optimizer(case, 0.02))
    model.cut = rank is not None
    options = {}
    if rank is not None:
        options = {"devices": 2, "strategy": LowPrecisionShardedStrategy(), "use_distributed_sampler": False}
    size, place = (8, (rank, 2)) if rank is not None else (16, (0, 1))
    data = ResumableLoader(Samples(32), size, 3, *place, global_batch_size=16)
    callbacks = [] if folder is None else [save_at(folder, 2)]
    one = trainer(plugin(case, **getattr(net, "level", {})), *callbacks, max_steps=steps, max_epochs=-1, **options)
    one.fit(model, data, loader(8), ckpt_path=ckpt)
    weights = {name: local_shard(p).shape for name, p in model.named_parameters()}
    if net is KINDS["patches"]:
        assert len(one.precision_plugin.engine.columns.computation.conversion.patches) == 3
    return {"losses": model.losses, "dtypes": sorted(getattr(model, "dtypes", ())), "weights": len(weights)}


def resumed(case, net, rank, folder):
    """Losses of three steps, and of the third one after a resume."""
    whole = run(case, net, rank, folder, steps=3)
    return [*whole["losses"], *run(case, net, rank, ckpt=f"{folder}/step=2.ckpt", steps=3)["losses"]]


def every(rank, folder):
    found = {f"{name} {case}": run(case, KINDS[name], rank) for name, case in KINDS_AT}
    for case in CASES:
        found[f"cut {case}"] = run(case, CutByUser, rank)
        found[f"step {case}"] = run(case, InTheStep, rank)
        found[f"resumed {case}"] = resumed(case, KINDS["batchnorm"], rank, f"{folder}/{case}")
    return found


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    return on_processes(2, folder, every, str(folder))


def mean(two, key):
    return [sum(pair) / 2 for pair in zip(*(found[key]["losses"] for found in two), strict=True)]


@pytest.mark.parametrize(("name", "case"), KINDS_AT)
def test_a_kind_of_module_learns_as_in_one_process(name, case, two):
    if name == "batchnorm":  # each process has the statistics of its own samples
        want = mean(two, f"{name} fp16_amp")
    else:
        want = run(case, KINDS[name])["losses"]
    assert mean(two, f"{name} {case}") == pytest.approx(want, abs=0.05 if level_of(case).has_fp8 else 0.01)


@AT_CASES
def test_norms_with_statistics_are_gathered_in_fp32(case, two):
    for name in ("batchnorm", "instancenorm"):
        assert two[0][f"{name} {case}"]["dtypes"] == ["torch.float32"]
    half = {"fp16_mixed": "torch.float16", "bf16_mixed": "torch.bfloat16"}
    if case in half:  # as other norms are
        assert two[0][f"groupnorm {case}"]["dtypes"] == [half[case]]


@AT_CASES
def test_units_of_a_user_gather_them_so_too(case, two):
    assert two[0][f"cut {case}"]["dtypes"] == ["torch.float32"]
    assert mean(two, f"cut {case}") == mean(two, f"batchnorm {case}")


@AT_CASES
def test_a_step_may_read_weights_of_layers_that_it_does_not_call(case, two):
    want = run(case, InTheStep)["losses"]
    assert mean(two, f"step {case}") == pytest.approx(want, abs=0.05 if level_of(case).has_fp8 else 0.01)


@AT_CASES
def test_they_are_saved_and_restored(case, two):
    for found in two:
        *whole, after = found[f"resumed {case}"]
        assert len(whole) == 3 and after == whole[2]
