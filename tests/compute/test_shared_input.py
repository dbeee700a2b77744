"""Layers that read the same tensor quantize it once, and no number changes."""

import copy
import gc

import pytest
import torch
from torch import nn

from nemo_lowprec.compute import LayerFilter, Recipe, ReferenceBackend, convert_layers


class Counting(ReferenceBackend):
    """Counts how often an input is quantized."""

    def __init__(self):
        self.inputs = 0

    def quantize(self, values, operand, **kwargs):
        self.inputs += operand.kind == "input"
        return super().quantize(values, operand, **kwargs)


class Block(nn.Module):
    """q, k and v read one tensor; with ``apart`` each reads a copy of its own."""

    def __init__(self, apart=False):
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.v, self.out = (nn.Linear(32, 32) for _ in range(4))
        self.apart = apart

    def forward(self, x):
        q, k, v = (layer(x.clone() if self.apart else x) for layer in (self.q, self.k, self.v))
        return self.out(torch.tanh(q * k + v))


def converted(scaling, apart=False, **arguments):
    recipe, backend, block = Recipe(scaling, **arguments), Counting(), Block(apart)
    histories = recipe.histories()
    convert_layers(block, torch.bfloat16, recipe, backend, None, LayerFilter(), histories)
    return block, backend, histories


def train(block, histories, steps=4):
    optimizer = torch.optim.SGD(block.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(1)
    outputs = []
    for step in range(steps):
        for _ in range(2):  # micro-batches of different sizes of numbers
            x = torch.randn(16, 32, generator=generator, requires_grad=True) * (step + 1)
            out = block(x)
            out.float().pow(2).sum().backward()
            outputs.append(out.detach())
        optimizer.step()
        optimizer.zero_grad()
        if histories is not None:
            histories.update()
    return torch.stack(outputs)


@pytest.mark.parametrize("scaling", ["delayed", "current", "blockwise"])
def test_sharing_changes_no_number(scaling):
    runs = []
    for apart in (False, True):
        block, backend, histories = converted(scaling, apart)
        out = train(block, histories)
        runs.append((out, list(block.parameters()), histories.state_dict() if histories else None, backend.inputs))
    (out, params, state, inputs), (want, want_params, want_state, all_inputs) = runs
    assert torch.equal(out, want) and all(torch.equal(p, q) for p, q in zip(params, want_params, strict=True))
    assert (inputs, all_inputs) == (2 * 8, 4 * 8)
    if state is not None:
        for name, operand in state["operands"].items():
            for key in ("amax_history", "scale", "cold"):
                assert torch.equal(torch.tensor(operand[key]), torch.tensor(want_state["operands"][name][key])), name


def test_a_tensor_that_was_changed_in_place_is_quantized_again():
    block, backend, _ = converted("current")
    with torch.no_grad():
        x = torch.ones(16, 32)
        first = block.q(x)
        x.mul_(2)
        torch.testing.assert_close(block.q(x) - block.q.bias, 2 * (first - block.q.bias))
    assert backend.inputs == 2


def test_the_quantized_tensor_goes_with_the_tensor_it_was_made_from():
    block, _, _ = converted("current")
    shared = block.q.gemm_plan.inputs
    assert shared is block.out.gemm_plan.inputs
    x = torch.ones(16, 32)
    with torch.no_grad():
        block.q(x)
        assert shared._quantized is not None
        del x
        gc.collect()
        assert shared._quantized is None


def test_inference_tensors_and_copies_of_the_model():
    block, backend, _ = converted("delayed")
    with torch.inference_mode():
        x = torch.ones(16, 32)
        want = block(x)
    assert backend.inputs == 4
    twin = copy.deepcopy(block)
    assert twin.q.gemm_plan.inputs is not block.q.gemm_plan.inputs
    with torch.no_grad():
        assert torch.equal(twin.eval()(torch.ones(16, 32)), want)
