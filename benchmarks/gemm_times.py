"""GPU time of the GEMMs of one linear layer, in FP8 with quantization and in BF16, over a grid of sizes.

    python -m benchmarks.gemm_times

``nemo_lowprec.compute.gemm_measure`` says what is measured; FP8 has delayed scales and the ``torch`` backend.
"""

from __future__ import annotations

from itertools import product

import torch

from benchmarks.record import Record, arguments
from nemo_lowprec.chart.recipe import Recipe
from nemo_lowprec.compute.backends.scaled_mm import ScaledMMBackend
from nemo_lowprec.compute.gemm_measure import layer_times, warm_operands

ROWS = (256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
SIDES = (256, 512, 1024, 2048, 4096, 8192, 16384)
LARGEST = 2**40  # multiplications of one GEMM


def main() -> None:
    gpu = torch.cuda.get_device_name().split()[1].lower()
    args = arguments(__doc__.split("\n")[0], f"gemm_times_{gpu}.jsonl").parse_args()
    record = Record(args.out)
    backend, operands = ScaledMMBackend(), warm_operands(Recipe("delayed"))
    for rows, ins, outs in product(ROWS, SIDES, SIDES):
        if rows * ins * outs > LARGEST:
            continue
        fp8, half = layer_times(rows, ins, outs, backend, operands)
        record.add(benchmark="gemm_times", m=rows, k=ins, n=outs, fp8_us=round(fp8, 2), bf16_us=round(half, 2))
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
