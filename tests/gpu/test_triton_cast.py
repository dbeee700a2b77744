"""The fused quantization kernels and the ``torch`` backend around them: bit for bit the reference's data and scales."""

import pytest
import torch
from support import kernels_or_skip

from nemo_lowprec.chart.recipe import Recipe
from nemo_lowprec.compute.backends.reference import ReferenceBackend
from nemo_lowprec.compute.backends.scaled_mm import ScaledMMBackend
from nemo_lowprec.compute.operands import new_histories, operand_of
from nemo_lowprec.formats import E4M3, E5M2, DelayedScaling, cast, compute_amax, compute_scale
from nemo_lowprec.kernels.loader import fused_kernels
from nemo_lowprec.tensors import Fp8Weight

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

SHAPES = [(1, 16), (16, 16), (36, 48), (37, 48), (128, 64), (257, 1040), (1000, 333)]
SPECIALS = {"plain": None, "nan": float("nan"), "inf": float("inf"), "-inf": -float("inf"), "zeros": 0.0}


@pytest.fixture(scope="module")
def kernels():
    return kernels_or_skip(fused_kernels())


def make(shape, dtype, special=None, spread=True):
    """Values over many binades, so that FP8's subnormals, ties and saturation all occur."""
    torch.manual_seed(sum(shape))
    x = torch.randn(shape, device="cuda")
    if spread:
        x = x * torch.exp2(torch.randint(-12, 6, shape, device="cuda").float())
    x = x.to(dtype)
    if special == 0.0:
        x.zero_()
    elif special is not None:
        x[0, 0] = special
    return x


def assert_same(actual, expected):
    """Equal bits, except that a NaN may be any NaN."""
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    a, b = actual.float(), expected.float()
    assert torch.equal(a.isnan(), b.isnan())
    same = actual.contiguous().view(torch.uint8) == expected.contiguous().view(torch.uint8)
    assert (same | a.isnan()).all(), f"{(~(same | a.isnan())).sum()} of {a.numel()} differ"


def same_float(a, b):
    return torch.equal(a.nan_to_num(-1.0), b.nan_to_num(-1.0))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda f: f.name)
@pytest.mark.parametrize("special", SPECIALS.values(), ids=SPECIALS)
def test_cast_with_a_given_scale(kernels, shape, dtype, fmt, special):
    x = make(shape, dtype, special)
    scale = torch.tensor([37.123], device="cuda")
    record = torch.tensor([0.25], device="cuda")
    row, col, scale_inv = kernels.quantize(x, scale, fmt, True, True, record)
    expected = cast(x.float() * scale, fmt)
    assert_same(row, expected)
    assert_same(col, expected.t())
    assert col.is_contiguous() and torch.equal(scale_inv, scale.reciprocal())
    assert same_float(record, torch.maximum(torch.tensor([0.25], device="cuda"), compute_amax(x).reshape(1)))


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda f: f.name)
def test_every_half_value_and_every_tie(kernels, fmt):
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int16, device="cuda").view(256, 256)
    for dtype in (torch.bfloat16, torch.float16):
        x = bits.view(dtype)
        row, _, _ = kernels.quantize(x, torch.ones(1, device="cuda"), fmt, True, False, None)
        assert_same(row, cast(x, fmt))
    # Around each representable value and each midpoint, which FP16 on the way would round twice.
    grid = torch.arange(0, 0x7C if fmt is E5M2 else 0x7F, dtype=torch.uint8, device="cuda").view(fmt.dtype).float()
    middles = (grid[1:] + grid[:-1]) / 2
    points = torch.cat([grid, middles])
    zero, far = torch.zeros_like(points), torch.full_like(points, 1e9)
    x = torch.stack([points, torch.nextafter(points, zero), torch.nextafter(points, far)])
    row, _, _ = kernels.quantize(x, torch.ones(1, device="cuda"), fmt, True, False, None)
    assert_same(row, cast(x, fmt))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("special", SPECIALS.values(), ids=SPECIALS)
@pytest.mark.parametrize("margin", [0, 2])
def test_current_scaling(kernels, shape, special, margin):
    x = make(shape, torch.bfloat16, special)
    row, col, scale_inv = kernels.quantize_current(x, E4M3, margin, True, True)
    scale = compute_scale(compute_amax(x).reshape(1), E4M3.max, margin)
    assert torch.equal(scale_inv, scale.reciprocal())
    assert_same(row, cast(x.float() * scale, E4M3))
    assert_same(col, row.t())


def test_tiny_amax_clamps_the_scale(kernels):
    x = torch.full((16, 16), 1e-38, device="cuda")
    row, _, scale_inv = kernels.quantize_current(x, E5M2, 0, True, False)
    scale = compute_scale(compute_amax(x).reshape(1), E5M2.max)
    assert torch.equal(scale_inv, scale.reciprocal()) and torch.equal(row.float(), cast(x * scale, E5M2).float())


def test_strided_input_and_single_orientation(kernels):
    base = make((96, 200), torch.bfloat16)
    scale = torch.ones(1, device="cuda")
    for x in (base.t(), base[:, 5:133], base[::2], base.view(200, 96).t()[1:]):
        row, none, _ = kernels.quantize(x, scale, E4M3, True, False, None)
        assert none is None
        assert_same(row, cast(x, E4M3))
        none, col, _ = kernels.quantize(x, scale, E4M3, False, True, None)
        assert none is None
        assert_same(col, cast(x, E4M3).t())


def test_empty(kernels):
    x = torch.empty(0, 32, device="cuda", dtype=torch.bfloat16)
    row, col, _ = kernels.quantize_current(x, E4M3, 0, True, True)
    assert row.shape == (0, 32) and col.shape == (32, 0) and kernels.amax(x).item() == 0.0


def test_beyond_31_bit_offsets(kernels):
    free, _ = torch.cuda.mem_get_info()
    if free < 24 * 2**30:
        pytest.skip("needs 24 GiB of free GPU memory")
    x = torch.zeros(2**17 + 8, 2**14 + 32, device="cuda", dtype=torch.bfloat16)
    x[-1] = torch.arange(x.shape[1], device="cuda") % 200
    row, col, _ = kernels.quantize(x, torch.ones(1, device="cuda"), E4M3, True, True, None)
    assert_same(row[-1], cast(x[-1], E4M3))
    assert_same(col[:, -1], cast(x[-1], E4M3))
    assert col[:, :-1].view(torch.uint8).count_nonzero() == 0


@pytest.mark.parametrize("scaling", ["delayed", "current"])
@pytest.mark.parametrize("record", [True, False])
def test_backend_quantizes_as_the_reference(scaling, record):
    recipe = Recipe(scaling, fp8_amax_history_len=4, fp8_margin=1)
    results = []
    for backend in (ReferenceBackend(), ScaledMMBackend()):
        histories = new_histories(recipe)
        slot = None
        if histories is not None:
            histories.to(torch.device("cuda"))
            histories.add_all({"x": E5M2})
            slot = histories.slots["x"]
        operand = operand_of(recipe, "grad_output", slot)
        seen = []
        for step in range(3):
            for micro in range(2):
                x = make((64 + 16 * micro, 48), torch.bfloat16) * (1 + step)
                q = backend.quantize(x, operand, rowwise=True, columnwise=True, record=record)
                seen += [q.rowwise.data, q.columnwise.data, q.rowwise.scale_inv, q.columnwise.scale_inv]
                if slot is not None:
                    seen.append(slot.amax.clone())
            if histories is not None:
                histories.update()
                seen += [histories.history.clone(), histories.scale.clone()]
        if slot is not None:
            assert slot.cold is not record
        results.append(seen)
    for reference, fused in zip(*results, strict=True):
        if reference.element_size() == 1:
            assert_same(fused, reference)
        else:
            assert torch.equal(fused, reference)


def test_warm_slot_is_one_kernel_and_no_sync(kernels):
    histories = DelayedScaling(history_len=2)
    histories.to(torch.device("cuda"))
    histories.add_all({"x": E4M3})
    operand = operand_of(Recipe("delayed"), "input", histories.slots["x"])
    x, backend = make((256, 256), torch.bfloat16), ScaledMMBackend()
    for _ in range(2):
        backend.quantize(x, operand, rowwise=True, columnwise=True, record=True)
        histories.update()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        backend.quantize(x, operand, rowwise=True, columnwise=True, record=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        backend.quantize(x, operand, rowwise=True, columnwise=True, record=True)
        torch.cuda.synchronize()
    launched = [e.name for e in profile.events() if "_cast_kernel" in e.name or "elementwise" in e.name]
    assert launched and all("_cast_kernel" in name for name in launched) and len(launched) == 1, launched


def test_weights_of_any_dtype(kernels):
    weight = torch.nn.Parameter(make((64, 32), torch.float32))
    q = ScaledMMBackend().quantize(
        weight, operand_of(Recipe("current"), "weight"), rowwise=True, columnwise=True, record=True
    )
    expected = ReferenceBackend().quantize(
        weight.detach(), operand_of(Recipe("current"), "weight"), rowwise=True, columnwise=True, record=True
    )
    assert_same(q.rowwise.data, expected.rowwise.data)
    assert not q.rowwise.data.requires_grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_stored_weight_is_quantized_as_on_the_cpu(kernels, dtype):
    x = make((96, 160), dtype)
    on_cpu = Fp8Weight.from_float(x.cpu(), E4M3, torch.bfloat16, margin=1)
    stored = Fp8Weight.from_float(torch.zeros_like(x), E4M3, torch.bfloat16, margin=1)
    data = stored.data_fp8.data_ptr()
    stored.quantize_(x)
    assert stored.data_fp8.data_ptr() == data
    assert_same(stored.data_fp8.cpu(), on_cpu.data_fp8)
    assert torch.equal(stored.scale_inv.cpu(), on_cpu.scale_inv)
