"""Gradients stored in FP8 as soon as they are complete, micro-batch after micro-batch."""

import copy
import gc
import pickle
import weakref
from dataclasses import replace

import pytest
import torch
from low_bit import randn, rounded, rounded_sum
from torch import Tensor, nn

from nemo_lowprec import prepare
from nemo_lowprec.chart import CHART
from nemo_lowprec.grads import Fp8Gradients
from nemo_lowprec.tensors import GradientTensor
from nemo_lowprec.tensors.gradient import DETACHED_GRADS


def make(dtype=torch.float32):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 300), nn.Tanh(), nn.Linear(300, 8, bias=False)).to(dtype)
    for param in model.parameters():
        param.grad_dtype = None
    return model


def backward(model, batch):
    model(batch).square().sum(1).mean().backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_matrices_are_stored_and_vectors_stay(dtype):
    model, plain = make(dtype), make(dtype)
    Fp8Gradients().cover(model.parameters())
    batch = randn((16, 40), 0).to(dtype)
    backward(model, batch)
    backward(plain, batch)
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        if p.dim() > 1:
            assert isinstance(p.grad, GradientTensor) and p.grad.dtype == torch.float32
            assert torch.equal(p.grad.dequantize(), rounded(q.grad.float()))
            assert p.grad.stored_bytes() <= 1.1 * p.numel()
        else:
            assert type(p.grad) is Tensor and torch.equal(p.grad, q.grad)


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_layers_compute_in_bf16_what_is_stored_in_fp8(half):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 32))
    level = "msamp_o2" if half == torch.bfloat16 else replace(CHART["msamp_o2"], autocast="fp16")
    prepare(model, torch.optim.AdamW(model.parameters()), level)
    twin, seen = copy.deepcopy(model), []
    for param in (*model.parameters(), *twin.parameters()):
        param.register_hook(lambda grad: seen.append((grad.dim(), grad.dtype)))
    for one in (model, twin):
        with torch.autocast("cpu", half):
            out = one(randn((16, 32), 0))
        out.float().square().mean().backward()
    matrices = [dtype for dim, dtype in seen if dim > 1]
    assert matrices == [half if half == torch.bfloat16 else torch.float32] * 2 + [torch.float32] * 2
    assert all(dtype == torch.float32 for dim, dtype in seen if dim == 1)
    assert isinstance(model[0].weight.grad, GradientTensor) and model[0].weight.grad.dtype == torch.float32


def test_a_gradient_with_a_graph_stays_fp32():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 32))
    prepare(model, torch.optim.AdamW(model.parameters()), "msamp_o2")
    with torch.autocast("cpu", torch.bfloat16):
        out = model(randn((16, 32), 0))
    grads = torch.autograd.grad(out.float().square().mean(), list(model.parameters()), create_graph=True)
    assert all(grad.dtype == torch.float32 and grad.requires_grad for grad in grads)


def test_a_pickled_parameter_is_covered_anew():
    model, column = make(), Fp8Gradients()
    column.cover(model.parameters())
    weight = pickle.loads(pickle.dumps(model[0].weight))
    weight.grad_dtype = None
    model[0].weight = weight
    column.cover(model.parameters())
    column.cover(model.parameters())
    backward(model, randn((16, 40), 0))
    assert isinstance(weight.grad, GradientTensor) and len(weight._post_accumulate_grad_hooks) == 1


@pytest.mark.parametrize("count", [2, 4])
def test_micro_batches_are_added_with_one_rounding_each(count):
    model = make()
    Fp8Gradients().cover(model.parameters())
    batches = randn((16, 40), 1).chunk(count)
    expected = None
    for step, batch in enumerate(batches):
        plain = make()
        backward(plain, batch)
        grads = [p.grad for p in plain.parameters()]
        if expected is None:
            expected = [rounded(g) if g.dim() > 1 else g for g in grads]
        else:
            expected = [
                rounded_sum(e + g, step) if g.dim() > 1 else e + g for e, g in zip(expected, grads, strict=True)
            ]
        backward(model, batch)
    for p, want in zip(model.parameters(), expected, strict=True):
        got = p.grad.dequantize() if p.dim() > 1 else p.grad
        assert torch.equal(got, want)


def test_accumulation_agrees_with_the_full_batch():
    model, plain = make(), make()
    Fp8Gradients().cover(model.parameters())
    batch = randn((32, 40), 2)
    for part in batch.chunk(4):
        (model(part).square().sum(1).mean() / 4).backward()
    backward(plain, batch)
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        got = p.grad.dequantize() if p.dim() > 1 else p.grad
        # Roundings of 2**-4 and 2**-3 at most, of partial sums below 1.5 times a block's largest.
        assert (got - q.grad).abs().max() <= (2**-4 + 3 * 2**-3) * 1.5 * q.grad.abs().max()
        assert (got - q.grad).norm() <= 0.09 * q.grad.norm()


@pytest.mark.parametrize("noise", [0.0, 3.0])
@pytest.mark.parametrize("count", [8, 32, 128])
def test_sums_of_many_micro_batches_do_not_stand_still(count, noise):
    """Rounded to nearest, 128 gradients of 1 add up to 16 or 64."""
    grad, exact = None, torch.zeros(64, 512)
    for step in range(count):
        part = torch.linspace(0.5, 2, 512).expand(64, 512) + noise * randn((64, 512), step)
        exact += part
        grad = GradientTensor.from_float(part) if grad is None else grad.add_(part)
    error = grad.dequantize() - exact
    assert abs(float(error.mean() / exact.mean())) < 0.005
    for columns in (slice(0, 128), slice(384, 512)):  # small and large elements
        assert abs(float(error[:, columns].mean() / exact[:, columns].mean())) < 0.015
    assert error.norm() < 0.25 * exact.norm()


def test_the_same_sums_round_differently_at_each_addition_and_the_same_again_after_zero():
    first = GradientTensor.from_float(torch.ones(64, 128))
    seen = []
    for _ in range(2):
        first.zero_()
        first.add_(torch.ones(64, 128))
        steps = [first.add_(torch.full((64, 128), 1 / 32)).dequantize() for _ in range(3)]
        assert not torch.equal(steps[0], steps[1]) and not torch.equal(steps[1] - steps[0], steps[2] - steps[1])
        seen.append(steps)
    assert all(torch.equal(a, b) for a, b in zip(*seen, strict=True))


def test_the_high_precision_gradient_is_freed_at_once():
    model = make()
    seen = []

    def watch(param):
        seen.append(weakref.ref(param.grad))

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(watch)
    Fp8Gradients().cover(model.parameters())
    held = []
    model[0].weight.register_hook(lambda grad: held.append([r() is not None for r in seen]))
    backward(model, randn((4, 40), 0))
    gc.collect()
    # When the first layer's gradient arrives, the last layer's is already only in FP8.
    assert len(held) == 1 and not held[0][0]
    assert isinstance(model[2].weight.grad, GradientTensor)


def test_a_shared_parameter_is_stored_once_complete():
    layer = nn.Linear(128, 128, bias=False)
    plain = nn.Linear(128, 128, bias=False)
    plain.load_state_dict(layer.state_dict())
    calls = []
    Fp8Gradients(calls.append).cover(layer.parameters())
    x = randn((4, 128), 0)
    for each in (layer, plain):
        each(each(x)).sum().backward()
    assert calls == [layer.weight]
    assert torch.equal(layer.weight.grad.dequantize(), rounded(plain.weight.grad))


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_an_overflow_is_seen(bad):
    model = make()
    Fp8Gradients().cover(model.parameters())
    batch = randn((4, 40), 0)
    batch[1, 3] = bad
    backward(model, batch)
    assert model[0].weight.grad.nonfinite == 1 and model[0].weight.grad.isnan().any()


def test_released_parameters_keep_no_gradient():
    model, order = make(), []

    def release(param):
        order.append((param, type(param.grad)))
        param.grad = None

    Fp8Gradients(release).cover(model.parameters())
    backward(model, randn((4, 40), 0))
    names = {id(p): n for n, p in model.named_parameters()}
    kinds = {names[id(p)]: kind for p, kind in order}
    assert kinds == {"0.weight": GradientTensor, "2.weight": GradientTensor, "0.bias": Tensor}
    assert names[id(order[0][0])] == "2.weight" and all(p.grad is None for p in model.parameters())


def test_covering_is_once_for_each_and_ends():
    model = make()
    model[2].weight.requires_grad_(False)
    calls = []
    gradients = Fp8Gradients(calls.append)
    for _ in range(2):
        gradients.cover(model.parameters())
    backward(model, randn((4, 40), 0))
    assert len(calls) == 2 and model[2].weight.grad is None
    model[2].weight.requires_grad_(True)  # unfrozen later
    gradients.cover(model.parameters())
    backward(model, randn((4, 40), 0))
    assert isinstance(model[2].weight.grad, GradientTensor)
    gradients.remove()
    model.zero_grad()
    backward(model, randn((4, 40), 0))
    assert all(type(p.grad) is Tensor for p in model.parameters())


def test_sparse_gradients_are_left_as_they_are():
    table = nn.Embedding(8, 4, sparse=True)
    Fp8Gradients().cover(table.parameters())
    table(torch.tensor([1, 2])).sum().backward()
    assert table.weight.grad.is_sparse


def test_a_parameter_that_takes_the_place_of_another_in_memory_is_covered_too():
    gradients, layers = Fp8Gradients(), [nn.Linear(8, 8, bias=False) for _ in range(50)]
    gradients.cover(layer.weight for layer in layers)
    old = {id(layer.weight) for layer in layers}
    del layers
    gc.collect()
    new = [nn.Linear(8, 8, bias=False) for _ in range(50)]
    assert old & {id(layer.weight) for layer in new}
    for layer in new:
        layer.weight.grad_dtype = None
        gradients.cover([layer.weight])
        layer(torch.ones(1, 8)).sum().backward()
        assert isinstance(layer.weight.grad, GradientTensor)


def test_a_parameter_that_is_gone_leaves_nothing_behind():
    gradients, layer = Fp8Gradients(), nn.Linear(8, 8, bias=False)
    gradients.cover([layer.weight])
    assert len(gradients._handles) == 1
    del layer
    gc.collect()
    assert not gradients._handles


def test_detached_gradients_add_up_and_go_with_their_parameter():
    gradients = Fp8Gradients(detached=True)
    for _ in range(50):  # a later one may get the id of one that is gone
        layer = nn.Linear(8, 8, bias=False)
        assert layer.weight not in DETACHED_GRADS
        gradients.cover([layer.weight])
        for _ in range(2):
            layer(torch.ones(1, 8)).sum().backward()
        assert layer.weight.grad is None and (DETACHED_GRADS.get(layer.weight) == 2).all()
    gradients.remove()
    assert not layer.weight.__dict__
