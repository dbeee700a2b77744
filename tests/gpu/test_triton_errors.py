"""The kernel that adds the errors of rounding up: its sums are those of the definition."""

import math

import pytest
import torch

from nemo_lowprec.chart.recipe import Recipe
from nemo_lowprec.compute.backends import choose_backend
from nemo_lowprec.compute.backends.base import Orientation
from nemo_lowprec.compute.operands import OPERANDS, operand_of
from nemo_lowprec.formats import E4M3, E5M2
from nemo_lowprec.formats.errors import Errors
from nemo_lowprec.kernels import loader
from nemo_lowprec.report.monitor.table import ErrorTable
from nemo_lowprec.tensors import GradientTensor

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

SCALINGS = [
    (backend, scaling)
    for backend in ("torch", "te", "reference")
    for scaling in ("current", "rowwise", "blockwise", "mxfp8")
    if (backend, scaling) != ("te", "rowwise") and (scaling != "mxfp8" or backend == "reference")
]


def values(rows, cols, dtype, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(rows, cols, device="cuda", generator=generator)
    x *= torch.exp2(torch.randint(-20, 10, x.shape, device="cuda", generator=generator).float())
    x.view(-1)[::17] = 0.0
    return x.to(dtype)


def read(table):
    return [Errors.read(*row) for row in zip(table.sums.tolist(), table.extremes.tolist(), strict=True)]


def by_definition(monkeypatch, add):
    """What ``add`` adds to a table without kernels."""
    table = ErrorTable(1, torch.device("cuda"))
    with monkeypatch.context() as patch:
        patch.setattr("nemo_lowprec.report.monitor.table.error_kernels", lambda: None)
        add(table)
    return read(table)[0]


def assert_alike(found, wanted):
    assert (found.count, found.nonfinite, found.amax) == (wanted.count, wanted.nonfinite, wanted.amax)
    assert found.underflow == wanted.underflow and found.saturation == wanted.saturation
    assert found.binades == wanted.binades
    assert found.sqnr == (None if wanted.sqnr is None else pytest.approx(wanted.sqnr, abs=1e-3))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("backend", "scaling"), SCALINGS)
@pytest.mark.parametrize("kind", OPERANDS)
def test_sums_are_those_of_the_definition(backend, scaling, kind, dtype, monkeypatch):
    recipe = Recipe(scaling, fp8="e4m3") if scaling in ("rowwise", "mxfp8", "blockwise") else Recipe(scaling)
    made = choose_backend(backend, recipe, torch.device("cuda"))
    assert loader.error_kernels() is not None
    operand = operand_of(recipe, kind)
    for rows, cols in ((128, 128), (256, 384), (2048, 1040)):
        if scaling == "blockwise" and cols % 128:
            cols = 1024
        x = values(rows, cols, dtype)
        for rowwise, columnwise in ((True, True), (True, False), (False, True)):
            data = made.quantize(x, operand, rowwise=rowwise, columnwise=columnwise, record=False)
            part, is_columnwise = made.stored(data)
            source = x.t() if is_columnwise else x
            table = ErrorTable(3, torch.device("cuda"))
            for _ in range(2):  # compiled, and launched again
                table.clear()
                table.add(1, source, part)
            empty, found, _ = read(table)
            assert empty.count == 0
            assert_alike(found, by_definition(monkeypatch, lambda table, v=source, p=part: table.add(0, v, p)))
            assert found.scale is not None and 20 < found.sqnr < 40


def test_values_that_are_not_finite_are_counted(monkeypatch):
    made = choose_backend("torch", Recipe("current"), torch.device("cuda"))
    x = values(64, 256, torch.bfloat16)
    data = made.quantize(x, operand_of(Recipe("current"), "input"), rowwise=True, columnwise=False, record=False)
    part, _ = made.stored(data)
    x[3, 5], x[7, 9], x[0, 0] = math.inf, math.nan, 1e15  # the last one is clipped
    table = ErrorTable(1, torch.device("cuda"))
    table.add(0, x, part)
    assert read(table)[0].nonfinite == 2 and read(table)[0].saturation > 0
    assert_alike(read(table)[0], by_definition(monkeypatch, lambda table: table.add(0, x, part)))
    x[1, 1] = 3e38  # whose square is no FP32 number
    table.add(0, x, part)
    assert read(table)[0].sqnr is None


def test_the_tiles_of_a_long_narrow_matrix_overflow_no_count():
    x = torch.ones(2**22 - 5, 1, device="cuda", dtype=torch.bfloat16)
    table = ErrorTable(1, torch.device("cuda"))
    table.add(0, x, Orientation(x, torch.ones(1, device="cuda", dtype=torch.float32), None))
    found = read(table)[0]
    assert (found.count, found.underflow, found.amax) == (len(x), 0.0, 1.0)


@pytest.mark.parametrize(("rows", "cols"), [(8192, 14336), (16384, 2048), (20000, 1040)])
def test_large_matrices_are_compared_in_part(rows, cols, monkeypatch):
    """Counts of single values are exact; ratios are those of a part, in which no column is left out."""
    made = choose_backend("torch", Recipe("current"), torch.device("cuda"))
    x = torch.randn(rows, cols, device="cuda", generator=torch.Generator("cuda").manual_seed(2)).bfloat16()
    x[:, 3] *= 2.0**9  # a column of outliers, at which the scale is: most other values lose bits
    data = made.quantize(x, operand_of(Recipe("current"), "input"), rowwise=True, columnwise=False, record=False)
    part, _ = made.stored(data)
    x[5, 7], x[rows - 1, cols - 1] = math.nan, 1e6
    table = ErrorTable(1, torch.device("cuda"))
    table.add(0, x, part)
    found, wanted = read(table)[0], by_definition(monkeypatch, lambda table: table.add(0, x, part))
    exact = ("count", "nonfinite", "amax", "saturation", "scale")
    assert all(getattr(found, name) == getattr(wanted, name) for name in exact)
    assert wanted.underflow > 0.3 and found.underflow == pytest.approx(wanted.underflow, rel=0.05)
    sums = table.sums[0].tolist()
    assert 2**21 < sums[1] < 2**23  # values that were compared
    table.clear()
    x[rows - 1, cols - 1] = 1.0
    table.add(0, x, part)
    wanted = by_definition(monkeypatch, lambda table: table.add(0, x, part))
    assert read(table)[0].sqnr == pytest.approx(wanted.sqnr, abs=0.3)


@pytest.mark.parametrize("shape", [(1000,), (64, 200), (3, 5, 300), (512, 4096)])
def test_gradients_in_blocks(shape, monkeypatch):
    grad = values(1, math.prod(shape), torch.bfloat16).view(shape)
    stored = GradientTensor.from_float(grad)
    table = ErrorTable(1, torch.device("cuda"))
    table.add_gradient(0, grad, stored)
    found = read(table)[0]
    wanted = by_definition(monkeypatch, lambda table: table.add_gradient(0, grad, stored))
    assert_alike(found, wanted)
    assert 25 < found.sqnr < 40


def test_a_captured_launch_reads_what_is_there_at_the_replay():
    made = choose_backend("torch", Recipe("current"), torch.device("cuda"))
    x = values(256, 256, torch.bfloat16)
    operand = operand_of(Recipe("current"), "input")
    part, _ = made.stored(made.quantize(x, operand, rowwise=True, columnwise=False, record=False))
    table, graph = ErrorTable(1, torch.device("cuda")), torch.cuda.CUDAGraph()
    table.add(0, x, part)
    with torch.cuda.graph(graph):
        table.add(0, x, part)
    first = read(table)[0]
    table.clear()
    x.zero_()
    graph.replay()
    second = read(table)[0]
    assert first.count == second.count == x.numel() and first.amax > 0 == second.amax


@pytest.mark.parametrize("fmt", [E4M3, E5M2])
def test_a_value_is_clipped_beyond_half_a_step(fmt):
    limit = {E4M3: 464.0, E5M2: 61440.0}[fmt]
    x = torch.tensor([[limit, -limit, limit * 1.01, 1.0] * 32], device="cuda")
    part = Orientation(x.clamp(-fmt.max, fmt.max).to(fmt.dtype), torch.ones(1, device="cuda"), None)
    table = ErrorTable(1, torch.device("cuda"))
    table.add(0, x, part)
    assert read(table)[0].saturation == 25.0
