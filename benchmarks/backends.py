"""The backends beside the reference and beside float64: errors and times of a layer's three GEMMs.

    python -m benchmarks.backends

Errors are relative, ||out - expected|| / ||expected||. ``to_reference`` is what a kernel adds to the numerics of the
recipe (accumulation, rounding of the result); ``to_float64`` is the error of the recipe as a whole, on the same
half-precision operands. Times are of quantization and GEMM together, at the MLP shape of Llama-8B. ``backends_cast`` is
the te backend's quantization into both orientations, by delayed scaling, beside that of TE's own kernel; both read two
bytes an element and write two.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.record import Record, arguments
from nemo_lowprec.chart import CHART
from nemo_lowprec.chart.recipe import Recipe
from nemo_lowprec.compute import BACKENDS, Backend
from nemo_lowprec.compute.backends import class_of
from nemo_lowprec.compute.operands import OPERANDS, Operand, new_histories, operand_of

ROWS, INS, OUTS = 8192, 4096, 14336
GEMMS = ("fprop", "dgrad", "wgrad")
OUT_DTYPE = {"fprop": torch.bfloat16, "dgrad": torch.bfloat16, "wgrad": torch.float32}


def tensors(rows: int, ins: int, outs: int) -> dict[str, Tensor]:
    """Operands as training has them: unit activations, small weights, tiny output gradients."""
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*shape: int, std: float) -> Tensor:
        return (torch.randn(*shape, generator=generator, device="cuda") * std).bfloat16()

    return {
        "input": normal(rows, ins, std=1.0),
        "weight": normal(outs, ins, std=0.02),
        "grad_output": normal(rows, outs, std=1e-5),
    }


def run(backend: Backend, operands: dict[str, Operand], values: dict[str, Tensor]) -> dict[str, Tensor]:
    """Quantize and multiply, as a layer does."""
    q = {k: backend.quantize(values[k], operands[k], rowwise=True, columnwise=True, record=True) for k in OPERANDS}
    return {
        "fprop": backend.fprop(q["input"], q["weight"], None, OUT_DTYPE["fprop"]),
        "dgrad": backend.dgrad(q["grad_output"], q["weight"], OUT_DTYPE["dgrad"]),
        "wgrad": backend.wgrad(q["grad_output"], q["input"], OUT_DTYPE["wgrad"]),
    }


def exact(values: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same in float64."""
    x, w, dy = (values[k].double() for k in OPERANDS)
    return {"fprop": x @ w.t(), "dgrad": dy @ w, "wgrad": dy.t() @ x}


def error(actual: Tensor, expected: Tensor) -> float:
    """Relative error in the Frobenius norm."""
    expected = expected.double()
    return ((actual.double() - expected).norm() / expected.norm()).item()


def warm_operands(recipe: Recipe, values: dict[str, Tensor]) -> dict[str, Operand]:
    """Operands with a scale in use: what every step but the first one sees."""
    histories = new_histories(recipe)
    if histories is None:
        return {k: operand_of(recipe, k) for k in OPERANDS}
    histories.add_all({k: operand_of(recipe, k).fmt for k in OPERANDS})
    histories.to(torch.device("cuda"))
    operands = {k: operand_of(recipe, k, histories.slots[k]) for k in OPERANDS}
    run(BACKENDS["reference"](), operands, values)
    histories.update()
    return operands


def milliseconds(work: Callable[[], object]) -> float:
    """Median time of one call."""
    from triton.testing import do_bench

    return do_bench(work, warmup=50, rep=200, return_mode="median")


def casts(record: Record, values: dict[str, Tensor], rounds: int = 3) -> None:
    """Measure the te backend's quantization and TE's, in turns."""
    import transformer_engine.pytorch as te
    import transformer_engine_torch as tex
    from transformer_engine.pytorch.constants import TE_DType

    recipe = Recipe("delayed")
    backend, operands = BACKENDS["te"](), warm_operands(recipe, values)
    for kind, operand in operands.items():
        x, slot = values[kind], operand.slot
        assert slot is not None
        theirs = te.Float8Quantizer(slot.scale, slot.amax, TE_DType[operand.fmt.dtype])
        theirs.internal = True
        ways = {
            "te backend": lambda x=x, o=operand: backend.quantize(x, o, rowwise=True, columnwise=True, record=True),
            "Transformer Engine": lambda x=x, q=theirs: tex.quantize(x, q),
        }
        ms: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(rounds):
            for name, work in ways.items():
                ms[name].append(milliseconds(work))
        for name, unsorted in ms.items():
            times = sorted(unsorted)
            speed = [round(4 * x.numel() / t / 1e6) for t in reversed(times)]
            record.add(
                benchmark="backends_cast", name=name, operand=kind, shape=list(x.shape), gb_per_s=speed[rounds // 2],
                gb_per_s_min=speed[0], gb_per_s_max=speed[-1], rounds=rounds,
            )  # fmt: skip


def half_gemms(values: dict[str, Tensor]) -> list[Tensor]:
    """The layer in BF16, for comparison."""
    x, w, dy = (values[k] for k in OPERANDS)
    return [x @ w.t(), dy @ w, torch.mm(dy.t(), x, out_dtype=torch.float32)]


def main() -> None:
    args = arguments(__doc__.split("\n")[0], "backends_h200.jsonl").parse_args()
    record = Record(args.out)
    small, large = tensors(1024, 2048, 1024), tensors(ROWS, INS, OUTS)
    expected = exact(small)
    record.add(benchmark="backends_time", backend="bf16", ms=round(milliseconds(lambda: half_gemms(large)), 3))
    casts(record, large)
    for scaling in dict.fromkeys(level.scaling for level in CHART.values() if level.scaling):
        recipe = Recipe(scaling, fp8="e4m3" if scaling in ("rowwise", "blockwise", "mxfp8", "nvfp4") else "hybrid")
        reference = run(BACKENDS["reference"](), warm_operands(recipe, small), small)
        for name in BACKENDS:
            kind = class_of(name, recipe)
            reason = kind.unavailable(recipe)
            if reason is not None:
                record.add(benchmark="backends", backend=name, scaling=scaling, skipped=reason)
                continue
            backend = kind()
            results = run(backend, warm_operands(recipe, small), small)
            for gemm in GEMMS:
                record.add(
                    benchmark="backends",
                    backend=name,
                    scaling=scaling,
                    gemm=gemm,
                    to_reference=error(results[gemm], reference[gemm]),
                    to_float64=error(results[gemm], expected[gemm]),
                )
            if name != "reference":
                operands = warm_operands(recipe, large)
                ms = milliseconds(lambda backend=backend, operands=operands: run(backend, operands, large))
                record.add(benchmark="backends_time", backend=name, scaling=scaling, ms=round(ms, 3))


if __name__ == "__main__":
    main()
