"""The tensor that is stored in FP16 and reads as BF16 or FP32."""

import copy
import io
import pickle

import pytest
import torch
import torch.nn.functional as F
from support import losses_with_sgd
from torch import nn

from nemo_lowprec.formats.floats import E4M3
from nemo_lowprec.tensors import Fp8Weight, Fp16Weight
from nemo_lowprec.tensors.readonly_view import ReadonlyView

READS = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])


def make(shape=(8, 16), dtype=torch.bfloat16, seed=0):
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return values, Fp16Weight.from_float(values, dtype)


def parameter(**options):
    return nn.Parameter(make(**options)[1])


def linear(dtype=torch.bfloat16):
    module = nn.Linear(16, 8, bias=False)
    module.weight = parameter(dtype=dtype)
    return module


@READS
def test_its_exact_values_are_read_where_they_are_stored(dtype):
    _, stored = make(dtype=dtype)
    assert stored.exact_storage() is stored.data_fp16 and torch.equal(stored.exact_storage().float(), stored.exact())


@READS
@pytest.mark.parametrize("shape", [(8, 16), (), (3,), (0, 4), (2, 3, 4, 5)])
def test_stores_fp16_and_reads_as_its_dtype(dtype, shape):
    values, stored = make(shape, dtype)
    assert stored.dtype == dtype and stored.shape == shape and torch.equal(stored.data_fp16, values.half())
    assert torch.equal(stored.dequantize(), values.half().to(dtype)) and stored.dequantize().dtype == dtype
    assert torch.equal(stored.dequantize(torch.float32), values.half().float())
    assert stored.stored_bytes() == 2 * stored.numel()


def test_from_float_copies_fp16_values():
    values = torch.ones(3, dtype=torch.float16)
    Fp16Weight.from_float(values, torch.bfloat16).zero_()
    assert values.tolist() == [1.0] * 3


@READS
def test_operations_read_the_values_and_return_plain_tensors(dtype):
    _, stored = make(dtype=dtype)
    read, x = stored.dequantize(), torch.randn(4, 16).to(dtype)
    for got, want in (
        (x @ stored.t(), x @ read.t()),
        (F.linear(x, stored), F.linear(x, read)),
        (stored[2:4, 1], read[2:4, 1]),
        (torch.cat([stored, stored]), torch.cat([read, read])),
        (stored.half(), stored.data_fp16),
        (stored.double(), stored.data_fp16.double()),
    ):
        assert type(got) in (torch.Tensor, ReadonlyView) and got.dtype == want.dtype and torch.equal(got, want)


def test_conversions_read_the_stored_bits_and_not_those_of_the_nominal_dtype():
    stored = Fp16Weight.from_float(torch.tensor([1 + 2**-10]), torch.bfloat16)
    assert stored.dequantize().item() == 1.0
    assert stored.float().item() == stored.half().item() == 1 + 2**-10
    stored.half().zero_()
    assert stored.float().item() == 1 + 2**-10


@READS
def test_in_place_operations_write_back_and_return_the_tensor_itself(dtype):
    _, stored = make(dtype=dtype)
    storage, values = stored.data_fp16, stored.data_fp16.float()
    assert stored.mul_(3).add_(torch.ones(8, 16, dtype=dtype), alpha=0.5) is stored
    want = (values.mul(3).half().float() + 0.5).half()  # from the stored values, not from those read as BF16
    assert torch.equal(storage, want)
    torch._foreach_mul_([stored], 2.0)
    assert torch.equal(storage, (want.to(dtype) * 2).half())
    assert torch.add(torch.ones(8, 16), torch.ones(8, 16), out=stored) is stored and storage.unique().tolist() == [2]
    stored.zero_()
    assert stored.data_fp16 is storage and storage.count_nonzero() == 0


def test_copies_keep_the_bits_that_bf16_has_not():
    (values, stored), target = make(), make(seed=1)[1]
    assert not torch.equal(values.half(), values.bfloat16().half())
    assert target.copy_(values) is target and torch.equal(target.data_fp16, values.half())
    target.zero_().copy_(stored)
    assert torch.equal(target.data_fp16, stored.data_fp16)
    scaled = Fp8Weight.from_float(values, E4M3, torch.bfloat16)
    assert torch.equal(target.copy_(scaled).data_fp16, scaled.dequantize(torch.float32).half())
    with pytest.raises(RuntimeError):
        target.copy_(torch.zeros(3, 3))


def test_detach_and_transposed_share_and_clone_and_to_do_not():
    _, stored = make()
    detached, transposed, clone, moved = stored.detach(), stored.transposed(), stored.clone(), stored.to(copy=True)
    assert transposed.shape == (16, 8) and torch.equal(transposed.dequantize(), stored.dequantize().t())
    assert stored.to("cpu") is stored and stored.to("meta").data_fp16.device.type == "meta"
    stored.zero_()
    for shared in (detached, transposed):
        assert isinstance(shared, Fp16Weight) and shared.data_fp16.count_nonzero() == 0
    for own in (clone, moved):
        assert isinstance(own, Fp16Weight) and own.data_fp16.count_nonzero() > 0


@READS
@pytest.mark.parametrize("requires_grad", [True, False])
def test_deepcopy_and_pickle_of_a_parameter_are_independent_parameters(dtype, requires_grad):
    param = parameter(dtype=dtype).requires_grad_(requires_grad)
    file = io.BytesIO()
    torch.save(param, file)
    file.seek(0)
    copies = copy.deepcopy(param), pickle.loads(pickle.dumps(param)), torch.load(file, weights_only=False)
    for copied in copies:
        assert isinstance(copied, nn.Parameter) and copied.requires_grad is requires_grad and copied.is_leaf
        assert copied.dtype == dtype and torch.equal(copied.data_fp16, param.data_fp16)
        with torch.no_grad():
            copied.zero_()
        assert param.data_fp16.count_nonzero() > 0


def test_moving_a_module_keeps_the_parameter_and_its_bits():
    module = linear()
    param, bits = module.weight, module.weight.data_fp16.clone()
    for move in (lambda m: m.cpu(), lambda m: m.to(torch.bfloat16), lambda m: m._apply(torch.clone)):
        move(module)
        assert module.weight is param and isinstance(param, Fp16Weight) and torch.equal(param.data_fp16, bits)
    param.data = torch.ones(8, 16)
    assert isinstance(param, Fp16Weight) and param.data_fp16.unique().tolist() == [1.0]
    assert module.to("meta").weight.data_fp16.device.type == "meta"


@pytest.mark.parametrize("magnitude", [1.0, 1e-9, 1e-30])
def test_gradients_are_bf16_and_do_not_pass_through_the_range_of_fp16(magnitude):
    module, plain = linear(), nn.Linear(16, 8, bias=False, dtype=torch.bfloat16)
    with torch.no_grad():
        plain.weight.copy_(module.weight)
    x = torch.rand(4, 16).bfloat16() + 0.5  # of one sign: no gradient cancels out
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    for linear_, given in zip((module, plain), inputs, strict=True):
        linear_(given).backward(torch.full((4, 8), magnitude, dtype=torch.bfloat16))
    grad = module.weight.grad
    assert type(grad) is torch.Tensor and grad.dtype == torch.bfloat16 and grad.count_nonzero() == grad.numel()
    assert torch.equal(grad, plain.weight.grad) and torch.equal(inputs[0].grad, inputs[1].grad)


def test_autocast_casts_what_reads_as_fp32_and_gradients_come_back_in_full():
    param = parameter(dtype=torch.float32)
    x = torch.full((4, 16), 1e-9)
    with torch.autocast("cpu", torch.bfloat16):
        out = F.linear(x, param)
    assert out.dtype == torch.bfloat16 and torch.equal(out, F.linear(x.bfloat16(), param.dequantize().bfloat16()))
    out.sum().backward()
    assert param.grad.dtype == torch.float32
    torch.testing.assert_close(param.grad, torch.full((8, 16), 4e-9), rtol=1e-2, atol=0)


def test_autocast_to_fp16_gets_the_stored_bits():
    param = nn.Parameter(Fp16Weight.from_float(torch.tensor([[1 + 2**-10]]), torch.bfloat16))
    with torch.autocast("cpu", torch.float16):
        out = F.linear(torch.ones(1, 1), param)
    assert out.dtype == torch.float16 and out.item() == 1 + 2**-10


@READS
def test_a_lookup_gives_the_rows_of_the_table_and_their_gradient(dtype):
    table = nn.Embedding(10, 16, padding_idx=3)
    table.weight = parameter(shape=(10, 16), dtype=dtype)
    index = torch.tensor([[1, 2, 2], [9, 3, 1]])
    found = table(index)
    assert type(found) is torch.Tensor and found.dtype == dtype
    assert torch.equal(found, table.weight.dequantize()[index])
    found.backward(torch.full_like(found, 1e-9))
    count = torch.tensor([0, 2, 2, 0, 0, 0, 0, 0, 0, 1])[:, None].expand(10, 16)
    torch.testing.assert_close(table.weight.grad, (count * 1e-9).to(dtype))
    assert table.weight.grad[3].count_nonzero() == 0 and table.weight.grad[2].count_nonzero() == 16


def test_a_lookup_converts_only_the_rows_that_are_looked_up():
    table = parameter(shape=(1000, 16))
    with torch.profiler.profile(record_shapes=True) as profile:
        F.embedding(torch.tensor([5, 7]), table.detach())
    sizes = [event.input_shapes[0] for event in profile.events() if event.name == "aten::_to_copy"]
    assert sizes == [[2, 16]]


@READS
def test_a_parameter_trains_with_a_plain_optimizer(dtype):
    module = linear(dtype)
    x, y = torch.randn(32, 16).to(dtype), torch.randn(32, 8).to(dtype)
    losses = losses_with_sgd(module, x, y)
    assert losses[-1] < 0.9 * losses[0] and isinstance(module.weight, Fp16Weight)


def test_weights_are_written_as_a_whole_or_by_elements_under_no_grad():
    param = nn.Parameter(Fp16Weight.from_float(torch.randn(6, 8), torch.bfloat16))
    with pytest.raises(RuntimeError, match=r"under torch\.no_grad"):
        param[0] = 0
    with torch.no_grad():
        param[0] = 0
        for write in (lambda: param[1].zero_(), lambda: nn.init.ones_(param[:2])):
            with pytest.raises(RuntimeError, match="a copy of its values: writing into it would be lost"):
                write()
    assert param[0].abs().max() == 0 < param[1].abs().max()
    with pytest.raises(RuntimeError, match=r"use tensor\.detach\(\)\.numpy"):
        param.numpy()


def test_swapping_other_weights_in_and_out_loses_no_bit():
    param = nn.Parameter(Fp16Weight.from_float(torch.randn(6, 8), torch.bfloat16))
    exact = param.dequantize(torch.float32)
    kept = param.data
    param.data = torch.ones(6, 8)
    assert torch.equal(kept.dequantize(torch.float32), exact) and (param == 1).all()
    param.data = kept
    assert torch.equal(param.dequantize(torch.float32), exact)
    with torch.no_grad():
        kept = torch.empty_like(param)
        kept.copy_(param)
        param.zero_()
        param.copy_(kept)
    assert torch.equal(param.dequantize(torch.float32), exact)
