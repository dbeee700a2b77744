"""The fused kernels for blocks of a row: bit for bit the plain-torch reference's data and exponents."""

import pytest
import torch
from support import kernels_or_skip

from nemo_lowprec.formats import E4M3, FP16, cast
from nemo_lowprec.formats.block_scale_128 import dequantize_rows, quantize_rows, scale_to_blocks
from nemo_lowprec.formats.stochastic import round_stochastic, salts_of_values
from nemo_lowprec.kernels.loader import block_kernels
from nemo_lowprec.kernels.multi_tensor import PointerTable
from nemo_lowprec.tensors import BlockScaledTensor, BlockShard, GradientTensor, PlainShard

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

FORMATS = pytest.mark.parametrize("fmt", [E4M3, FP16], ids=lambda f: f.name)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
# Aligned rows go another way through the kernel than ragged ones; 32 blocks make a tile.
SHAPES = [(), (1,), (128,), (1000,), (1, 128), (33, 128), (7, 1024), (257, 384), (5, 3), (37, 129), (300, 333)]
SHAPES += [(3, 5, 7, 9), (2, 3, 128), (130, 1)]
EMPTY = [(0,), (0, 4), (4, 0), (0, 0)]
INF, NAN = float("inf"), float("nan")


@pytest.fixture(scope="module")
def kernels():
    return kernels_or_skip(block_kernels())


def make(shape, dtype=torch.float32, binades=40, seed=0):
    """Values over many binades, so that the formats' subnormals, ties and zeros all occur."""
    torch.manual_seed(seed + sum(shape))
    power = torch.randint(-binades // 2, binades // 2, shape, device="cuda").float()
    return (torch.randn(shape, device="cuda") * torch.exp2(power)).to(dtype)


def assert_same(actual, expected):
    """Equal bits, except that a NaN may be any NaN."""
    assert actual.dtype == expected.dtype and actual.shape == expected.shape and actual.is_contiguous()
    nan = expected.float().isnan()
    assert torch.equal(actual.float().isnan(), nan)
    kind = torch.uint8 if actual.element_size() == 1 else torch.int16
    same = (actual.view(kind) == expected.contiguous().view(kind)) | nan
    assert same.all(), f"{(~same).sum()} of {same.numel()} differ"


def assert_as_the_reference(kernels, values, fmt):
    for positive in (False, True):
        data, exponent, nonfinite = kernels.quantize(values, fmt, positive)
        want, want_exponent = quantize_rows(values, fmt, positive=positive)
        assert_same(data, want)
        assert_same(exponent, want_exponent)
        assert nonfinite.shape == (1,) and nonfinite.item() == float(not values.isfinite().all())


@DTYPES
def test_many_are_quantized_as_one_at_a_time(kernels, dtype):
    shapes = [(128, 128), (64, 256), (16, 384), (2, 64, 128), (5, 1024), (1, 128), (384, 128)]
    together = kernels.QuantizeMany()
    into = [kernels.quantize(make(shape, dtype), E4M3) for shape in shapes]
    nonfinite = torch.zeros(len(shapes), device="cuda")
    for found in (2, 4):
        values = [make(shape, dtype, seed=found) for shape in shapes]
        values[found].view(-1)[17] = (INF, NAN)[found // 4]
        assert all(map(together.takes, values))
        nonfinite.zero_()
        together(values, [(data.data_ptr(), exponent.data_ptr()) for data, exponent, _ in into], nonfinite)
        for i, (one, (data, exponent, _)) in enumerate(zip(values, into, strict=True)):
            want, want_exponent, want_nonfinite = kernels.quantize(one, E4M3)
            assert_same(data, want)
            assert_same(exponent, want_exponent)
            assert nonfinite[i] == want_nonfinite
    odd = [make((128, 127)), make((0, 128)), make((128, 256))[:, :128], make((128, 128)).t(), make((129,))[1:]]
    assert not any(map(together.takes, odd))


@FORMATS
@DTYPES
@pytest.mark.parametrize("shape", SHAPES + EMPTY, ids=str)
def test_quantize(kernels, fmt, dtype, shape):
    assert_as_the_reference(kernels, make(shape, dtype), fmt)
    assert_as_the_reference(kernels, torch.zeros(shape, dtype=dtype, device="cuda"), fmt)


@FORMATS
@DTYPES
@pytest.mark.parametrize("shape", [(300, 333), (33, 256), (1000,)], ids=str)
def test_quantize_what_is_not_finite(kernels, fmt, dtype, shape):
    for bad in (NAN, INF, -INF):
        values = make(shape, dtype)
        values.flatten()[:: 97 * 5] = bad
        assert_as_the_reference(kernels, values, fmt)
        one = make(shape, dtype)
        one.view(-1)[-1] = bad
        assert_as_the_reference(kernels, one, fmt)
        assert_as_the_reference(kernels, torch.full_like(one, bad), fmt)


@FORMATS
def test_every_half_value_and_every_tie(kernels, fmt):
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int16, device="cuda")
    for dtype in (torch.bfloat16, torch.float16):
        values = bits.view(dtype)
        assert_as_the_reference(kernels, values.view(256, 256), fmt)
        assert_as_the_reference(kernels, values[torch.randperm(2**16, device="cuda")].view(512, 128), fmt)
    # Around each representable value and each midpoint, in blocks of the scale 1.
    kind = torch.uint8 if fmt is E4M3 else torch.int16
    grid = torch.arange(0, 0x7F if fmt is E4M3 else 0x7C00, dtype=kind, device="cuda").view(fmt.dtype).float()
    points = torch.cat([grid, (grid[1:] + grid[:-1]) / 2])
    zero, far = torch.zeros_like(points), torch.full_like(points, 1e9)
    points = torch.cat([points, torch.nextafter(points, zero), torch.nextafter(points, far)])
    points = points[points <= fmt.max]
    rows = torch.nn.functional.pad(points, (0, -len(points) % 127)).view(-1, 127)
    values = torch.cat([rows, torch.full_like(rows[:, :1], fmt.max)], 1)
    assert_as_the_reference(kernels, values, fmt)
    assert kernels.quantize(values, fmt)[1].unique().tolist() == [127]
    assert_as_the_reference(kernels, -values, fmt)


@FORMATS
def test_exponents_at_the_steps_and_at_both_ends(kernels, fmt):
    steps = fmt.max * torch.exp2(torch.arange(-140, 112, device="cuda").double())
    steps = torch.cat([steps.float(), torch.tensor([1e-45, 1e-40, 2.0**-126, 3.4028234663852886e38], device="cuda")])
    far = torch.full_like(steps, 3.4028234663852886e38)
    amax = torch.cat([steps, torch.nextafter(steps, far), torch.nextafter(steps, torch.zeros_like(steps))])
    values = amax[:, None] * torch.linspace(-1, 1, 129, device="cuda")  # two blocks, one of a single element
    assert_as_the_reference(kernels, values, fmt)
    assert_as_the_reference(kernels, values[:, 1:].contiguous(), fmt)


@FORMATS
@DTYPES
def test_quantize_strided_sources(kernels, fmt, dtype):
    base = make((96, 256), dtype)
    sources = [base.t(), base[:, 5:133], base[::2], base[:, ::2], base.t()[1:, 3:], base[3], base[:, 3]]
    sources += [base[:1].expand(4, 256), make((4, 6, 5, 7), dtype).to(memory_format=torch.channels_last)]
    for values in sources:
        assert_as_the_reference(kernels, values, fmt)


def assert_same_gradient(actual, expected):
    assert_same(actual.data_blocks.cpu(), expected.data_blocks.cpu())
    assert_same(actual.exponent.cpu(), expected.exponent.cpu())
    assert (actual.factor.item(), actual.nonfinite.item()) == (expected.factor.item(), expected.nonfinite.item())


@DTYPES
@pytest.mark.parametrize("shape", SHAPES + EMPTY, ids=str)
@pytest.mark.parametrize("alpha, factor", [(1.0, 1.0), (-0.37, 1.0), (1.0, 0.3), (0.1, 1 / 3)])
def test_accumulate(kernels, dtype, shape, alpha, factor):
    data, exponent, flag = kernels.quantize(make(shape), E4M3)
    grad = GradientTensor(data, exponent, torch.ones(1, device="cuda"), flag).mul_(factor)
    for count in (1, 2):
        values = make(shape, dtype, seed=count)
        total = (dequantize_rows(data, exponent) * grad.factor).view(shape) + alpha * values.float()
        nonfinite = torch.full((1,), float(not total.isfinite().all()))
        scaled, want_exponent = scale_to_blocks(total, E4M3)
        want = round_stochastic(scaled, E4M3.dtype, salts_of_values(scaled, count))
        grad.accumulate_(values, alpha)
        assert grad.data_blocks is data and grad.exponent is exponent
        assert_same_gradient(grad, GradientTensor(want, want_exponent, torch.ones(1), nonfinite))


@pytest.mark.parametrize("shape", [(300, 333), (33, 256)], ids=str)
def test_accumulate_strided_and_what_is_not_finite(kernels, shape):
    for bad in (None, NAN, INF):
        grad, on_cpu = (GradientTensor.from_float(make(shape).to(device)) for device in ("cuda", "cpu"))
        values = make(shape[::-1], torch.bfloat16, seed=1).t()
        if bad is not None:
            values[5, 130] = bad
        for alpha in (1.0, -2.5):
            grad.accumulate_(values, alpha)
            on_cpu.accumulate_(values.cpu(), alpha)
            assert_same_gradient(grad, on_cpu)
        assert grad.nonfinite.item() == float(bad is not None)
        grad.copy_(make(shape))
        assert grad.nonfinite.item() == 0


def test_a_gradient_goes_through_the_same_steps_as_on_the_cpu(kernels):
    p, q = (torch.nn.Parameter(torch.ones(37, 200, device=device)) for device in ("cuda", "cpu"))
    for each in (p, q):
        each.grad = GradientTensor.from_float(make((37, 200)).to(each.device))
        for step in range(3):
            each.grad.add_(make((200, 37), torch.bfloat16, seed=step).t().to(each.device))
            each.grad.mul_(0.3)
        each.grad.clamp_(-100.0, 100.0)
        each.grad.div_(7)
    assert_same_gradient(p.grad, q.grad)
    norms = [torch.nn.utils.clip_grad_norm_([each], 0.5) for each in (p, q)]
    torch.testing.assert_close(norms[0].cpu(), norms[1], rtol=1e-5, atol=0)
    torch.testing.assert_close(p.grad.dequantize().cpu(), q.grad.dequantize(), rtol=1e-5, atol=0)
    scaler, optimizer = torch.amp.GradScaler("cuda", init_scale=4.0), torch.optim.SGD([p], lr=1.0)
    scaler.scale(torch.ones((), device="cuda"))
    unscaled = p.grad.dequantize() / 4
    scaler.step(optimizer)
    torch.testing.assert_close(p.detach(), 1 - unscaled, rtol=1e-6, atol=1e-7)


@FORMATS
@pytest.mark.parametrize("shape", [(), (37, 200), (8, 128)], ids=str)
def test_a_block_tensor_is_stored_as_on_the_cpu(kernels, fmt, shape):
    stored, on_cpu = (BlockScaledTensor.zeros(shape, fmt, torch.device(device)) for device in ("cuda", "cpu"))
    for seed in range(2):
        values = make(shape, seed=seed)
        stored.copy_(values)
        on_cpu.copy_(values.cpu())
        assert_same(stored.data_blocks.cpu(), on_cpu.data_blocks)
        assert_same(stored.exponent.cpu(), on_cpu.exponent)
        assert torch.equal(stored.dequantize().cpu(), on_cpu.dequantize())


ALIGNED = [(33, 128), (128,), (7, 1024), (2100, 2048), (0, 128), (2, 3, 128)]  # (2100, 2048): more than 1024 tiles
RAGGED = [(1,), (), (300, 333), (0, 4), (5, 3), (4100, 1025), (130, 1), (1000,)]


@pytest.mark.parametrize("shapes", [ALIGNED, RAGGED, ALIGNED + RAGGED, [(5,)], [(0, 4)]], ids=lambda s: str(len(s)))
def test_norms(kernels, shapes):
    grads = [GradientTensor.from_float(make(shape, binades=20, seed=i)) for i, shape in enumerate(shapes)]
    for i, grad in enumerate(grads):
        grad.mul_((-0.7) ** i)
    want = torch.stack([grad.dequantize().double().norm() for grad in grads])
    got = torch.stack(kernels.norms([grad.parts()[:3] for grad in grads]))
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=0)
    assert torch.equal(got, torch.stack(kernels.norms([grad.parts()[:3] for grad in grads])))
    plain = make((4, 5))
    mixed = torch.stack(list(torch._foreach_norm([plain, *grads])))
    assert torch.equal(mixed[1:], got) and torch.equal(mixed[0], torch._foreach_norm([plain])[0])


def test_norms_of_what_is_not_finite_are_nan_and_leave_the_others(kernels):
    grads = [GradientTensor.from_float(make((40, 200), seed=i)) for i in range(3)]
    before = kernels.norms([grad.parts()[:3] for grad in grads])
    grads[1].add_(torch.full((40, 200), INF, device="cuda"))
    after = kernels.norms([grad.parts()[:3] for grad in grads])
    assert after[1].isnan() and torch.equal(after[0], before[0]) and torch.equal(after[2], before[2])


def test_a_table_of_addresses_is_uploaded_again_only_where_one_has_changed(kernels):
    device, pointers = torch.device("cuda"), PointerTable()
    rows = [[make((5,), seed=i), make((3,), seed=i)] for i in range(4)]

    def addresses():
        return [[t.data_ptr() for t in row] for row in rows]

    table = pointers.get(rows, device)
    assert table.is_cuda and table.dtype == torch.int64 and table.tolist() == addresses()
    rows[2][1].add_(1)
    assert pointers.get(rows, device) is table
    rows[2][1] = rows[2][1].clone()
    changed = pointers.get(rows, device)
    assert changed is not table and changed.tolist() == addresses()
    assert pointers.get(rows, device) is changed
    assert pointers.get(rows[:2], device).tolist() == addresses()[:2]


def test_storing_and_accumulating_do_not_wait_and_make_no_copy(kernels):
    values = make((1024, 1024), torch.bfloat16)
    grad = GradientTensor.from_float(values)
    grad.add_(values)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.cuda.set_sync_debug_mode("error")
    try:
        grad.add_(values, alpha=0.5)
        assert torch.cuda.max_memory_allocated() - before < values.numel() // 8
        fresh = GradientTensor.from_float(values)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.max_memory_allocated() - before < 1.1 * fresh.numel()


@pytest.mark.parametrize("cols", [2**14 + 128, 2**14 + 32], ids=["aligned", "ragged"])
def test_beyond_31_bit_offsets(kernels, cols):
    free, _ = torch.cuda.mem_get_info()
    if free < 24 * 2**30:
        pytest.skip("needs 24 GiB of free GPU memory")
    values = torch.zeros(2**17 + 8, cols, device="cuda", dtype=torch.bfloat16)
    values[-1] = GradientTensor.from_float(make((cols,))).dequantize() + 0.0  # rounded again it stays, but for -0
    grad = GradientTensor.from_float(values)
    for _ in range(2):
        assert_same(grad.data_blocks[-1:], quantize_rows(values[-1:], E4M3)[0])
        assert_same(grad.exponent[-1:], quantize_rows(values[-1:], E4M3)[1])
        assert grad.data_blocks[:-1].view(torch.uint8).count_nonzero() == 0
        last = dequantize_rows(grad.data_blocks[-1:], grad.exponent[-1:]).double()
        torch.testing.assert_close(kernels.norms([grad.parts()[:3]])[0].double(), last.norm(), rtol=1e-5, atol=0)
        grad.zero_()
        grad.add_(values)


@pytest.mark.parametrize("shape", [(33, 128), (257, 384), (37, 129), (3, 5, 7, 9), (0, 4)], ids=str)
@pytest.mark.parametrize("kind", [BlockShard, PlainShard])
def test_shards_are_gathered_as_by_the_reference(kernels, kind, shape):
    for binades in (4, 40):
        values = make(shape, binades=binades)
        if values.numel():
            values.view(-1)[7] = NAN
        shard = kind.of(values, torch.bfloat16, 1) if kind is BlockShard else kind(values, torch.bfloat16, 1)
        for amax in (1.0, 3e-4, 1e6):  # too small a scale, and one at which values saturate
            shard.set_scales([shard], torch.full((1,), amax, device="cuda"))
            sent, along = shard.gathered()
            assert_same(sent.view(torch.float8_e4m3fn), cast(shard.dequantize(torch.float32) * shard.scale, E4M3))
            assert along is shard.scale_inv


def test_a_gradient_takes_values_from_another_device():
    values = torch.randn(4, 256)
    for stored, given in (("cuda", "cpu"), ("cpu", "cuda")):
        grad = GradientTensor.from_float(torch.zeros(4, 256, device=stored))
        grad.copy_(values.to(given))
        assert torch.equal(grad.dequantize().cpu(), GradientTensor.from_float(values).dequantize())
        grad.copy_(torch.full((4, 256), float("inf"), device=given))
        assert grad.nonfinite.item() == 1
