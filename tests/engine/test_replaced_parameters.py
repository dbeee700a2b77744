"""Parameters and modules that a model has lost are freed, and leave nothing behind that a new one would meet."""

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import nemo_lowprec
from nemo_lowprec.chart import get_level
from nemo_lowprec.chart.options import parse_options
from nemo_lowprec.engine import Engine
from nemo_lowprec.plugins.manual import ManualPasses
from nemo_lowprec.weights import ShardedWeights
from tests.processes import on_processes

LEVELS = ["te_fp8", "msamp_o2", "msamp_o3", "bf16_mixed", "bf16_with_fp8_mixed"]


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 16))


def train(model, optimizer):
    for _ in range(2):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(torch.randn(8, 64)).float().square().mean()
        loss.backward()
        optimizer.step()


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("level", LEVELS)
def test_a_frozen_layer_that_is_replaced_is_freed(level, dtype, compiled):
    model = net()
    model[1].requires_grad_(False).to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    del optimizer.param_groups[0]["params"][2:4]
    nemo_lowprec.prepare(model, optimizer, level)
    if compiled:
        for layer in model:
            layer.compile(backend="aot_eager")
    train(model, optimizer)
    gone = weakref.ref(model[1].weight)
    model[1] = nn.Identity()
    train(model, optimizer)
    gc.collect()
    assert gone() is None


def run_two(rank):
    """Gradients of a new layer, averaged after the old one's."""
    model = net()
    model, optimizer = nemo_lowprec.prepare(model, torch.optim.AdamW(model.parameters()), "bf16_mixed")
    found = []
    for _ in range(2):
        model(torch.full((4, 64), 1.0 + rank)).float().sum().backward()
        optimizer.all_reduce_grads(model)
        found.append([p.grad.float() for p in model[2].parameters()])
        optimizer.zero_grad()
        model[2] = nn.Linear(64, 16)
        with torch.no_grad():
            for param in model[2].parameters():
                param.fill_(0.5)
    return found


def run_sharded(rank):
    """Whether a module without parameters is freed, and whether a layer that is not sharded is met."""
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    weights = ShardedWeights(True, torch.float32, list, 0, None, *[lambda *args: None] * 3)
    weights.install(model, True)
    weights.settle()
    model(torch.ones(2, 64)).sum().backward()
    gone = weakref.ref(model[1])
    model[1] = nn.Linear(64, 64)
    gc.collect()
    met = [whole.shape for whole, _ in weights.gathered_matrices()]
    weights.remove()
    return gone() is None, met


def test_modules_of_a_sharded_model_that_are_replaced_are_freed(tmp_path):
    for freed, met in on_processes(2, tmp_path, run_sharded):
        assert freed and met == [(64, 64)] * 2


def test_a_new_parameter_with_the_id_of_one_that_is_gone_is_watched():
    passes = ManualPasses(nn.Linear(2, 2), Engine(parse_options(get_level("fp16_mixed"), {})), averages=False)
    gc.freeze()  # a collection then looks at what is new alone
    try:
        for _ in range(50):
            param = nn.Parameter(torch.zeros(2))
            passes.cover([param])
            assert len(param._post_accumulate_grad_hooks or ()) == 1
            del param
            gc.collect()
    finally:
        gc.unfreeze()


def test_the_gradients_of_a_layer_that_is_new_are_averaged(tmp_path):
    first, second = on_processes(2, tmp_path, run_two)
    for one, other in zip(first, second, strict=True):
        for a, b in zip(one, other, strict=True):
            assert torch.equal(a, b)
