"""The gradient that is stored in E4M3 blocks: as ``p.grad``, under autograd, clipping, GradScaler and zero_grad."""

import copy
import io
import math
import pickle

import numpy as np
import pytest
import torch
from low_bit import rounded, rounded_sum
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from nemo_lowprec.formats.block_scale_128 import dequantize_rows
from nemo_lowprec.formats.floats import E4M3
from nemo_lowprec.tensors import BlockScaledTensor, Fp16Weight, GradientTensor
from nemo_lowprec.tensors.readonly_view import ReadonlyView

SHAPE = (8, 300)
FOREACH = pytest.mark.parametrize("foreach", [True, False])
INF, NAN = float("inf"), float("nan")


def randn(shape=SHAPE, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def make(shape=SHAPE, seed=0):
    return GradientTensor.from_float(randn(shape, seed))


def read(tensor):
    return tensor.dequantize() if isinstance(tensor, GradientTensor) else tensor.clone()


def stored_bits(grad):
    return [grad.data_blocks.view(torch.uint8).clone(), grad.exponent.clone()]


def parameters(mixed):
    """Three parameters with stored gradients (the middle one plain if mixed), and their twins with plain ones."""
    ours = [nn.Parameter(torch.ones(shape)) for shape in (SHAPE, (5,), (3, 128))]
    for i, p in enumerate(ours):
        p.grad = randn(p.shape, i) if mixed and i == 1 else make(p.shape, i)
    twins = [nn.Parameter(p.detach().clone()) for p in ours]
    for p, twin in zip(ours, twins, strict=True):
        twin.grad = read(p.grad)
    return ours, twins


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [SHAPE, (), (5,), (0, 4), (2, 3, 64)])
def test_stores_e4m3_blocks_and_reads_as_fp32(dtype, shape):
    values = randn(shape).to(dtype)
    grad = GradientTensor.from_float(values)
    assert grad.dtype == torch.float32 and grad.shape == grad.dequantize().shape == shape
    assert torch.equal(grad.dequantize(), rounded(values)) and type(grad.dequantize()) is torch.Tensor
    assert grad.data_blocks.dtype == torch.float8_e4m3fn and (grad.factor.item(), grad.nonfinite.item()) == (1, 0)


@pytest.mark.parametrize("shape", [(256, 512), (1000, 333), (4096,)])
def test_a_byte_and_little_more_for_each_parameter(shape):
    grad = make(shape)
    assert grad.numel() < grad.stored_bytes() <= 1.05 * grad.numel()


@pytest.mark.parametrize("bad", [INF, -INF, NAN])
def test_what_is_not_finite_is_flagged_until_finite_values_are_stored(bad):
    values = randn()
    values[2, 150] = bad
    grad = GradientTensor.from_float(values)
    assert grad.nonfinite.item() == 1 and grad.dequantize().isnan().nonzero().tolist() == [[2, 150]]
    grad.add_(randn(seed=1))
    assert grad.nonfinite.item() == 1
    grad.copy_(randn())
    assert grad.nonfinite.item() == 0 and grad.dequantize().isfinite().all()
    grad.add_(values)
    assert grad.nonfinite.item() == 1 and grad.dequantize().isnan().sum() == 1


def test_operations_read_the_values_with_the_factor_and_return_plain_tensors():
    grad = make().mul_(0.3)
    values = dequantize_rows(grad.data_blocks, grad.exponent) * torch.tensor(0.3)
    for got, want in (
        (grad + 1, values + 1),
        (-grad, -values),
        (grad * 2, values * 2),
        (grad.abs().max(), values.abs().max()),
        (grad[2:4, 1], values[2:4, 1]),
        (grad.bfloat16(), values.bfloat16()),
        (torch.ones(SHAPE).add_(grad, alpha=-0.1), torch.ones(SHAPE).add_(values, alpha=-0.1)),
        (torch.ones(SHAPE).lerp_(grad, 0.1), torch.ones(SHAPE).lerp_(values, 0.1)),
    ):
        assert type(got) in (torch.Tensor, ReadonlyView) and got.dtype == want.dtype and torch.equal(got, want)


@pytest.mark.parametrize(
    "scale, by",
    [
        (lambda g: g.mul_(0.3), 0.3),
        (lambda g: g.div_(3), 1 / 3),
        (lambda g: g.mul_(torch.tensor(0.3)), 0.3),
        (lambda g: g.mul_(torch.tensor([0.3], dtype=torch.float64)), 0.3),
        (lambda g: g.div_(torch.tensor(3.0)), 1 / 3),
        (lambda g: g.__imul__(1e-6).__itruediv__(1e3), 1e-9),
        (lambda g: torch._foreach_mul_([g, torch.ones(3)], 0.3), 0.3),
        (lambda g: torch._foreach_mul_([torch.ones(3), g], torch.tensor(0.3)), 0.3),
        (lambda g: torch._foreach_div_([g], 3.0), 1 / 3),
        (lambda g: torch._foreach_div_([torch.ones(3), g], torch.tensor(3.0)), 1 / 3),
    ],
)
def test_scaling_by_a_number_changes_the_factor_and_rounds_nothing(scale, by):
    grad = make()
    bits, values = stored_bits(grad), grad.dequantize()
    scale(grad)
    torch.testing.assert_close(grad.factor, torch.tensor([by]), rtol=1e-6, atol=0)
    torch.testing.assert_close(grad.dequantize(), values * by, rtol=1e-6, atol=0)
    assert all(torch.equal(a, b) for a, b in zip(bits, stored_bits(grad), strict=True))


@pytest.mark.parametrize("other", [randn(seed=1), randn((300,), 1), randn((8, 1), 1)])
def test_scaling_by_a_tensor_is_a_rounding(other):
    grad = make().mul_(0.5)
    values = grad.dequantize()
    assert grad.mul_(other) is grad and grad.factor.item() == 1
    assert torch.equal(grad.dequantize(), rounded(values * other))


def test_scaling_by_itself_or_another_gradient():
    for shape in (SHAPE, (1,), ()):
        grad, other = make(shape), make(shape, 1)
        values, others = grad.dequantize(), other.dequantize()
        assert torch.equal(grad.mul_(other).dequantize(), rounded(values * others))
        assert torch.equal(other.mul_(other).dequantize(), rounded(others * others))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("alpha", [1, -0.25, 2.5])
def test_add_is_one_rounding_of_the_sum(dtype, alpha):
    for grad, other in (
        (make(), randn(seed=1).to(dtype)),
        (make().mul_(0.3), randn((300, 8), 1).to(dtype).t()),
        (make(()), randn((), 1).to(dtype)),
    ):
        values, addresses = grad.dequantize(), [part.data_ptr() for part in grad.parts()]
        assert grad.add_(other, alpha=alpha) is grad and grad.factor.item() == 1
        assert torch.equal(grad.dequantize(), rounded_sum(values + alpha * other.float()))
        assert [part.data_ptr() for part in grad.parts()] == addresses


def test_add_takes_numbers_rows_and_stored_tensors():
    for other in (0.5, randn((300,), 1), make(seed=1).mul_(0.3), Fp16Weight.from_float(randn(), torch.bfloat16)):
        grad = make()
        total = grad.dequantize() + (other if isinstance(other, float) else other + 0)
        want = rounded_sum(total) if getattr(other, "shape", None) == SHAPE else rounded(total)
        assert torch.equal(grad.add_(other).dequantize(), want)
    assert torch.equal(grad.add_(grad).dequantize(), 2 * want)


def test_copy_takes_any_source():
    for source in (randn(seed=1), randn((300, 8), 1).t(), randn(seed=1).bfloat16(), make(seed=1).mul_(0.3)):
        grad, values = make().mul_(7), source + 0
        addresses = [part.data_ptr() for part in grad.parts()]
        assert grad.copy_(source) is grad
        assert torch.equal(grad.dequantize(), rounded(values)) and grad.factor.item() == 1
        assert [part.data_ptr() for part in grad.parts()] == addresses
    with pytest.raises(RuntimeError):
        grad.copy_(torch.zeros(3, 3))


def test_other_in_place_operations_write_back():
    grad = make().mul_(0.5)
    values = grad.dequantize()
    assert grad.clamp_(-0.2, 0.2) is grad
    assert torch.equal(grad.dequantize(), rounded(values.clamp(-0.2, 0.2)))
    grad.fill_(3.0)
    assert grad.dequantize().unique().tolist() == [3.0]
    grad.masked_fill_(torch.arange(300) < 10, INF)
    assert grad.nonfinite.item() == 1 and grad.dequantize().isnan().sum() == 80


ONES = torch.ones(SHAPE)
FOREACH_OPS = {
    "add_number": lambda a: torch._foreach_add_(a, 0.5),
    "add_list": lambda a: torch._foreach_add_(a, [ONES] * 3, alpha=2.0),
    "add_gradients": lambda a: torch._foreach_add_(a, [make(seed=5), ONES, make(seed=6)]),
    "mul_numbers": lambda a: torch._foreach_mul_(a, [2.0, 3.0, 0.1]),
    "mul_list": lambda a: torch._foreach_mul_(a, [randn(seed=7)] * 3),
    "div_list": lambda a: torch._foreach_div_(a, [ONES * 3] * 3),
    "clamp": lambda a: torch._foreach_clamp_max_(a, 0.25),
    "maximum": lambda a: torch._foreach_maximum_(a, [ONES * 0.1] * 3),
    "lerp": lambda a: torch._foreach_lerp_(a, [ONES] * 3, 0.1),
    "addcmul": lambda a: torch._foreach_addcmul_(a, [ONES] * 3, a, value=0.5),
    "addcdiv": lambda a: torch._foreach_addcdiv_(a, a, [ONES * 7] * 3, [0.5, 0.1, 2.0]),
    "neg": lambda a: torch._foreach_neg_(a),
    "zero": lambda a: torch._foreach_zero_(a),
    "copy": lambda a: torch._foreach_copy_(a, [randn(seed=8)] * 3),
}


@pytest.mark.parametrize("operation", FOREACH_OPS.values(), ids=FOREACH_OPS)
def test_foreach_operations_are_those_of_the_values_one_at_a_time(operation):
    grads = [make(), randn(seed=1), make(seed=2).mul_(0.3)]
    plain = [read(g) for g in grads]
    operation(plain)
    operation(grads)
    assert [type(g) for g in grads] == [GradientTensor, torch.Tensor, GradientTensor]
    assert torch.equal(grads[1], plain[1])
    for grad, want in (grads[0], plain[0]), (grads[2], plain[2]):
        assert torch.equal(grad.dequantize(), rounded(want))


def test_foreach_operations_into_plain_tensors_read_it():
    grads, sums, squares = [make(), make(seed=1)], [torch.ones(SHAPE), torch.ones(SHAPE)], [ONES.clone(), ONES.clone()]
    values = [g.dequantize() for g in grads]
    torch._foreach_lerp_(sums, grads, 0.1)
    torch._foreach_addcmul_(squares, grads, grads, 0.5)
    for i in range(2):
        assert torch.equal(sums[i], ONES.lerp(values[i], 0.1))
        assert torch.equal(squares[i], ONES.addcmul(values[i], values[i], value=0.5))
    for got, want in zip(torch._foreach_add(grads, 1.0), values, strict=True):
        assert type(got) is torch.Tensor and torch.equal(got, want + 1)


@pytest.mark.parametrize("order", [1, 2, 2.0, INF])
@pytest.mark.parametrize("dtype", [None, torch.float64])
def test_norms(order, dtype):
    grads = [make(), randn(seed=1), make((5,), 2).mul_(-0.3), make((0, 4))]
    grads = grads[:3] if order == INF else grads
    bits = stored_bits(grads[0])
    got = torch._foreach_norm(grads, order, dtype=dtype)
    want = [torch.linalg.vector_norm(read(g).double(), order) for g in grads]
    assert [g.dtype for g in got] == [dtype or torch.float32] * len(grads) and {g.shape for g in got} == {torch.Size()}
    torch.testing.assert_close(torch.stack(list(got)).double(), torch.stack(want), rtol=1e-5, atol=0)
    torch.testing.assert_close(torch.linalg.vector_norm(grads[2], order).double(), want[2], rtol=1e-5, atol=0)
    assert all(torch.equal(a, b) for a, b in zip(bits, stored_bits(grads[0]), strict=True))


def test_norm_of_what_is_not_finite_is_nan():
    grads = [make(), GradientTensor.from_float(torch.tensor([1.0, INF]))]
    assert [n.isnan().item() for n in torch._foreach_norm(grads)] == [False, True]
    assert grads[1].norm().isnan()


def layer(grad_of):
    """A BF16 linear layer whose weight has a gradient stored in FP32, of the kind that ``grad_of`` makes."""
    module = nn.Linear(300, 8, bias=False)
    module.weight = nn.Parameter(Fp16Weight.from_float(randn() * 0.1, torch.bfloat16))
    module.weight.grad_dtype = torch.float32
    module.weight.grad = grad_of(torch.zeros(SHAPE))
    return module


@pytest.mark.parametrize("magnitude", [1.0, 1e-9])
def test_autograd_accumulates_into_it_with_one_rounding_a_micro_batch(magnitude):
    module, alone = layer(GradientTensor.from_float), layer(torch.clone)
    grad, want = module.weight.grad, torch.zeros(SHAPE)
    for step in range(4):
        x = randn((6, 300), step).bfloat16()
        alone.weight.grad.zero_()
        for each in (module, alone):
            each(x).backward(torch.full((6, 8), magnitude, dtype=torch.bfloat16))
        want = rounded_sum(want + alone.weight.grad, step + 1)
        assert module.weight.grad is grad and torch.equal(grad.dequantize(), want)
    assert want.count_nonzero() > 0.99 * want.numel()


def test_it_may_be_set_where_there_was_none_and_reads_back_as_it_is():
    module = layer(GradientTensor.from_float)
    module.weight.grad = None

    def store(p):
        if not isinstance(p.grad, GradientTensor):
            p.grad = GradientTensor.from_float(p.grad)

    module.weight.register_post_accumulate_grad_hook(store)
    x = randn((6, 300)).bfloat16()
    module(x).sum().backward()
    once, first = module.weight.grad.dequantize(), module.weight.grad
    assert isinstance(first, GradientTensor)
    module(x).sum().backward()
    alone = layer(torch.clone)
    alone(x).sum().backward()
    assert module.weight.grad is first and torch.equal(first.dequantize(), rounded_sum(once + alone.weight.grad))


@FOREACH
@pytest.mark.parametrize("mixed", [True, False])
@pytest.mark.parametrize("order", [2.0, 1.0, INF])
def test_clipping_by_the_norm_scales_without_rounding(foreach, mixed, order):
    ours, twins = parameters(mixed)
    bits = stored_bits(ours[0].grad)
    norms = [clip_grad_norm_(ps, 0.5, norm_type=order, foreach=foreach) for ps in (ours, twins)]
    torch.testing.assert_close(*norms, rtol=1e-6, atol=0)
    for p, twin in zip(ours, twins, strict=True):
        torch.testing.assert_close(read(p.grad), twin.grad, rtol=1e-6, atol=0)
    assert all(torch.equal(a, b) for a, b in zip(bits, stored_bits(ours[0].grad), strict=True))
    assert ours[0].grad.factor.item() < 1


@FOREACH
def test_clipping_by_the_norm_keeps_small_gradients_and_can_refuse_bad_ones(foreach):
    ours, twins = parameters(False)
    clip_grad_norm_(ours, 1e4, foreach=foreach)
    assert all(torch.equal(read(p.grad), twin.grad) for p, twin in zip(ours, twins, strict=True))
    ours[1].grad.fill_(INF)
    with pytest.raises(RuntimeError, match="non-finite"):
        clip_grad_norm_(ours, 1.0, error_if_nonfinite=True, foreach=foreach)


@FOREACH
@pytest.mark.parametrize("mixed", [True, False])
def test_clipping_by_value_is_that_of_the_values(foreach, mixed):
    ours, twins = parameters(mixed)
    for ps in (ours, twins):
        clip_grad_value_(ps, 0.5, foreach=foreach)
    for p, twin in zip(ours, twins, strict=True):
        want = rounded(twin.grad) if isinstance(p.grad, GradientTensor) else twin.grad
        assert torch.equal(read(p.grad), want) and read(p.grad).abs().max() == 0.5


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad(set_to_none):
    ours, _ = parameters(True)
    grad = ours[0].grad.mul_(0.3)
    grad.copy_(torch.full(SHAPE, NAN))
    torch.optim.SGD(ours).zero_grad(set_to_none=set_to_none)
    if set_to_none:
        assert [p.grad for p in ours] == [None] * 3
        return
    assert ours[0].grad is grad and grad.dequantize().count_nonzero() == 0
    assert (grad.factor.item(), grad.nonfinite.item(), grad.exponent.unique().tolist()) == (1, 0, [127])
    assert torch.equal(grad.add_(ONES).dequantize(), ONES)


@FOREACH
@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("mixed", [True, False])
def test_grad_scaler_steps_as_with_plain_gradients_of_the_same_values(foreach, clip, mixed):
    ours, twins = parameters(mixed)
    ours[0].grad, twins[0].grad = (g.mul_(0.7) for g in (ours[0].grad, twins[0].grad))
    bits = stored_bits(ours[0].grad)
    for params in (ours, twins):
        scaler, optimizer = torch.amp.GradScaler("cpu", init_scale=8.0), torch.optim.Adam(params, foreach=foreach)
        scaler.scale(torch.ones(()))
        scaler.unscale_(optimizer)
        if clip:
            clip_grad_norm_(params, 0.1, foreach=foreach)
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == 8.0
    for p, twin in zip(ours, twins, strict=True):
        torch.testing.assert_close(read(p.grad), twin.grad, rtol=1e-6, atol=0)
        torch.testing.assert_close(p, twin, rtol=1e-6, atol=0)
        assert not torch.equal(p, torch.ones_like(p))
    assert all(torch.equal(a, b) for a, b in zip(bits, stored_bits(ours[0].grad), strict=True))


def spoil_first(params):
    params[0].grad.copy_(torch.where(torch.arange(300) == 299, INF, randn()))


def spoil_plain(params):
    params[1].grad[4] = NAN


def spoil_last(params):
    params[2].grad.add_(torch.tensor(-INF).expand(3, 128))


def spoil_factor(params):
    params[0].grad.mul_(INF)


@pytest.mark.parametrize("explicit", [True, False], ids=["unscale", "step"])
@pytest.mark.parametrize("spoil", [spoil_first, spoil_plain, spoil_last, spoil_factor])
def test_grad_scaler_skips_a_step_with_an_overflow_and_takes_the_next(spoil, explicit):
    ours, _ = parameters(True)
    scaler, optimizer = torch.amp.GradScaler("cpu", init_scale=8.0), torch.optim.SGD(ours, lr=0.1)
    scaler.scale(torch.ones(()))
    spoil(ours)
    if explicit:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 4.0 and all(torch.equal(p, torch.ones_like(p)) for p in ours)
    optimizer.zero_grad(set_to_none=False)
    for p in ours:
        p.grad.add_(torch.full(p.shape, 8.0))
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 4.0
    for p in ours:
        torch.testing.assert_close(p, torch.full(p.shape, 1 - 0.1 * 2.0))


def test_grad_scaler_unscales_a_gradient_from_a_strided_source():
    p = nn.Parameter(torch.ones(300, 8).t())
    p.grad = GradientTensor.from_float(randn((300, 8)).t())
    values, optimizer = p.grad.dequantize(), torch.optim.SGD([p], lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    scaler.unscale_(optimizer)
    assert torch.equal(p.grad.dequantize(), values / 4) and p.grad.is_contiguous()
    scaler.step(optimizer)
    assert torch.equal(p.detach(), 1 - values / 4)


@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adagrad])
def test_torch_optimizers_step_as_with_plain_gradients_of_the_same_values(kind, foreach):
    ours, twins = parameters(True)
    for params in (ours, twins):
        optimizer = kind(params, lr=0.1, weight_decay=0.01, foreach=foreach)
        for _ in range(2):
            optimizer.step()
    for p, twin in zip(ours, twins, strict=True):
        torch.testing.assert_close(p, twin, rtol=1e-6, atol=1e-7)
    assert isinstance(ours[0].grad, GradientTensor)


def test_detach_shares_and_copies_do_not():
    grad = make().mul_(0.3)
    values, file = grad.dequantize(), io.BytesIO()
    torch.save(grad, file)
    file.seek(0)
    detached = grad.detach()
    copies = [
        grad.clone(), grad.to("cpu", copy=True), copy.deepcopy(grad),
        pickle.loads(pickle.dumps(grad)), torch.load(file, weights_only=False),
    ]  # fmt: skip
    grad.zero_()
    assert isinstance(detached, GradientTensor) and detached.dequantize().count_nonzero() == 0
    for copied in copies:
        assert type(copied) is GradientTensor and torch.equal(copied.dequantize(), values)
        assert math.isclose(copied.factor.item(), 0.3, rel_tol=1e-6)
    assert grad.to("cpu") is grad and {part.device.type for part in grad.to("meta").parts()} == {"meta"}


def test_it_is_a_block_tensor_of_its_values_in_e4m3():
    grad, plain = make(), BlockScaledTensor.from_float(randn(), E4M3)
    assert all(torch.equal(a, b) for a, b in zip(stored_bits(grad), stored_bits(plain), strict=True))


WRITES = {
    "row": lambda g: g.__setitem__(0, 0.0),
    "column": lambda g: g.__setitem__((slice(None), 3), 0.0),
    "element": lambda g: g.__setitem__((2, 5), torch.tensor(7.0)),
    "mask": lambda g: g.__setitem__(g > 0.5, 0.0),
    "rows": lambda g: g.__setitem__(torch.tensor([1, 3]), 0.0),
    "data": lambda g: g.data.__setitem__(slice(2, 4), 0.0),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_elements_can_be_assigned(write):
    grad = make().mul_(0.5)
    want = grad.dequantize()
    write(grad)
    write(want)
    assert torch.equal(grad.dequantize(), rounded(want))


LOST = {
    "zero_": lambda g: g[0].zero_(),
    "mul_": lambda g: g[:4].mul_(0),
    "view": lambda g: g.view(-1)[:3].fill_(0),
    "t": lambda g: g.t().zero_(),
    "unbind": lambda g: g.unbind()[0].zero_(),
    "assign": lambda g: g[0].__setitem__(1, 0.0),
    "foreach": lambda g: torch._foreach_mul_([g[0], g[1]], 0.5),
    "out": lambda g: torch.add(torch.ones(300), 1, out=g[0]),
}


@pytest.mark.parametrize("write", LOST.values(), ids=LOST)
def test_writing_into_a_view_is_an_error(write):
    grad = make()
    before = stored_bits(grad)
    with pytest.raises(RuntimeError, match="a copy of its values: writing into it would be lost"):
        write(grad)
    assert all(torch.equal(a, b) for a, b in zip(stored_bits(grad), before, strict=True))
    part = grad[0]
    assert torch.equal(part * 2, grad.dequantize()[0] * 2) and type(part * 2) is torch.Tensor
    assert part.tolist() == part.numpy().tolist() == pickle.loads(pickle.dumps(part)).tolist()
    assert repr(part) == repr(grad.dequantize()[0])


def test_arrays_lists_and_files():
    grad = make()
    values = grad.dequantize()
    assert (np.asarray(grad) == values.numpy()).all() and grad.tolist() == values.tolist()
    assert np.asarray(grad, dtype=np.float64).dtype == np.float64
    file = io.BytesIO()
    torch.save({"grad": grad}, file)
    file.seek(0)
    again = torch.load(file)["grad"]  # weights_only
    assert isinstance(again, GradientTensor) and torch.equal(again.dequantize(), values) and again.fmt == grad.fmt
