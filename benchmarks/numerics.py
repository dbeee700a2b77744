"""Pictures of the numerics, computed by the reference definitions in ``nemo_lowprec/formats/``; no GPU is needed.

Numbers are rounded to four digits, so that another version of torch draws the same picture.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from benchmarks.pictures import LINES, OTHERS, Line, Lines, Panel, Picture
from benchmarks.rst import block, rst_table
from nemo_lowprec.formats import (
    E4M3,
    E5M2,
    FP16,
    DelayedScaling,
    FloatFormat,
    cast,
    compute_scale,
    decode,
    quantize_blocks,
)
from nemo_lowprec.formats.block_scale_128 import dequantize_rows, quantize_rows
from nemo_lowprec.formats.floats import E2M5, E5M3
from nemo_lowprec.formats.gemm_block_scaling import MX_32, ROW_128, WHOLE_ROW, BlockLayout, dequantize_blocks
from nemo_lowprec.formats.stochastic import round_stochastic, salt_of

__all__ = ["PICTURES", "formats_table"]

_BLUE, _RED, _GREEN, _PINK = LINES[:4]


def _line(label: str, ys: list[float], colour: str, behind: bool = False) -> Line:
    return Line(label, tuple(float(f"{y:.4g}") for y in ys), colour, behind)


def _normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _error(values: Tensor, stored: Tensor) -> float:
    """The noise beside the values, root mean squares, in %."""
    return 100 * math.sqrt((values - stored).double().square().sum() / values.double().square().sum())


@cache
def formats() -> Picture:
    """The error of rounding by magnitude."""
    binades = [float(power) for power in range(-22, 18)]
    lines, kept = [], {}
    for fmt, colour in ((E4M3, _BLUE), (E5M2, _RED)):
        errors = []
        for power in binades:
            values = 2.0**power * torch.linspace(1, 2, 257)[:-1]
            errors.append(min(100.0, _error(values, decode(cast(values, fmt)))))
        lines.append(_line(fmt.name.upper(), errors, colour))
        kept[fmt] = _error(large := torch.linspace(1, 2, 4097)[:-1], decode(cast(large, fmt)))
    see = (
        f"Within its range E4M3 errs by {kept[E4M3]:.1f} % and E5M2 by {kept[E5M2]:.1f} %, whatever the magnitude; "
        f"E4M3 ends at {E4M3.max:.0f} and loses its last bits below {2.0**-6:.4f}, E5M2 ends at {E5M2.max:,.0f}."
    )
    alt = (
        f"Error of rounding over the power of two of a value: flat at {kept[E4M3]:.1f} % for E4M3 from -6 to 8 and at "
        f"{kept[E5M2]:.1f} % for E5M2 from -14 to 15, rising to 100 % below."
    )
    panel = Panel("Error of rounding", "% of the value", tuple(binades), tuple(lines))
    shown = "Lines: the root mean square of the errors of values between one power of two and the next."
    return Picture("numerics_formats.png", see, shown, Lines("log2 of the value", (panel,), alt))


def _amaxes() -> list[float]:
    """Amaxes of 60 steps: a rise, a plateau with noise, and a jump that comes and goes."""
    noise = _normal(60, seed=1).mul(0.15).exp().tolist()
    return [n * (1 + 15 * min(1, i / 20)) * (8 if 36 <= i < 39 else 1) for i, n in enumerate(noise)]


def _largest(amaxes: list[float], history: int, algo: str) -> list[float]:
    """log2 of the largest value that the delayed scale of each step has room for."""
    scaling = DelayedScaling(history, algo)  # type: ignore[arg-type]
    scaling.add_all({"input": E4M3})
    found = []
    for amax in amaxes:
        slot = scaling.slots["input"]
        scale = slot.current_scale(torch.tensor([amax]))
        found.append(math.log2(E4M3.max / scale.item()))
        slot.record(torch.tensor([amax]))
        scaling.update()
        slot.cold = False
    return found


@cache
def delayed() -> Picture:
    """What delayed scales have room for, beside the amaxes that come."""
    amaxes = _amaxes()
    powers = [math.log2(amax) for amax in amaxes]
    long, short = _largest(amaxes, 16, "max"), _largest(amaxes, 16, "most_recent")
    clipped = [sum(power > room + 1e-3 for power, room in zip(powers, rooms, strict=True)) for rooms in (long, short)]
    unused = max(room - power for room, power in zip(long, powers, strict=True))
    see = (
        f"Where the amax outgrows the delayed scale, values are clipped: in {clipped[0]} of 60 steps with the maximum "
        f"of 16 steps, in {clipped[1]} with the most recent amax; after the jump the maximum leaves {unused:.1f} "
        "powers of two unused until its 16 steps are over."
    )
    lines = (
        _line("amax of the step", powers, OTHERS, behind=True),
        _line("room: max of 16 steps", long, _BLUE),
        _line("room: most_recent", short, _RED),
    )
    alt = (
        "An amax that rises over 20 steps, jumps eightfold for three steps and comes back; the room that delayed "
        "scales have for it follows one step late, and with a maximum over 16 steps stays high for 16 steps."
    )
    panel = Panel("Delayed scaling", "log2", tuple(float(i) for i in range(60)), lines)
    shown = (
        "Lines: made-up amaxes, and the largest value that E4M3 holds at the scale of each step. A value above a line "
        "is clipped."
    )
    return Picture("numerics_delayed.png", see, shown, Lines("step", (panel,), alt))


def _per_tensor(values: Tensor) -> Tensor:
    scale = compute_scale(values.abs().amax().reshape(1), E4M3.max, 0)
    return decode(cast(values * scale, E4M3)) / scale


def _blocks(layout: BlockLayout, fmt: FloatFormat = E4M3) -> Callable[[Tensor], Tensor]:
    return lambda values: dequantize_blocks(quantize_blocks(values, fmt, layout))


@cache
def outlier() -> Picture:
    """What one large value costs all others, by the size of what shares a scale."""
    powers, ways = list(range(0, 25)), {
        "a scale a tensor": _per_tensor,
        "a scale a row": _blocks(WHOLE_ROW),
        "a scale for 1 x 128": _blocks(ROW_128),
        "MXFP8: a scale for 1 x 32": _blocks(MX_32),
    }  # fmt: skip
    plain = _normal(64, 1024)
    others = torch.ones_like(plain, dtype=torch.bool)
    others[0, 0] = False
    found: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in ways}
    for power in powers:
        values = plain.clone()
        values[0, 0] = 2.0**power
        for name, way in ways.items():
            stored = way(values)
            found[name][0].append(_error(values[others], stored[others]))
            found[name][1].append(_error(values[0, 1:], stored[0, 1:]))
    tensor, row = found["a scale a tensor"][0], found["a scale a row"][0]
    at = powers.index(20)
    see = (
        f"One value of 2\\ :sup:`{powers[at]}` among 65,536 of the usual size makes the others err by "
        f"{tensor[at]:.0f} % with a scale for the tensor ({tensor[0]:.1f} % without the outlier), and by "
        f"{row[at]:.1f} % with a scale for each row: the outlier's own row is lost, and no other."
    )
    panels = tuple(
        Panel(
            title, "error, % of the values", tuple(map(float, powers)),
            tuple(_line(name, found[name][i], colour) for (name, colour) in zip(ways, LINES, strict=False)),
        )
        for i, title in enumerate(("All other values", "Values of the outlier's row"))
    )  # fmt: skip
    alt = (
        f"Error of all other values over the size of one outlier: with a scale a tensor it rises to {tensor[-1]:.0f} "
        f"%, with a scale a row to {row[-1]:.0f} %, with smaller blocks it stays below. In the outlier's own row a "
        "scale a row loses as much as a scale a tensor."
    )
    shown = "Lines: E4M3 with four ways of scaling, on Gaussian values [64, 1024] of which one is the outlier."
    return Picture("numerics_outlier.png", see, shown, Lines("log2 of the outlier", panels, alt))


@cache
def averaging() -> Picture:
    """The error of averaged gradients by the number of processes."""
    worlds = [2, 4, 8, 16, 32, 64]
    sizes = _normal(256, 1, seed=2).mul(4).exp()  # rows of a gradient differ in size

    def fp8(values: Tensor) -> Tensor:
        return dequantize_rows(*quantize_rows(values, E4M3))

    ways: dict[str, Callable[[Tensor], Tensor]] = {
        "FP8, a scale for 128": fp8,
        "FP8, a scale a tensor": _per_tensor,
        "BF16": lambda values: values.bfloat16().float(),
    }
    found: dict[str, list[float]] = {name: [] for name in ways}
    for world in worlds:
        common = _normal(256, 512, seed=3)
        own = [(common + 3 * _normal(256, 512, seed=100 + i)) * sizes for i in range(world)]
        mean = torch.stack(own).mean(0)
        for name, way in ways.items():
            averaged = way(torch.stack([way(values) for values in own]).sum(0)) / world
            errors = (averaged - mean).square().sum(1) / mean.square().sum(1)  # rows count alike
            found[name].append(100 * math.sqrt(errors.mean()))
    blocks, tensor, bf16 = found.values()
    see = (
        f"Averaged over 8 processes, the rows of a gradient err by {blocks[2]:.1f} % with a scale for 128 elements, "
        f"{tensor[2]:.1f} % with a scale for the tensor and {bf16[2]:.2f} % in BF16; from 2 to 64 processes the error "
        f"with a scale for 128 elements stays between {min(blocks):.1f} and {max(blocks):.1f} %."
    )
    lines = tuple(_line(name, ys, colour) for (name, ys), colour in zip(found.items(), LINES, strict=False))
    alt = (
        f"Error of averaged gradients over the number of processes: about {blocks[2]:.1f} % with block scales, "
        f"{tensor[2]:.1f} % with one scale a tensor, {bf16[2]:.2f} % in BF16."
    )
    panel = Panel("Error of the mean gradient", "% of a row", tuple(math.log2(world) for world in worlds), lines)
    shown = (
        "Lines: each process rounds its gradient, sums are FP32, the mean is rounded once more. Rows differ in size."
    )
    return Picture("numerics_averaging.png", see, shown, Lines("log2 of the number of processes", (panel,), alt))


@cache
def rounding() -> Picture:
    """A weight in FP16 that gets many small updates."""
    steps, update = list(range(0, 1001, 20)), 1e-4
    nearest, random = torch.full((4096,), 1.0).half(), torch.full((4096,), 1.0).half()
    means: tuple[list[float], list[float]] = ([], [])
    for i in range(steps[-1] + 1):
        if i in steps:
            for mean, weights in zip(means, (nearest, random), strict=True):
                mean.append(weights.double().mean().item())
        nearest = (nearest.float() + update).half()
        random = round_stochastic(random.float() + update, torch.float16, salt_of(0, i))
    exact = [1 + update * i for i in steps]
    see = (
        f"A thousand updates of {update:.4f} take an FP16 weight of 1 to {means[0][-1]:.3f} where each is rounded to "
        f"nearest, and to {means[1][-1]:.3f} on average where each is rounded stochastically; the exact result is "
        f"{exact[-1]:.3f}."
    )
    lines = (
        _line("FP32", exact, OTHERS, behind=True),
        _line("FP16, to nearest", means[0], _RED),
        _line("FP16, stochastic_rounding", means[1], _BLUE),
    )
    alt = (
        f"A weight over 1,000 updates: in FP32 and in FP16 with stochastic rounding it rises to {exact[-1]:.1f}, in "
        f"FP16 rounded to nearest it stays at {means[0][-1]:.1f}."
    )
    panel = Panel("Weight", "", tuple(map(float, steps)), lines)
    shown = "Lines: the mean of 4,096 weights without masters, as at ``msamp_o1`` and ``msamp_o2``."
    return Picture("numerics_rounding.png", see, shown, Lines("step", (panel,), alt))


def formats_table() -> str:
    """The formats with their ranges."""
    uses = {
        E4M3: "operands of GEMMs, FP8 gradients, first moments",
        E5M2: 'output gradients (``fp8="hybrid"``)',
        FP16: "second moments, masters of O3",
        E5M3: 'second moments with ``states="fp8+fp8"``; no sign',
        E2M5: "Muon's momentum",
    }
    rows = [
        (fmt.name.upper(), str(8 * torch.empty(0, dtype=fmt.dtype).element_size()), f"{fmt.max:,.6g}",
         f"2\\ :sup:`{math.log2(fmt.smallest):.0f}`", use)
        for fmt, use in uses.items()
    ]  # fmt: skip
    said = f"These {len(rows)} formats are stored with a scale beside them."
    return block(said, rst_table(("Format", "Bits", "Largest", "Smallest", "Used for"), rows))


PICTURES: dict[str, Callable[[], Picture]] = {
    "numerics_formats": formats,
    "numerics_delayed": delayed,
    "numerics_outlier": outlier,
    "numerics_averaging": averaging,
    "numerics_rounding": rounding,
}
