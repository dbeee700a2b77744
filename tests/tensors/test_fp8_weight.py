"""The tensor that is stored in FP8 and reads as a float tensor."""

import copy
import io
import pickle

import pytest
import torch
from support import losses_with_sgd
from torch import nn

from nemo_lowprec.formats import E4M3, E5M2, cast, decode
from nemo_lowprec.tensors import Fp8Weight
from nemo_lowprec.tensors.readonly_view import ReadonlyView


def make(shape=(8, 16), dtype=torch.bfloat16, fmt=E4M3, margin=0, seed=0):
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return values, Fp8Weight.from_float(values, fmt, dtype, margin)


def parameter(**options):
    values, stored = make(**options)
    return values, nn.Parameter(stored)


def by_hand(values, fmt=E4M3, margin=0):
    scale = fmt.max / values.abs().max() / 2**margin
    return decode(cast(values * scale, fmt)) * (1 / scale)


def plain(tensor):
    assert isinstance(tensor, Fp8Weight)
    return tensor.dequantize(torch.float32)


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda f: f.name)
@pytest.mark.parametrize("margin", [0, 1])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_stores_values_scaled_by_their_amax_and_reads_as_its_dtype(fmt, margin, dtype):
    values, stored = make(fmt=fmt, margin=margin, dtype=dtype)
    assert stored.dtype == dtype and stored.shape == values.shape and stored.data_fp8.dtype == fmt.dtype
    assert stored.data_fp8.float().abs().max() == fmt.max / 2**margin
    torch.testing.assert_close(plain(stored), by_hand(values, fmt, margin), rtol=1e-6, atol=0)
    assert torch.equal(stored.dequantize(), plain(stored).to(dtype))


@pytest.mark.parametrize("shape", [(), (0, 4), (3,)])
def test_any_shape_can_be_stored(shape):
    values, stored = make(shape=shape)
    assert stored.shape == shape and stored.dequantize().shape == values.shape


def test_zeros_stay_zeros_and_nan_stays_nan():
    assert Fp8Weight.from_float(torch.zeros(4), E4M3, torch.bfloat16).dequantize().tolist() == [0.0] * 4
    assert Fp8Weight.from_float(torch.tensor([1.0, float("nan")]), E4M3, torch.bfloat16).dequantize()[1].isnan()


def test_operations_read_the_values_and_return_plain_tensors():
    _, stored = make()
    x = torch.randn(4, 16, dtype=torch.bfloat16)
    for got, want in (
        (x @ stored.t(), x @ stored.dequantize().t()),
        (nn.functional.linear(x, stored), nn.functional.linear(x, stored.dequantize())),
        (stored + 1, stored.dequantize() + 1),
        (stored.float(), stored.dequantize().float()),
        (stored[2:4, 1], stored.dequantize()[2:4, 1]),
        (torch.cat([stored, stored]), stored.dequantize().repeat(2, 1)),
        (torch.zeros_like(stored), torch.zeros(8, 16, dtype=torch.bfloat16)),
    ):
        assert type(got) in (torch.Tensor, ReadonlyView) and torch.equal(got, want) and got.dtype == want.dtype
    assert stored.abs().max().item() == stored.dequantize().abs().max().item()


@pytest.mark.parametrize("came_as", [torch.bfloat16, torch.float32])
def test_exact_values_are_read_from_the_master_where_there_is_one(came_as):
    _, stored = make()
    assert torch.equal(stored.exact_storage(), plain(stored))
    frozen = Fp8Weight(stored.data_fp8, stored.scale_inv, E4M3, torch.bfloat16, came_as=came_as)
    frozen.write_(torch.randn(8, 16, generator=torch.Generator().manual_seed(4)))
    found = frozen.exact_storage()
    assert found.dtype == came_as and torch.equal(found.float(), frozen.exact())
    frozen.write_(torch.zeros(8, 16))
    assert not found.any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_in_place_operations_write_back_and_return_the_tensor_itself(dtype):
    _, stored = make(dtype=dtype)
    read = stored.dequantize()
    with torch.no_grad():
        assert stored.mul_(3) is stored
        torch.testing.assert_close(plain(stored), by_hand(read.mul(3).float()), rtol=1e-6, atol=0)
        stored.zero_()
        assert stored.abs().sum() == 0
        stored.fill_(2.0)
        assert stored.dequantize().unique().tolist() == [2.0]
        stored.normal_(generator=torch.Generator().manual_seed(3))
        assert 0.7 < stored.std() < 1.3
        assert stored.add_(torch.ones(8, 16), alpha=0.5) is stored
    assert stored.dtype == dtype


def test_foreach_operations_and_out_arguments_write_back():
    (_, a), (_, b) = make(dtype=torch.float32), make(dtype=torch.float32, seed=1)
    twice_a, twice_b = a.dequantize() * 2, b.dequantize() * 2
    torch._foreach_mul_([a, b], 2.0)
    torch.testing.assert_close((a.dequantize(), b.dequantize()), (twice_a, twice_b), rtol=1e-6, atol=0)
    torch._foreach_copy_([a], [b])
    assert torch.equal(a.dequantize(), b.dequantize())
    assert torch.add(torch.ones(8, 16), torch.ones(8, 16), out=a) is a
    assert a.dequantize().unique().tolist() == [2.0]


def test_in_place_operations_of_plain_tensors_read_it():
    _, stored = make()
    x = torch.ones(8, 16, dtype=torch.bfloat16)
    assert torch.equal(x.add_(stored), stored.dequantize() + 1)
    assert torch.equal(x.copy_(stored), stored.dequantize())


def test_copy_takes_plain_and_stored_sources():
    _, stored = make()
    other, source = make(seed=1, fmt=E5M2)
    assert stored.copy_(other) is stored and stored.fmt is E4M3
    assert torch.equal(plain(stored), plain(Fp8Weight.from_float(other, E4M3, torch.bfloat16)))
    stored.copy_(source)
    assert torch.equal(plain(stored), plain(Fp8Weight.from_float(plain(source), E4M3, torch.bfloat16)))
    with pytest.raises(RuntimeError):
        stored.copy_(torch.zeros(3, 3))


def test_quantize_renews_the_scale_in_the_storage_that_is_there():
    _, stored = make()
    data, scale_inv = stored.data_fp8, stored.scale_inv
    values = torch.randn(8, 16) * 1e-3
    stored.quantize_(values)
    assert stored.data_fp8 is data and stored.scale_inv is scale_inv
    torch.testing.assert_close(plain(stored), by_hand(values), rtol=1e-6, atol=0)


def test_detach_shares_and_clone_does_not():
    _, stored = make()
    detached, clone = stored.detach(), stored.clone()
    assert torch.equal(plain(clone), plain(stored))
    stored.zero_()
    assert plain(detached).abs().sum() == 0 and plain(clone).abs().sum() > 0


@pytest.mark.parametrize("requires_grad", [True, False])
def test_deepcopy_and_pickle_of_a_parameter_are_independent_parameters(requires_grad):
    _, param = parameter(fmt=E5M2, margin=1)
    param.requires_grad_(requires_grad)
    file = io.BytesIO()
    torch.save(param, file)
    file.seek(0)
    for copied in (
        copy.deepcopy(param), pickle.loads(pickle.dumps(param)), torch.load(file, weights_only=False)
    ):  # fmt: skip
        assert isinstance(copied, nn.Parameter) and copied.requires_grad is requires_grad and copied.is_leaf
        assert (copied.dtype, copied.fmt, copied.margin) == (param.dtype, E5M2, 1)
        assert torch.equal(plain(copied), plain(param))
        with torch.no_grad():
            copied.zero_()
        assert plain(param).abs().sum() > 0


def test_deepcopy_of_a_module_keeps_tying_and_trains():
    _, param = parameter()
    a, b = nn.Linear(16, 8, bias=False), nn.Linear(16, 8, bias=False)
    a.weight = b.weight = param
    copied = copy.deepcopy(nn.ModuleList([a, b]))
    assert copied[0].weight is copied[1].weight is not param
    (copied[0](torch.ones(1, 16, dtype=torch.bfloat16)).sum()).backward()
    assert copied[1].weight.grad is not None and param.grad is None


def linear():
    _, param = parameter()
    module = nn.Linear(16, 8, bias=False)
    module.weight = param
    param.tag = "mine"
    return module


def test_a_parameter_gets_gradients_of_its_grad_dtype():
    module = linear()
    module.weight.grad_dtype = torch.float32
    module.weight.register_post_accumulate_grad_hook(lambda p: setattr(p, "seen", p.grad.dtype))
    x = torch.randn(4, 16, dtype=torch.bfloat16)
    for _ in range(2):
        module(x).sum().backward()
    assert module.weight.grad.dtype == module.weight.seen == torch.float32
    torch.testing.assert_close(module.weight.grad, 2 * x.float().sum(0).expand(8, 16), rtol=1e-2, atol=1e-2)


def test_a_parameter_trains_with_a_plain_optimizer():
    module = linear()
    x, y = torch.randn(32, 16, dtype=torch.bfloat16), torch.randn(32, 8, dtype=torch.bfloat16)
    losses = losses_with_sgd(module, x, y)
    assert losses[-1] < 0.9 * losses[0] and isinstance(module.weight, Fp8Weight)


@pytest.mark.parametrize(
    "move",
    [
        lambda m: m.cpu(),
        lambda m: m.to("cpu"),
        lambda m: m.to(torch.bfloat16),
        lambda m: m.to("cpu", torch.bfloat16),
        lambda m: m._apply(torch.clone),
    ],
    ids=["cpu", "to", "same dtype", "both", "apply"],
)
def test_moving_a_module_keeps_the_parameter_its_attributes_and_its_bits(move):
    module = linear()
    param, bits = module.weight, module.weight.data_fp8.view(torch.uint8).clone()
    move(module)
    assert module.weight is param and param.tag == "mine" and isinstance(param, Fp8Weight) and param.requires_grad
    assert torch.equal(param.data_fp8.view(torch.uint8), bits)


def test_moving_to_another_device_takes_the_storage_along():
    module = linear()
    param = module.to("meta").weight
    assert isinstance(param, nn.Parameter) and param.requires_grad
    assert param.device.type == param.data_fp8.device.type == param.scale_inv.device.type == "meta"
    assert param.dtype == torch.bfloat16 and param.fmt is E4M3


def test_another_dtype_is_read_but_not_stored():
    module = linear()
    bits = module.weight.data_fp8.view(torch.uint8).clone()
    read = module.weight.to(torch.float32)
    assert type(read) is torch.Tensor and read.dtype == torch.float32
    assert torch.equal(module.weight.data_fp8.view(torch.uint8), bits)


def test_assigning_data_stores_plain_values_and_takes_over_stored_ones():
    _, stored = make()
    param = nn.Parameter(stored)
    values = torch.randn(8, 16)
    param.data = values
    torch.testing.assert_close(plain(param), by_hand(values), rtol=1e-6, atol=0)
    _, other = make(seed=2, margin=1)
    param.data = other
    assert param.data_fp8 is other.data_fp8 and param.margin == 1
    assert isinstance(param.data, Fp8Weight) and not param.data.requires_grad


def test_repr_names_the_format_and_the_dtype():
    assert repr(make()[1]) == "Fp8Weight(e4m3, shape=(8, 16), reads as torch.bfloat16)"


def test_scales_that_are_powers_of_two():
    values = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))
    stored = Fp8Weight.from_float(values, E4M3, torch.bfloat16, margin=1, power_of_two=True)
    # 448 / 2.7 / 2 is 82: the scale is 64.
    assert 2.6 < values.abs().max() < 3.5 and stored.scale_inv.item() == 1 / 64
    assert torch.equal(plain(stored), decode(cast(values * 64, E4M3)) / 64)
    twin = pickle.loads(pickle.dumps(copy.deepcopy(stored)))
    assert twin.power_of_two and not make()[1].power_of_two
    twin.quantize_(values * 2)
    assert twin.scale_inv.item() == 1 / 32 and torch.equal(plain(twin), 2 * plain(stored))
