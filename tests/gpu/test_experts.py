"""Grouped GEMMs and their kernels: the values of the reference, bit for bit where nothing is added up."""

import pytest
import torch
from support import kernels_or_skip

from nemo_lowprec.chart.recipe import Recipe
from nemo_lowprec.compute.activations import Activation
from nemo_lowprec.compute.backends.reference import ReferenceBackend
from nemo_lowprec.compute.backends.scaled_mm import ScaledMMBackend
from nemo_lowprec.compute.backends.scaled_mm_blocks import ScaledBlocksBackend
from nemo_lowprec.compute.experts.fused import FusedGemms, can_fuse
from nemo_lowprec.compute.experts.gemms import LoopGemms
from nemo_lowprec.compute.graphs.graphed import GraphedForward
from nemo_lowprec.formats import E4M3, E5M2, cast, decode
from nemo_lowprec.formats.gemm_block_scaling import ROW_128, SQUARE_128, dequantize_blocks, quantize_blocks
from nemo_lowprec.kernels.loader import expert_kernels, grouped_block_kernels, grouped_kernels, tile_kernels
from tests.experts import KINDS, convert, distance, experts_of, is_of_experts, passes, trained

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

SIZES = [[5], [0, 130, 1, 0, 256, 300, 0], [16] * 40, [1000, 24]]
HALVES = [torch.bfloat16, torch.float16]


@pytest.fixture(scope="module")
def kernels():
    return kernels_or_skip(expert_kernels())


@pytest.fixture(scope="module")
def grouped():
    return kernels_or_skip(grouped_kernels())


def routed(grouped, sizes):
    """(ends, order, tables) of groups of these sizes; a pair is at a random row."""
    ends = torch.tensor(sizes).cumsum(0).to(torch.int32).cuda()
    order = torch.randperm(sum(sizes), generator=torch.Generator().manual_seed(1)).cuda()
    return ends, order, grouped.make_tables(order, ends)


def fp8(rows, cols, fmt=E4M3, seed=0):
    values = torch.randn(rows, cols, generator=torch.Generator("cuda").manual_seed(seed), device="cuda")
    return cast(values, fmt)


def in_places(rows, sizes, grouped, tables):
    """Columnwise data of ``rows``: [features, places]."""
    found = torch.zeros(rows.shape[1], tables.most * grouped.TILE, dtype=torch.uint8, device="cuda")
    place = first = 0
    for size in sizes:
        found[:, place : place + size] = rows[first : first + size].view(torch.uint8).t()
        first, place = first + size, place + -(-size // grouped.TILE) * grouped.TILE
    return found.view(rows.dtype), place


def assert_columns(found, rows, sizes, grouped, tables):
    expected, end = in_places(rows, sizes, grouped, tables)
    torch.testing.assert_close(found.view(torch.uint8)[:, :end], expected.view(torch.uint8)[:, :end], rtol=0, atol=0)


@pytest.mark.parametrize("sizes", SIZES)
def test_tables(grouped, sizes):
    _, order, tables = routed(grouped, sizes)
    tiles = [-(-size // grouped.TILE) for size in sizes]
    assert tables.total.item() == sum(tiles) <= tables.most
    owners = [expert for expert, count in enumerate(tiles) for _ in range(count)]
    assert tables.owners[: sum(tiles)].tolist() == owners
    assert torch.equal(tables.places.long()[order], torch.arange(len(order), device="cuda"))


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("formats", [(E4M3, E4M3), (E5M2, E4M3)], ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("sizes", SIZES)
def test_gemms(grouped, sizes, formats, exact):
    _, _, tables = routed(grouped, sizes)
    experts, ins, outs, rows = len(sizes), 208, 336, sum(sizes)
    a, w = fp8(rows, ins, formats[0]), fp8(experts * outs, ins, formats[1], 1)
    scales = torch.tensor([0.5, 0.25], device="cuda").split(1)
    weight = decode(w).view(experts, outs, ins)
    expected = torch.cat([decode(x) @ weight[g].t() for g, x in enumerate(a.split(sizes))]) * 0.125
    for data, row_step, col_step in ((w, outs, 0), (w.t().contiguous().t(), outs, 0)):
        if data.stride(1) != 1:  # as the transpose of the matrices below each other: [outs, experts * ins]
            data = torch.cat([part for part in w.split(outs)], 1).contiguous()
            row_step, col_step = 0, ins
        operand = grouped.Weight(data, scales[1], row_step, col_step, outs)
        found = grouped.rows_gemm(a, scales[0], operand, ins, tables, torch.bfloat16, exact)
        assert distance(found, expected) < 4e-3

    dy = fp8(rows, outs, formats[0], 2)
    rows_of_dy, _ = in_places(dy, sizes, grouped, tables)
    a_e4m3, _ = in_places(fp8(rows, ins, E4M3), sizes, grouped, tables)
    found = grouped.weights_gemm(rows_of_dy, scales[0], a_e4m3, scales[1], tables, torch.float32, exact)
    parts = zip(dy.split(sizes), fp8(rows, ins, E4M3).split(sizes), strict=True)
    expected = torch.stack([decode(d).t() @ decode(x) for d, x in parts]) * 0.125
    assert distance(found, expected) < 1e-3
    assert not found[[size == 0 for size in sizes]].any()


def test_rows_of_no_expert_are_zero(grouped):
    _, _, tables = routed(grouped, [100, 50])
    a, w = fp8(200, 64), fp8(2 * 32, 64)
    one = torch.ones(1, device="cuda")
    operand = grouped.Weight(w, one, 32, 0, 32)
    found = grouped.rows_gemm(a, one, operand, 64, tables, torch.bfloat16, True)
    assert found[:150].any() and not found[150:].any()


@pytest.mark.parametrize("sizes", SIZES)
def test_gathered_rows(kernels, grouped, sizes):
    _, order, tables = routed(grouped, sizes)
    top_k = 2 if sum(sizes) % 2 == 0 else 1
    tokens = fp8(sum(sizes) // top_k, 80)
    made = kernels.gather(tokens, torch.ones(1, device="cuda"), order, top_k, tables, True, True)
    expected = tokens.view(torch.uint8)[order // top_k].view(tokens.dtype)
    assert torch.equal(made.row.view(torch.uint8), expected.view(torch.uint8))
    assert_columns(made.col, expected, sizes, grouped, tables)


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("sizes", SIZES)
def test_quantized_rows(kernels, grouped, sizes, half, fmt):
    _, _, tables = routed(grouped, sizes)
    x = torch.randn(sum(sizes), 80, device="cuda").to(half)
    scale, amax = torch.full((1,), 200.0, device="cuda"), torch.zeros(1, device="cuda")
    made = kernels.quantize(x, scale, fmt, amax, tables, True, True)
    expected = cast(x.float() * scale, fmt)
    assert torch.equal(made.row.view(torch.uint8), expected.view(torch.uint8))
    assert_columns(made.col, expected, sizes, grouped, tables)
    assert amax.item() == x.float().abs().max().item() and made.scale_inv.item() == (1 / scale).item()


@pytest.mark.parametrize(
    "activation", [Activation("silu", "gate_up"), Activation("gelu_tanh", "up_gate"), Activation("relu")]
)
@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("sizes", SIZES)
def test_gates(kernels, grouped, sizes, half, activation):
    _, _, tables = routed(grouped, sizes)
    rows, width = sum(sizes), 80
    wide = width if activation.form == "plain" else 2 * width
    generator = torch.Generator("cuda").manual_seed(3)
    h = torch.randn(rows, wide, device="cuda", generator=generator).to(half)
    factor = torch.rand(rows, device="cuda", generator=generator)
    grad = torch.randn(rows, width, device="cuda", generator=generator).to(half)
    scale, amax = torch.full((1,), 32.0, device="cuda"), torch.zeros(1, device="cuda")
    made = kernels.gate(activation.kind, activation.form, h, factor, scale, E4M3, amax, tables, True, True)
    values = (activation.forward((h,)).float() * factor[:, None]).to(half)
    expected = cast(values.float() * scale, E4M3)
    assert (made.row.view(torch.uint8) != expected.view(torch.uint8)).float().mean() < 2e-3
    assert_columns(made.col, made.row, sizes, grouped, tables)
    torch.testing.assert_close(amax, values.float().abs().max().view(1), rtol=1e-2, atol=0)

    amax.zero_()
    made, dh, dfactor = kernels.gate_backward(
        activation.kind, activation.form, grad, h, factor, scale, E5M2, amax, tables, True, True, True
    )
    expected = activation.backward((grad.float() * factor[:, None]).to(half), (h,))[0]
    assert distance(dh, expected) < 2e-3
    exact = cast(dh.float() * scale, E5M2)
    assert torch.equal(made.row.view(torch.uint8), exact.view(torch.uint8))
    assert_columns(made.col, exact, sizes, grouped, tables)
    assert amax.item() == dh.float().abs().max().item()
    torch.testing.assert_close(dfactor, (grad.float() * activation.forward((h,)).float()).sum(1), rtol=1e-3, atol=2e-2)


def test_sums_of_tokens(kernels, grouped):
    ends, order, tables = routed(grouped, [30, 0, 66])
    rows = torch.randn(96, 200, device="cuda", dtype=torch.bfloat16)
    found = kernels.combine(rows, ends, 3, tables, torch.float32)
    pairs = torch.empty_like(rows)
    pairs[order] = rows
    torch.testing.assert_close(found, pairs.view(32, 3, 200).float().sum(1), rtol=1e-6, atol=1e-6)
    few = ends.clone().fill_(30)  # rows behind the last add nothing
    pairs[order[30:]] = 0
    torch.testing.assert_close(
        kernels.combine(rows, few, 3, tables, torch.float32),
        pairs.view(32, 3, 200).float().sum(1),
        rtol=1e-6,
        atol=1e-6,
    )


def in_blocks(rows, cols, seed):
    values = torch.randn(rows, cols, generator=torch.Generator("cuda").manual_seed(seed), device="cuda")
    return (values * 4 ** torch.randn(rows, 1, device="cuda")).bfloat16()


@pytest.mark.parametrize("sizes", SIZES)
def test_rows_in_blocks(grouped, sizes):
    kernels = kernels_or_skip(grouped_block_kernels())
    _, order, tables = routed(grouped, sizes)
    top_k = 2 if sum(sizes) % 2 == 0 else 1
    tokens = in_blocks(sum(sizes) // top_k, 208, 0)
    rows = tokens[order // top_k]
    expected = quantize_blocks(rows, E4M3, ROW_128)
    gathered = kernels.quantize(tokens, order, top_k, E4M3, tables, True, True)
    for made in (gathered, kernels.quantize(rows, None, 1, E4M3, tables, True, True)):
        assert torch.equal(made.row.view(torch.uint8), expected.data.view(torch.uint8))
        assert torch.equal(made.row_scale.t(), expected.scale_inv)
        place = first = 0
        for size in sizes:
            if not size:
                continue
            of_expert = quantize_blocks(rows[first : first + size].t(), E4M3, ROW_128)
            tiles = -(-size // grouped.TILE)
            found = made.col[:, place * grouped.TILE :][:, : tiles * grouped.TILE].view(torch.uint8)
            assert torch.equal(found[:, :size], of_expert.data.view(torch.uint8)) and not found[:, size:].any()
            assert torch.equal(made.col_scale[place : place + tiles].t(), of_expert.scale_inv)
            first, place = first + size, place + tiles


@pytest.mark.parametrize("sizes", SIZES)
def test_gemms_in_blocks(grouped, sizes):
    kernels = kernels_or_skip(grouped_block_kernels())
    _, _, tables = routed(grouped, sizes)
    experts, ins, outs, rows = len(sizes), 208, 256, sum(sizes)
    x, w, dy = in_blocks(rows, ins, 0), in_blocks(experts * outs, ins, 1), in_blocks(rows, outs, 2)
    x8, dy8 = (kernels.quantize(t, None, 1, E4M3, tables, True, True) for t in (x, dy))
    row, row_scale, col, col_scale = tile_kernels().quantize(w, E4M3, True, True, True)
    weight = dequantize_blocks(quantize_blocks(w, E4M3, SQUARE_128)).view(experts, outs, ins)
    exact = [dequantize_blocks(quantize_blocks(t, E4M3, ROW_128)).split(sizes) for t in (x, dy)]
    found = kernels.rows_gemm(
        x8.row, x8.row_scale, grouped.Weight(row, row_scale, outs, 0, outs), ins, tables, torch.bfloat16
    )
    assert distance(found, torch.cat([v @ weight[g].t() for g, v in enumerate(exact[0])])) < 4e-3
    found = kernels.rows_gemm(
        dy8.row, dy8.row_scale, grouped.Weight(col, col_scale, 0, outs, ins), outs, tables, torch.bfloat16
    )
    assert distance(found, torch.cat([v @ weight[g] for g, v in enumerate(exact[1])])) < 4e-3
    found = kernels.weights_gemm(dy8.col, dy8.col_scale, x8.col, x8.col_scale, tables, torch.float32)
    parts = [
        [dequantize_blocks(quantize_blocks(part.t(), E4M3, ROW_128)) for part in t.split(sizes) if len(part)]
        for t in (dy, x)
    ]
    expected = iter([a @ b.t() for a, b in zip(*parts, strict=True)])
    for expert, size in enumerate(sizes):
        assert distance(found[expert], next(expected)) < 1e-3 if size else not found[expert].any()


@pytest.mark.parametrize("inner", [128, 96])
@pytest.mark.parametrize("kind", KINDS)
def test_modules_in_blocks_compute_as_the_reference_does(kernels, kind, inner):
    found = []
    for backend in (ReferenceBackend(), ScaledBlocksBackend()):
        parent, *inputs = experts_of(kind, tokens=400, hidden=128, inner=inner, experts=9, top_k=3, device="cuda")
        convert(parent, backend, Recipe("blockwise", fp8="e4m3"))
        found.append(passes(parent, *inputs))
    (expected, wanted), (out, grads) = found
    assert distance(out, expected) < 1e-2
    for name, grad in wanted.items():
        assert distance(grads[name], grad) < 4e-2, name


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("recipe", [Recipe("delayed"), Recipe("current", fast_accum=True)], ids=["delayed", "current"])
def test_modules_compute_as_the_reference_does(kernels, kind, recipe, half):
    found = []
    for backend in (ReferenceBackend(), ScaledMMBackend()):
        parent, *inputs = experts_of(kind, tokens=400, hidden=128, inner=96, experts=9, top_k=3, device="cuda")
        amaxes = convert(parent, backend, recipe, half)
        plans = list(parent.experts.gemm_plans.values())
        assert can_fuse(plans, inputs[0].device) == (type(backend) is ScaledMMBackend)
        passes(parent, *inputs, half)
        amaxes.after_step(False)
        found.append(passes(parent, *inputs, half))
    (expected, wanted), (out, grads) = found
    assert distance(out, expected) < 1e-2
    for name, grad in wanted.items():
        assert distance(grads[name], grad) < 4e-2, name
        if name not in ("tokens", "scores"):
            assert not grads[name][-1].any() and grads[name][0].any()  # the last expert has no token


def test_modules_do_not_wait_for_the_gpu(kernels):
    parent, *inputs = experts_of("mixtral", device="cuda")
    amaxes = convert(parent, ScaledMMBackend())
    for _ in range(2):
        passes(parent, *inputs)
        amaxes.after_step(False)
    torch.cuda.set_sync_debug_mode("error")
    try:
        passes(parent, *inputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert FusedGemms.waits is False and LoopGemms.waits is True


LEVELS = ["te_fp8", "msamp_o2", "msamp_o3", "bf16_with_fp8_mixed", "bf16_with_fp8_subchannel_scaling_mixed"]


@pytest.mark.parametrize("level", LEVELS)
def test_models_with_experts_learn_as_in_fp32_and_in_graphs_alike(kernels, level):
    _, expected = trained(None, device="cuda")
    _, eager = trained(level, device="cuda", graphs=False)
    model, graphed = trained(level, device="cuda", graphs=True)
    assert graphed == eager and eager == pytest.approx(expected, abs=0.07)
    forwards = [f for m in model.modules() if isinstance(f := m.__dict__.get("forward"), GraphedForward)]
    assert any(passes for f in forwards for passes in f._passes.values()), {f._off for f in forwards}


@pytest.mark.parametrize("level", LEVELS)
def test_experts_alone_learn_as_in_fp32(kernels, level):
    _, expected = trained(None, device="cuda")
    _, found = trained(level, device="cuda", convert=is_of_experts, graphs=False)
    assert found == pytest.approx(expected, abs=0.025)
