"""The tensor in blocks of a row with power-of-two scales that reads as FP32."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

from nemo_lowprec.formats import E4M3, FP16
from nemo_lowprec.formats.block_scale_128 import dequantize_rows, quantize_rows
from nemo_lowprec.tensors import BlockScaledTensor
from nemo_lowprec.tensors.readonly_view import ReadonlyView

FORMATS = pytest.mark.parametrize("fmt", [E4M3, FP16], ids=lambda f: f.name)


def make(shape=(8, 300), fmt=E4M3, seed=0):
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return values, BlockScaledTensor.from_float(values, fmt)


def rounded(values, fmt=E4M3):
    return dequantize_rows(*quantize_rows(values, fmt))


def same_bytes(a, b):
    pairs = zip(a.parts(), b.parts(), strict=True)
    return all(x.shape == y.shape and torch.equal(*(t.flatten().view(torch.uint8) for t in (x, y))) for x, y in pairs)


@FORMATS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(8, 300), (), (5,), (0, 4), (2, 3, 64)])
def test_stores_blocks_and_reads_as_fp32(fmt, dtype, shape):
    values = make(shape)[0].to(dtype)
    stored = BlockScaledTensor.from_float(values, fmt)
    assert stored.dtype == torch.float32 and stored.shape == shape and stored.data_blocks.dtype == fmt.dtype
    read = stored.dequantize()
    assert type(read) is torch.Tensor and read.shape == shape and torch.equal(read, rounded(values, fmt))
    assert stored.dequantize(torch.bfloat16).dtype == torch.bfloat16


def test_fp16_reaches_far_below_its_own_range():
    values = make()[0].square() * 1e-14  # second moments of an optimizer: zeros as plain FP16
    stored = BlockScaledTensor.from_float(values, FP16)
    assert values.half().count_nonzero() == 0
    torch.testing.assert_close(stored.dequantize(), values, rtol=2**-11, atol=values.max().item() * 2**-39)


@FORMATS
def test_bytes_are_those_of_the_elements_and_one_for_each_block(fmt):
    _, stored = make((256, 512), fmt)
    assert stored.stored_bytes() == 256 * 512 * fmt.dtype.itemsize + 256 * 4
    assert stored.stored_bytes() <= (fmt.dtype.itemsize + 0.05) * stored.numel()


@FORMATS
@pytest.mark.parametrize("shape", [(4, 300), (), (0, 3)])
def test_zeros_are_the_zeros_that_quantizing_stores(fmt, shape):
    assert same_bytes(
        BlockScaledTensor.zeros(shape, fmt, torch.device("cpu")), BlockScaledTensor.from_float(torch.zeros(shape), fmt)
    )


@FORMATS
def test_operations_read_the_values_and_return_plain_tensors(fmt):
    _, stored = make(fmt=fmt)
    read = stored.dequantize()
    for got, want in (
        (stored + 1, read + 1),
        (stored.sqrt(), read.sqrt()),
        (stored[2:4, 1], read[2:4, 1]),
        (stored.bfloat16(), read.bfloat16()),
        (torch.ones(8, 300).addcdiv(stored, stored.abs() + 1), torch.ones(8, 300).addcdiv(read, read.abs() + 1)),
        (torch.zeros(8, 300).copy_(stored), read),
    ):
        assert type(got) in (torch.Tensor, ReadonlyView) and got.dtype == want.dtype
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


@FORMATS
def test_in_place_operations_write_back_into_the_storage_that_is_there(fmt):
    values, stored = make(fmt=fmt)
    addresses = [part.data_ptr() for part in stored.parts()]
    other = torch.randn(300, 8, generator=torch.Generator().manual_seed(3)).t() * 1e-6
    read = stored.dequantize()
    assert stored.lerp_(other, 0.9) is stored
    read = rounded(read.lerp(other, 0.9), fmt)
    assert torch.equal(stored.dequantize(), read)
    assert stored.mul_(0.3).addcmul_(other, other, value=2.0) is stored
    read = rounded(rounded(read * 0.3, fmt).addcmul(other, other, value=2.0), fmt)
    assert torch.equal(stored.dequantize(), read)
    assert stored.copy_(values.bfloat16()) is stored
    assert torch.equal(stored.dequantize(), rounded(values.bfloat16(), fmt))
    stored.zero_()
    assert same_bytes(stored, BlockScaledTensor.zeros(stored.shape, fmt, stored.device))
    assert [part.data_ptr() for part in stored.parts()] == addresses
    with pytest.raises(RuntimeError):
        stored.copy_(torch.zeros(3, 3))


def test_copy_converts_between_formats_and_broadcasts():
    _, fp16 = make(fmt=FP16)
    _, stored = make(seed=1)
    stored.copy_(fp16)
    assert stored.fmt is E4M3 and torch.equal(stored.dequantize(), rounded(fp16.dequantize()))
    stored.copy_(torch.arange(300.0))
    assert torch.equal(stored.dequantize(), rounded(torch.arange(300.0).expand(8, 300)))


def test_foreach_operations_write_back_to_each():
    (_, a), (_, b) = make(), make((3,), FP16, seed=1)
    c = torch.ones(2)
    want = [rounded(a.dequantize() * 3), rounded(b.dequantize() * 3, FP16), c * 3]
    torch._foreach_mul_([a, b, c], 3.0)
    for got, expected in zip((a, b, c), want, strict=True):
        assert torch.equal(got + 0, expected)
    torch._foreach_addcmul_([a], [torch.ones(8, 300)], [torch.ones(8, 300)], [0.5])
    assert torch.equal(a.dequantize(), rounded(want[0] + 0.5))


@FORMATS
def test_storing_what_was_read_changes_no_value(fmt):
    _, stored = make(fmt=fmt)
    read = stored.dequantize()
    stored.copy_(read)
    assert torch.equal(stored.dequantize(), read)


def test_detach_shares_and_clone_and_to_do_not():
    _, stored = make()
    detached, clone, moved = stored.detach(), stored.clone(), stored.to("cpu", copy=True)
    assert stored.to("cpu") is stored and stored.float() is stored
    assert same_bytes(clone, stored) and same_bytes(moved, stored)
    stored.zero_()
    assert detached.dequantize().count_nonzero() == 0
    assert clone.dequantize().count_nonzero() > 0 and moved.dequantize().count_nonzero() > 0
    assert {part.device.type for part in stored.to("meta").parts()} == {"meta"}


@FORMATS
@pytest.mark.parametrize("wrap", [lambda t: t, nn.Parameter], ids=["tensor", "parameter"])
def test_deepcopy_and_pickle_are_independent_and_have_the_same_bytes(fmt, wrap):
    stored = wrap(make(fmt=fmt)[1])
    file = io.BytesIO()
    torch.save(stored, file)
    file.seek(0)
    copies = copy.deepcopy(stored), pickle.loads(pickle.dumps(stored)), torch.load(file, weights_only=False)
    for copied in copies:
        assert isinstance(copied, BlockScaledTensor) and isinstance(copied, nn.Parameter) is isinstance(
            stored, nn.Parameter
        )
        assert copied.requires_grad is stored.requires_grad and copied.fmt == fmt and same_bytes(copied, stored)
        with torch.no_grad():
            copied.zero_()
        assert stored.dequantize().count_nonzero() > 0
