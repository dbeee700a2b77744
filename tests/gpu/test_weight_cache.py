"""Quantized weights that layers keep from step to step: the bits of weights that are quantized at each use."""

import pytest
import torch
import torch.nn.functional as F
from support import assert_same, kernels_or_skip
from torch import nn
from transformers.pytorch_utils import Conv1D

from nemo_lowprec import prepare
from nemo_lowprec.chart import CHART
from nemo_lowprec.chart.recipe import Recipe
from nemo_lowprec.compute.backends import class_of
from nemo_lowprec.engine import Engine
from nemo_lowprec.kernels.loader import weight_kernels

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

LEVELS = [
    "bf16_with_fp8_mixed", "te_fp8", "msamp_o2", "msamp_o3", "bf16_with_fp8_mixed+fp8_params",
    "bf16_with_fp8_rowwise_mixed", "bf16_with_fp8_subchannel_scaling_mixed",
]  # fmt: skip


class Attends(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(256, 4)

    def forward(self, x):
        x = x.view(16, 8, 256)
        return self.attention(x, x, x, need_weights=False)[0].reshape(128, 256)


def start(case, backend, weight_cache, **options):
    name, _, variant = case.partition("+")
    recipe = Recipe(CHART[name].scaling)
    reason = class_of(backend, recipe).unavailable(recipe)
    if reason:
        pytest.skip(reason)
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(256, 512), nn.GELU(), Conv1D(256, 512), Attends(), nn.Linear(256, 256)).cuda()
    options |= {"fp8_params": True} if variant else {}
    model, optimizer = prepare(
        model, torch.optim.AdamW(model.parameters(), lr=1e-3), name, backend=backend, convert="*",
        weight_cache=weight_cache, **options,
    )  # fmt: skip
    assert Engine.of(model).amaxes.weights.keeps == weight_cache
    return model, optimizer


def batch(seed):
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(2, 128, 256, device="cuda", generator=generator)


def loss_of(model, seed=0, x=None):
    own, y = batch(seed)
    with torch.autocast("cuda", torch.bfloat16):
        return F.mse_loss(model(own if x is None else x).float(), y)


def steps(case, backend, weight_cache):
    """What four steps of two micro-batches lead to, with an evaluation and a written weight among them."""
    model, optimizer = start(case, backend, weight_cache)
    losses = []
    for i in range(4):
        for micro in range(2):
            loss = loss_of(model, 2 * i + micro)
            loss.backward()
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        if i == 1:
            model.eval()
            with torch.inference_mode():
                losses.append(loss_of(model).clone())
            model.train()
        if i == 2:
            with torch.no_grad():
                model[0].weight.mul_(0.5)
    found = {"losses": torch.stack(losses), "weights": [p.detach().float() for p in model.parameters()]}
    return found, Engine.of(model).amaxes.state_dict()


@pytest.mark.parametrize("backend", ["torch", "te"])
@pytest.mark.parametrize("case", LEVELS)
def test_kept_weights_change_no_bit(case, backend):
    (found, histories), (want, others) = steps(case, backend, True), steps(case, backend, False)
    assert_same(found, want)
    assert_same(histories, others)
    assert found["losses"].isfinite().all()


def graph_over_a_step(case):
    """Go backward through a graph that was made before the step, once the weights are quantized anew."""
    kernels_or_skip(weight_kernels())
    model, optimizer = start(case, "torch", True)
    loss_of(model).backward()
    loss = loss_of(model, x=batch(0)[0].requires_grad_())
    optimizer.step()
    loss_of(model)
    loss.backward()


@pytest.mark.parametrize("case", LEVELS)
def test_backward_over_a_step_is_refused(case):
    """As by ``nn.Linear``: the operands are made anew in place, and their versions are raised."""
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        graph_over_a_step(case)


@pytest.mark.parametrize("case", LEVELS)
def test_a_step_of_other_weights_is_not(case):
    """The kept weights of the first layer are made anew with all others, with the same bits."""
    kernels_or_skip(weight_kernels())
    model, _ = start(case, "torch", True)
    optimizer = torch.optim.AdamW(model[4].parameters(), lr=1e-3)
    for _ in range(2):
        hidden = model[:4](batch(0)[0].requires_grad_())
        loss = F.mse_loss(model[4](hidden.detach()).float(), batch(0)[1])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        F.mse_loss(model[4](hidden).float(), batch(0)[1]).backward()
    assert all(p.grad.float().isfinite().all() for p in model.parameters())


def test_weights_and_scales_that_an_evaluation_has_made_first_are_trained_with():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).cuda()
    model, optimizer = prepare(model, torch.optim.AdamW(model.parameters()), "bf16_with_fp8_mixed")
    x = torch.randn(32, 64, device="cuda")
    for _ in range(3):
        model.eval()
        with torch.inference_mode(), torch.autocast("cuda", torch.bfloat16):
            model(x)
        model.train()
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(x).float().pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert loss.isfinite()
