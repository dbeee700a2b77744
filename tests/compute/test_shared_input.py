"""Layers that read the same tensor quantize it once, and no number changes; they add its gradient up in their GEMMs."""

import copy
import gc
from weakref import ref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from nemo_lowprec.chart.groups import LayerFilter
from nemo_lowprec.chart.recipe import Recipe
from nemo_lowprec.compute import ReferenceBackend, convert_layers
from nemo_lowprec.compute.operands import new_histories
from tests.support import Counting


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
    histories = new_histories(recipe)
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


@pytest.mark.parametrize("scaling", ["delayed", "current", "rowwise", "blockwise"])
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
                assert torch.equal(*(torch.as_tensor(o[key]) for o in (operand, want_state["operands"][name]))), name


@pytest.mark.parametrize("skipped", [False, True])
def test_a_tensor_that_is_read_in_each_step_is_measured_in_each_step(skipped):
    """A fixed batch: the scale of the step before is not used again, and the history has no step without an amax."""
    states = []
    for cloned in (False, True):
        block, _, histories = converted("delayed", fp8_amax_history_len=4)
        fixed = torch.randn(16, 32, generator=torch.Generator().manual_seed(1))
        for step in range(6):
            out = block.q(fixed.clone() if cloned else fixed)
            out.float().sum().backward()
            if skipped and step == 4:
                histories.discard()
            else:
                histories.update()
        states.append([histories.state_dict()["operands"]["q.input"]["amax_history"], out.detach()])
    assert (states[0][0] > 0).all()
    assert all(torch.equal(a, b) for a, b in zip(*states, strict=True))


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
        assert shared._quantized.get(x) is not None
        held = ref(shared._quantized.get(x).data)
        del x
        gc.collect()
        assert held() is None


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


def gradients(block, loss, x):
    """Of ``loss(block, x)``: the input's, then the parameters'."""
    leaf = x.clone().requires_grad_()
    block.zero_grad()
    loss(block, leaf * 1.0).backward()
    return [leaf.grad, *(p.grad for p in block.parameters())]


def inputs(dtype=torch.float32):
    return torch.randn(16, 32, generator=torch.Generator().manual_seed(2)).to(dtype)


def product(block, x):
    return block(x).float().pow(2).sum()


@pytest.mark.parametrize("arguments", [{}, {"override_linear_precision": (False, True, False)}], ids=["fp8", "half"])
@pytest.mark.parametrize("scaling", ["delayed", "current", "rowwise", "blockwise", "mxfp8"])
def test_the_gradient_of_a_shared_input_is_the_sum_of_its_readers(scaling, arguments):
    if scaling == "mxfp8":
        arguments = {"fp8": "e4m3", **arguments}
    block, apart = converted(scaling, **arguments)[0], converted(scaling, apart=True, **arguments)[0]
    torch.testing.assert_close(
        gradients(block, product, inputs()), gradients(apart, product, inputs()), rtol=1e-6, atol=1e-6
    )


def test_a_sum_in_bf16_is_rounded_once_a_reader():
    block, apart = converted("current")[0], converted("current", apart=True)[0]
    x = inputs(torch.bfloat16)
    shared = gradients(block, product, x)[0]
    # The same inputs in FP32: sums that are not rounded.
    exact = gradients(block, lambda b, x: product(b, x.bfloat16().float()), x.float())[0]
    by_autograd = gradients(apart, product, x)[0]
    assert shared.dtype == torch.bfloat16
    error = (shared.float() - exact).norm() / exact.norm()
    assert 0 < error <= (by_autograd.float() - exact).norm() / exact.norm()


@pytest.mark.parametrize("chosen", ["q", "k", "kv", "qv"])
def test_only_readers_that_are_part_of_the_loss_count(chosen):
    def loss(block, x):
        by_name = {n: getattr(block, n)(x.clone() if block.apart else x) for n in "qkv"}
        return sum(by_name[n].float().pow(2).sum() for n in chosen)

    got, want = (gradients(converted("current", apart)[0], loss, inputs()) for apart in (False, True))
    assert [g is None for g in got] == [w is None for w in want]
    for g, w in zip(got, want, strict=True):
        assert g is None or torch.allclose(g, w, rtol=1e-6, atol=1e-6)


def test_backward_twice_and_in_parts():
    block = converted("current")[0]
    leaf = inputs().requires_grad_()
    x = leaf + 0.0  # whose backward saves nothing
    q, k = block.q(x).float().sum(), block.k(x).float().sum()
    (want,) = torch.autograd.grad(q + k, x, retain_graph=True)
    (of_k,) = torch.autograd.grad(k, x, retain_graph=True)
    torch.autograd.grad(k, block.k.weight, retain_graph=True)  # ends before the layer that hands the sum on
    torch.autograd.grad(q, block.q.weight, retain_graph=True)
    assert torch.equal(torch.autograd.grad(q + k, x, retain_graph=True)[0], want)
    q.backward()  # frees what the first layer saved
    k.backward()
    torch.testing.assert_close(leaf.grad, want)
    torch.testing.assert_close(leaf.grad - of_k, torch.autograd.grad(block.q(x).float().sum(), x)[0])


class Forgetful(torch.autograd.Function):
    """Returns its input, and no gradient for it."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return None


@pytest.mark.parametrize("forgotten", ["q", "k", "v", "qk", "kv", "qv", "qkv"])
def test_readers_that_get_no_gradient_count_as_absent(forgotten):
    def loss(block, x):
        outs = {n: getattr(block, n)(x.clone() if block.apart else x) for n in "qkv"}
        return sum((Forgetful.apply(o) if n in forgotten else o).float().pow(2).sum() for n, o in outs.items())

    got, want = (gradients(converted("current", apart)[0], loss, inputs()) for apart in (False, True))
    assert [g is None for g in got] == [w is None for w in want]
    for g, w in zip(got, want, strict=True):
        assert g is None or torch.allclose(g, w, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("where", ["x", "q", "k"])
def test_hooks_that_return_none_and_hooks_that_change_a_gradient(where):
    def loss(block, x, factor=None):
        seen = {"x": x, "q": block.q(x), "k": block.k(x)}
        seen[where].register_hook(lambda g: None if factor is None else g * factor)
        return seen["q"].float().pow(2).sum() + seen["k"].float().pow(2).sum()

    block = converted("current")[0]
    plain = gradients(block, lambda b, x: b.q(x).float().pow(2).sum() + b.k(x).float().pow(2).sum(), inputs())
    assert all(g is w or torch.equal(g, w) for g, w in zip(gradients(block, loss, inputs()), plain, strict=True))
    doubled = gradients(block, lambda b, x: loss(b, x, 2.0), inputs())
    apart = converted("current", apart=True)[0]
    want = gradients(apart, lambda b, x: sum(
        (2 if where in (n, "x") else 1) * getattr(b, n)(x.clone()).float().pow(2).sum() for n in "qk"
    ), inputs())  # fmt: skip
    torch.testing.assert_close(doubled[0], want[0], rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("view", ["transposed", "slice", "detached", "requires_grad_"])
def test_inputs_that_are_views_or_apart_from_the_graph(view):
    def loss(block, x):
        first = block.q(x.clone() if block.apart else x).float().pow(2).sum()
        if view == "transposed":
            other = (x.new_zeros(32, 16) + x.t()).t()
        elif view == "slice":
            other = torch.cat([x, x])[8:24]
        else:
            other = x.detach()
        other = other.requires_grad_() if view == "requires_grad_" else other
        return first + sum(getattr(block, n)(other.clone() if block.apart else other).float().pow(2).sum() for n in
                           "kv")  # fmt: skip

    got, want = (gradients(converted("current", apart)[0], loss, inputs()) for apart in (False, True))
    for g, w in zip(got, want, strict=True):
        assert g is w or torch.allclose(g, w, rtol=1e-6, atol=1e-5)


def test_a_leaf_whose_data_are_replaced_is_quantized_again():
    """As attacks do that move an input along its gradient."""
    block = converted("current")[0]
    x = inputs().requires_grad_()
    first = block.q(x)
    x.data = 2 * x.data
    torch.testing.assert_close(block.q(x) - block.q.bias, 2 * (first - block.q.bias))
    x.data.mul_(2)
    torch.testing.assert_close(block.q(x) - block.q.bias, 4 * (first - block.q.bias))


def test_a_layer_that_reads_a_tensor_twice():
    block = converted("current")[0]
    once = gradients(block, lambda b, x: 2 * b.q(x).float().pow(2).sum(), inputs())
    twice = gradients(block, lambda b, x: b.q(x).float().pow(2).sum() + b.q(x).float().pow(2).sum(), inputs())
    torch.testing.assert_close(twice[:3], once[:3])


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputed_activations(reentrant):
    block = converted("current")[0]
    want = gradients(block, product, inputs())
    got = gradients(block, lambda b, x: checkpoint(b, x, use_reentrant=reentrant).float().pow(2).sum(), inputs())
    assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))


@pytest.mark.parametrize("is_leaf", [True, False])
@pytest.mark.parametrize("backward", [True, False])
def test_nothing_keeps_a_graph_alive(backward, is_leaf):
    block = converted("current")[0]
    leaf = inputs().requires_grad_()
    for _ in range(2):
        x = inputs().requires_grad_() if is_leaf else leaf * 2
        held = ref(x)
        q, k = block.q(x), block.k(x)
        if backward:
            (q * k).float().sum().backward()
        del q, k, x
        assert held() is None


# Operands that the producer of a tensor hands over


def produced(block, x, offers=True, record=True):
    """A tensor of a producer that has quantized it for ``block.q``, as a fused norm would."""
    out, plan = x * 1.0, block.q.gemm_plan
    if offers:
        backend, operand = ReferenceBackend(), plan.operands["input"]
        rows = out.detach().to(plan.half)
        rows = torch.nn.functional.pad(rows, (0, 0, 0, -len(rows) % backend.row_multiple))
        data = backend.quantize(rows, operand, rowwise=True, columnwise=True, record=record)
        plan.inputs.offer(
            plan.backend, out, data, operand, shape=tuple(rows.shape), dtype=plan.half, rowwise=True, columnwise=True,
            record=record,
        )  # fmt: skip
    return out


@pytest.mark.parametrize("arguments", [{}, {"fp8_amax_compute_algo": "most_recent", "fp8_amax_history_len": 2}])
@pytest.mark.parametrize("scaling", ["delayed", "current"])
def test_layers_use_the_operand_of_a_producer_and_quantize_none(scaling, arguments):
    runs = []
    for offers in (True, False):
        block, backend, histories = converted(scaling, **(arguments if scaling == "delayed" else {}))
        optimizer, results = torch.optim.SGD(block.parameters(), lr=0.1), []
        for step in range(4):
            leaf = (inputs()[:13] * (step + 1)).requires_grad_()  # rows that need padding
            out = block(produced(block, leaf, offers))
            out.float().pow(2).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            results += [out.detach(), leaf.grad]
            if histories is not None:
                histories.update()
        runs.append((results, list(block.parameters()), histories.state_dict() if histories else None, backend.inputs))
    (got, params, state, quantized), (want, want_params, want_state, all_quantized) = runs
    assert all(torch.equal(g, w) for g, w in zip(got + params, want + want_params, strict=True))
    assert (quantized, all_quantized) == (4, 8)  # ``out`` reads another tensor
    if state is not None:
        for name, operand in state["operands"].items():
            for key in ("amax_history", "scale", "cold"):
                assert torch.equal(*(torch.as_tensor(o[key]) for o in (operand, want_state["operands"][name]))), name


def test_the_operand_of_a_producer_is_what_the_gemms_read():
    block, backend, _ = converted("current")
    out = produced(block, inputs().requires_grad_())
    operand = block.q.gemm_plan.inputs._quantized.get(out).data
    operand.rowwise.data.copy_(torch.zeros_like(operand.rowwise.data, dtype=torch.float32))
    results = [layer(out) for layer in (block.q, block.k)]
    assert all(torch.equal(r, layer.bias.expand(16, 32)) for r, layer in zip(results, (block.q, block.k), strict=True))
    sum(r.float().sum() for r in results).backward()
    assert block.q.weight.grad.abs().max() == 0 and backend.inputs == 0


@pytest.mark.parametrize("change", ["in place", "evaluation", "a restarted history", "an inference tensor"])
def test_an_operand_that_does_not_fit_is_not_used(change):
    block, backend, histories = converted("delayed")
    block(inputs())
    histories.update()
    block(inputs())
    before = backend.inputs
    with torch.inference_mode(change == "an inference tensor"):
        out = produced(block, inputs())
        if change == "in place":
            out.detach().add_(1)
        elif change == "evaluation":
            block.eval()
        elif change == "a restarted history":
            block.q.gemm_plan.operands["input"].slot.restart()
        got, want = block.q(out), block.q(out.clone())
    assert torch.equal(got, want) and backend.inputs == before + 2


def test_a_frozen_parameter_that_layers_read_may_change_its_storage():
    block, _, _ = converted("current")
    latents, other = (nn.Parameter(inputs(), requires_grad=False) for _ in range(2))
    block.q(latents)
    torch.utils.swap_tensors(latents, other)  # refuses tensors with weak references
    assert torch.equal(block.q(latents), block.q(inputs()))
