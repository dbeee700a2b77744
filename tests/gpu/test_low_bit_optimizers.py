"""SGD, Lion and Muon under the Trainer on a GPU, and Muon on shards of two."""

import pytest
import torch
from support import Net, assert_same, plugin, save_at, stateful_loader, train
from torch import optim

from nemo_lowprec.models import muon_groups
from nemo_lowprec.optim import Lion, Muon
from nemo_lowprec.report import Audit
from tests.processes import on_processes
from tests.strategies.test_low_bit_optimizers import assert_as_one_process, plain

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

MAKE = {
    "adamw": lambda m: optim.AdamW(m.parameters(), 1e-2),
    "sgd": lambda m: optim.SGD(m.parameters(), 0.05, momentum=0.9, nesterov=True),
    "lion": lambda m: Lion(m.parameters(), 3e-3),
    "muon": lambda m: Muon(muon_groups(m), 1e-2, adamw_lr=1e-2),
}


class Optimized(Net):
    def __init__(self, name):
        super().__init__()
        self.name = name

    def configure_optimizers(self):
        return MAKE[self.name](self)


def fit(name, precision, *callbacks, accelerator="gpu", **options):
    model = Optimized(name)
    data = stateful_loader()
    return model, train(model, precision, *callbacks, data=data, accelerator=accelerator, max_epochs=4, **options)


@pytest.mark.parametrize("name", MAKE)
@pytest.mark.parametrize(
    ("case", "options"),
    [
        ("msamp_o1", {}),
        ("msamp_o2", {"states": "fp8+fp8"}),
        ("msamp_o3", {}),
        ("msamp_o2+fp16", {}),
        ("bf16_mixed", {}),
    ],
    ids=str,
)
def test_trains_on_a_gpu_as_in_fp32(case, options, name):
    audit = Audit()
    plain_model, _ = fit(name, None)
    model, _ = fit(name, plugin(case, **options), audit)
    assert model.losses == pytest.approx(plain_model.losses, rel=0.1, abs=0.1) and model.losses[-1] < model.losses[0]
    assert audit.report.agrees


@pytest.mark.parametrize("name", MAKE)
@pytest.mark.parametrize("case", ["msamp_o2", "msamp_o3"])
def test_a_run_resumes_bit_for_bit_on_a_gpu(tmp_path, case, name):
    at = lambda: plugin(case, stochastic_rounding=True, states="fp8+fp8")  # noqa: E731
    _, whole = fit(name, at(), save_at(tmp_path, 4), max_steps=8)
    _, again = fit(name, at(), max_steps=8, ckpt=tmp_path / "step=4.ckpt")
    for part in ("weights", "copies", "masters", "optimizers"):
        assert_same(again.state[part], whole.state[part], part)


def on_gpu(rank):
    """Weights after ``plain`` on a GPU, on the CPU."""
    return [{n: w.cpu() for n, w in weights.items()} for weights in plain(rank, f"cuda:{rank or 0}")]


@pytest.mark.multi_gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")
def test_matrices_of_two_gpus_are_orthogonalized_as_a_whole(tmp_path):
    ranks = on_processes(2, tmp_path, on_gpu, backend="nccl")
    # Newton-Schulz in BF16 makes of the rounding errors in a gradient of low rank as much as of the gradient, and a GPU
    # rounds otherwise than a CPU.
    alone = on_gpu(None)
    for found in ranks:
        assert_as_one_process(found, alone)
