"""Gradients that a graph quantizes: handed out without a copy, and kept where somebody holds them."""

import copy

import pytest
import torch
from torch import nn

from nemo_lowprec.compute.graphs.quantized_gradients import QuantizedGradients
from nemo_lowprec.grads import Fp8Gradients
from nemo_lowprec.tensors import GradientTensor


class Graph:
    """Backward passes that write the same memory, as those of a CUDA graph."""

    def __init__(self, *params):
        self.params = params
        self.buffers = [torch.empty_like(param) for param in params]
        self.quantized = QuantizedGradients(params)
        self.values = [torch.empty_like(param) for param in params]
        self._replay()

    def _replay(self):
        for buffer, values in zip(self.buffers, self.values, strict=True):
            buffer.copy_(values)
        self.quantized.quantize(self.buffers)

    def backward(self, others=()):
        """The values of the gradients, which are new in each pass."""
        self.values = [torch.randn_like(param) for param in self.params]
        loss = sum(param.sum() for param in others)
        (_Replayed.apply(self, *self.params) + loss).backward()
        return self.values


class _Replayed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, graph, *params):
        ctx.graph = graph
        return params[0].new_zeros(())

    @staticmethod
    def backward(ctx, _):
        graph = ctx.graph
        graph.quantized.hold()
        graph._replay()
        found = [buffer.detach() for buffer in graph.buffers]
        graph.quantized.offer(found)
        return None, *found


@pytest.fixture
def params():
    return nn.Parameter(torch.randn(4, 256)), nn.Parameter(torch.randn(8, 128))


@pytest.fixture
def graph(params):
    column = Fp8Gradients()
    column.cover(params)
    yield Graph(*params)
    column.remove()


def is_stored(grad, values):
    expected = GradientTensor.from_float(values)
    return all(
        torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        for a, b in zip(grad.parts(), expected.parts(), strict=True)
    )


def test_a_gradient_is_handed_out_without_a_copy(graph, params):
    seen = set()
    for _ in range(3):
        values = graph.backward()
        assert all(is_stored(p.grad, v) for p, v in zip(params, values, strict=True))
        seen.add(params[0].grad.data_blocks.data_ptr())
        params[0].grad.mul_(0.5)  # as clipping does
        for param in params:
            param.grad = None
    assert len(seen) == 1


def test_micro_batches_add_up(graph, params):
    graph.backward()
    first = params[0].grad.dequantize()
    values = graph.backward()[0]
    expected = GradientTensor.from_float(first).accumulate_(values)
    assert torch.equal(params[0].grad.dequantize(), expected.dequantize())
    last = graph.backward()[0]
    assert torch.equal(params[0].grad.dequantize(), expected.accumulate_(last).dequantize())
    for param in params:
        param.grad = None
    values = graph.backward()[1]
    assert is_stored(params[1].grad, values)


@pytest.mark.parametrize("hold", [lambda g: g, lambda g: g.detach(), lambda g: g.data_blocks.view(torch.uint8)])
def test_what_somebody_holds_keeps_its_values(graph, params, hold):
    values = graph.backward()[0]
    held = hold(params[0].grad)
    before = copy.deepcopy(held)
    for param in params:
        param.grad = None
    for _ in range(2):
        values = graph.backward()[0]
        assert is_stored(params[0].grad, values)
        params[0].grad = params[1].grad = None
    read = (lambda t: t) if held.dtype == torch.uint8 else (lambda t: t.dequantize())
    assert torch.equal(read(held), read(before))
    del held
    graph.backward()
    assert params[0].grad is graph.quantized._stored[0].tensor  # nobody holds it: no copies any more


def test_a_parameter_that_others_read_too(graph, params):
    values = graph.backward(others=params)
    assert all(is_stored(p.grad, v + 1.0) for p, v in zip(params, values, strict=True))


def test_gradients_that_are_not_finite_are_noted_once(graph, params):
    graph.backward()
    for param in params:
        param.grad = None
    graph.values = [torch.full_like(param, float("inf")) for param in params]
    graph.quantized.hold()
    graph._replay()
    assert graph.quantized._flags.eq(1).all()
    graph.backward()
    assert graph.quantized._flags.eq(0).all()


def test_parameters_whose_gradients_are_stored_otherwise_are_left_alone():
    vector, matrix, plain = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4, 4)), nn.Parameter(torch.ones(4, 4))
    column = Fp8Gradients()
    column.cover([vector, matrix])
    assert list(QuantizedGradients([vector, matrix, plain])._stored) == [1]
    column.remove()
    assert not QuantizedGradients([vector, matrix, plain])._stored
    released = Fp8Gradients(release=lambda param: None)
    released.cover([matrix])
    assert not QuantizedGradients([matrix])._stored
    released.remove()
