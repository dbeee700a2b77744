"""Operands with a scale per row: quantized bit for bit as the definition, multiplied as it says."""

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from nemo_lowprec import prepare
from nemo_lowprec.chart.recipe import Recipe
from nemo_lowprec.compute.backends import choose_backend
from nemo_lowprec.compute.backends.reference import ReferenceBackend
from nemo_lowprec.compute.backends.scaled_mm_rows import ScaledRowsBackend
from nemo_lowprec.compute.operands import OPERANDS, operand_of
from nemo_lowprec.formats import E4M3, E5M2, BlockScaledMatrix, dequantize_blocks, quantize_blocks
from nemo_lowprec.formats.gemm_block_scaling import WHOLE_ROW
from nemo_lowprec.kernels import fp8_gemm
from nemo_lowprec.kernels.loader import row_kernels

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


@pytest.fixture(params=["e4m3", "hybrid", "fast"])
def recipe(request):
    return Recipe("rowwise", fp8="hybrid" if request.param == "hybrid" else "e4m3", fast_accum=request.param == "fast")


@pytest.fixture
def backend(recipe):
    if reason := ScaledRowsBackend.unavailable(recipe):
        pytest.skip(reason)
    made = choose_backend("torch", recipe, torch.device("cuda"))
    assert isinstance(made, ScaledRowsBackend) and made.fast_accum == recipe.fast_accum
    return made


def values(rows, cols, dtype=torch.bfloat16, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(rows, cols, device="cuda", generator=generator)
    return (x * torch.exp2(torch.randint(-20, 10, x.shape, device="cuda", generator=generator).float())).to(dtype)


def assert_is_the_definition(x, fmt, rowwise=True, columnwise=True):
    if row_kernels() is None:
        pytest.skip("no kernels")
    row, row_scale, col, col_scale = row_kernels().quantize(x, fmt, rowwise, columnwise)
    assert (row is None, col is None) == (not rowwise, not columnwise)
    for data, scale, source in ((row, row_scale, x), (col, col_scale, x.t())):
        if data is None:
            continue
        wanted = quantize_blocks(source, fmt, WHOLE_ROW)
        assert torch.equal(scale, wanted.scale_inv)
        assert torch.equal(data.view(torch.uint8), wanted.data.contiguous().view(torch.uint8))


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(16, 16), (128, 128), (144, 272), (1008, 640), (256, 4096), (2064, 16), (37, 50)])
def test_quantization_is_the_definition(shape, dtype, fmt):
    for _ in range(2):  # compiled, and launched again
        assert_is_the_definition(values(*shape, dtype), fmt)
    assert_is_the_definition(values(*shape, dtype), fmt, columnwise=False)
    assert_is_the_definition(values(*shape, dtype), fmt, rowwise=False)


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=["e4m3", "e5m2"])
def test_numbers_at_the_edges(fmt):
    x = torch.randn(256, 256, device="cuda")
    x[0] = 0
    x[:, 9] = 0
    x[1, 3], x[2, 200], x[3, 7] = float("inf"), float("nan"), -float("inf")
    x[4] *= 1e-44
    x[5] *= 1e38
    assert_is_the_definition(x, fmt)
    assert_is_the_definition(x.t(), fmt)
    assert_is_the_definition(x.bfloat16()[:, :128], fmt)


def test_nothing_is_quantized_without_elements():
    if row_kernels() is None:
        pytest.skip("no kernels")
    row, row_scale, col, col_scale = row_kernels().quantize(values(0, 32), E4M3, True, True)
    assert (row.shape, row_scale.shape, col.shape, col_scale.shape) == ((0, 32), (0, 1), (32, 0), (32, 1))


def gemms(backend, recipe, rows, ins, outs, out_dtype, wgrad_dtype, bias=True):
    """(result, what the operands' values give in FP64) of the three GEMMs of a layer."""
    operands = {kind: operand_of(recipe, kind) for kind in OPERANDS}
    both = {"rowwise": True, "columnwise": True, "record": True}
    small = 2.0**-8  # products fit into FP16
    x = backend.quantize(values(rows, ins, seed=1) * small, operands["input"], **both)
    w = backend.quantize(values(outs, ins, seed=2) * small, operands["weight"], **both)
    dy = backend.quantize(values(rows, outs, seed=3) * small, operands["grad_output"], **both)
    b = values(1, outs, out_dtype, seed=4)[0] if bias else None
    total = values(rows, ins, out_dtype, seed=5)
    into = torch.empty(outs, ins, device="cuda", dtype=wgrad_dtype)
    out, dx, dw = (
        backend.fprop(x, w, b, out_dtype), backend.dgrad(dy, w, out_dtype, total.clone()),
        backend.wgrad(dy, x, wgrad_dtype, into),
    )  # fmt: skip
    assert dw is into

    def exact(part):
        return dequantize_blocks(BlockScaledMatrix(part.data, part.scale_inv, part.layout)).double()

    yield out, exact(x.rowwise) @ exact(w.rowwise).t() + (0 if b is None else b.double())
    yield dx, exact(dy.rowwise) @ exact(w.columnwise).t() + total.double()
    yield dw, exact(dy.columnwise) @ exact(x.columnwise).t()


@pytest.mark.parametrize("by", ["cublas", "torch"])
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("wgrad_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(128, 128, 128), (64, 256, 384), (16, 16, 16), (144, 272, 400), (4096, 1024, 1536)])
def test_gemms_multiply_the_values_of_their_operands(backend, recipe, shape, out_dtype, wgrad_dtype, by, monkeypatch):
    if by == "torch":
        monkeypatch.setattr(fp8_gemm, "multiplies_rows", lambda *_: False)
    for bias in (False, True):
        for have, wanted in gemms(backend, recipe, *shape, out_dtype, wgrad_dtype, bias):
            error = (have.double() - wanted).norm() / wanted.norm()
            # Without FP32 sums Hopper's tensor cores keep about 14 bits.
            assert error < 0.004, (tuple(have.shape), float(error))


def test_fp32_gradients_of_weights_are_not_rounded_to_bf16(backend, recipe):
    *_, (have, wanted) = gemms(backend, recipe, 4096, 512, 256, torch.bfloat16, torch.float32)
    error = (have.double() - wanted).norm() / wanted.norm()
    assert error < (2e-3 if recipe.fast_accum else 2e-4), float(error)


def test_hopper_multiplies_by_cublas():
    """With CUDA 12.9 or later: in half precision and, for gradients of weights, in FP32."""
    version = tuple(map(int, torch.version.cuda.split(".")[:2]))
    if torch.cuda.get_device_capability() != (9, 0) or version < (12, 9) or not fp8_gemm.is_supported():
        pytest.skip("neither Hopper nor cuBLASLt of 12.9")
    for dy in (torch.float8_e4m3fn, torch.float8_e5m2):
        for fast in (False, True):
            for out in (torch.bfloat16, torch.float16, torch.float32):
                assert fp8_gemm.multiplies_rows(0, dy, torch.float8_e4m3fn, out, fast), (dy, fast, out)


def test_gemms_in_a_dispatch_mode_are_torchs(backend, recipe):
    plain = [have for have, _ in gemms(backend, recipe, 128, 256, 128, torch.bfloat16, torch.float32)]
    with FlopCounterMode(display=False) as counter:
        counted = [have for have, _ in gemms(backend, recipe, 128, 256, 128, torch.bfloat16, torch.float32)]
    assert counter.get_total_flops() > 0
    for one, two in zip(plain, counted, strict=True):
        assert (one - two).norm() < 0.004 * two.norm()


@pytest.mark.parametrize("options", [{}, {"override_linear_precision": (False, False, True)}], ids=["fp8", "gw_hp"])
@pytest.mark.parametrize("rows", [64, 50])  # padded to a multiple of 16
@pytest.mark.parametrize("bias", [False, True])
def test_layers_train_as_on_the_reference(rows, bias, options):
    if reason := ScaledRowsBackend.unavailable(None):
        pytest.skip(reason)
    found = {}
    for backend in ("torch", "reference"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 144, bias=bias), nn.GELU(), nn.Linear(144, 48, bias=bias)).cuda()
        model, optimizer = prepare(
            model, torch.optim.AdamW(model.parameters()), "bf16_with_fp8_rowwise_mixed", backend=backend, convert="*",
            **options,
        )  # fmt: skip
        for step in range(3):
            x = torch.randn(rows, 64, device="cuda", generator=torch.Generator("cuda").manual_seed(step))
            x = (x * torch.logspace(-6, 2, rows, device="cuda")[:, None]).requires_grad_()
            with torch.autocast("cuda", torch.bfloat16):
                out = model(x)
            (out.float().square().mean() * 8).backward()
            found.setdefault(backend, []).extend(
                [out.detach().float(), x.grad, *(p.grad.float().clone() for p in model.parameters())]
            )
            optimizer.step()
            optimizer.zero_grad()
    assert type(choose_backend("reference", Recipe("rowwise"), torch.device("cuda"))) is ReferenceBackend
    for have, wanted in zip(found["torch"], found["reference"], strict=True):
        assert (have - wanted).norm() < 0.05 * wanted.norm() + 1e-6
