"""Models in shared memory and in spawned processes: weights are shared as torch shares them, whatever their storage."""

import pytest
import torch
import torch.multiprocessing as mp
from support import CASES, Samples, plugin
from torch import nn

import nemo_lowprec
from nemo_lowprec.tensors import QuantizedTensor


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.inp, self.norm = nn.Linear(32, 64), nn.LayerNorm(64)
        self.mid, self.head = nn.Linear(64, 64, bias=False), nn.Linear(64, 32)

    def forward(self, x):
        return self.head(torch.tanh(self.mid(self.norm(self.inp(x)))))


def models():
    """One of each level, by name, some of them of ``initialize``; each has taken a training step."""
    made = {}
    for case in CASES:
        engine, made[case] = plugin(case).engine, Net()
        engine.convert(made[case], torch.device("cpu"))
        engine.settle()
    for level in ("O1", "O2", "O3"):
        model, optimizer = nemo_lowprec.initialize(Net(), opt_level=level)
        model(Samples().x).float().square().mean().backward()
        optimizer.step()
        made[level] = model
    return made


def outputs(made):
    with torch.no_grad():
        return {name: model.eval()(Samples().x.to(model.head.weight.dtype)).float() for name, model in made.items()}


def answer(rank, made, told):
    torch.set_num_threads(1)
    for name, out in outputs(made).items():
        told[name].copy_(out)
    for model in made.values():
        with torch.no_grad():
            model.mid.weight.mul_(2)


def test_a_spawned_process_computes_the_same_and_writes_into_the_same_weights():
    made = models()
    for name in ("te_fp8", "msamp_o2", "bf16_with_fp8_mixed+fp8_params", "O1", "O3"):
        made[name].share_memory()
    before = outputs(made)
    told = {name: torch.zeros_like(out) for name, out in before.items()}
    mp.spawn(answer, (made, told), nprocs=1)
    for name, out in before.items():
        assert torch.equal(told[name], out), name
        assert made[name].mid.weight.is_shared()
        assert not torch.equal(outputs({name: made[name]})[name], out), name


@pytest.mark.parametrize("level", ["O1", "O3"])
def test_gradients_and_weights_are_moved_to_shared_memory(level):
    model, optimizer = nemo_lowprec.initialize(Net(), opt_level=level)
    model(Samples().x).float().square().mean().backward()
    assert isinstance(model.mid.weight, QuantizedTensor) and not model.mid.weight.is_shared()
    model.share_memory()
    assert all(p.is_shared() and p.grad.is_shared() for p in model.parameters())
    before = model.mid.weight.dequantize(torch.float32)
    optimizer.step()
    assert not torch.equal(model.mid.weight.dequantize(torch.float32), before)
