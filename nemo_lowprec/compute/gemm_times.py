"""GPU time of a linear layer's GEMMs, forward and backward, in FP8 and in half precision: a roofline with a launch.

A GEMM takes a constant time and the larger one of the times of its FLOP and of its bytes, rounded off where both are
alike. A quantization takes a constant time and the time of its bytes. The constants are fitted to
``python -m benchmarks.gemm_times`` on an H200 and on an H100 (382 sizes from 256 × 256 at 256 rows to 16384 × 16384).
There the ratio of both times is within 4 % of the measured one in half of the sizes, and within 8 % in 90 % of them. Of
the 176 sizes at which FP8 is slower on an H200, 2 are held to be faster, and none of them takes more than 1.02 × BF16's
time; of 187 on an H100 7, and 1.06 ×.

Other GPUs have the H200's constants, scaled by their peak speeds. Recipes with scales for blocks have the GEMM times of
those with one scale for a tensor.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from nemo_lowprec.chart import PrecisionLevel
from nemo_lowprec.chart.recipe import Recipe

# What a quantization costs where the module that computes the values quantizes them, too (``producers.py``): the share
# of a quantization by itself. Of GELU at 12608 x 4096 an H200 takes 0.26 of it forward, 0.43 backward.
OFFERED = 0.35

# Bytes that a quantization moves for an element: it reads a half, or with scales of the tensor at hand two of them, and
# writes both orientations.
_CAST_BYTES = {"delayed": 4.0, "current": 6.0, "rowwise": 6.0}

# Host µs to launch one layer, forward and backward, without a CUDA graph and without ``torch.compile``: in FP8, and as
# ``nn.Linear`` under autocast, which an H200's host launches in 140. By ``python -m benchmarks.host`` FP8 takes 1.48
# (te_fp8) to 1.70 (msamp_o1) times as long.
HOST_FP8, HOST_HALF = 230.0, 140.0


class Stored(NamedTuple):
    """What it takes to read a weight as it is stored.

    Attributes:
        quantize: bytes an element to quantize it, once a step, in one launch for all weights.
        casts: kernels of torch that its GEMMs in half precision need, the cast of the gradient included.
        cast: bytes an element that these kernels move.
        each_call: whether each call needs them, not each step.
    """

    quantize: float
    casts: int
    cast: float
    each_call: bool


# FP32: autocast casts the weight and, back again, its gradient, which the GEMM has written in half precision.
STORED = {
    "half": Stored(4, 0, 0, False),
    "fp32": Stored(6, 2, 10, True),
    "fp16": Stored(4, 1, 4, False),
    "fp8": Stored(2, 3, 19, False),
}


def stored_form(level: PrecisionLevel, recipe: Recipe | None) -> str:
    """How a level stores the weights of whole layers that are trained: a key of ``STORED``."""
    if level.weight == "fp8" or (recipe is not None and recipe.fp8_params):
        return "fp8"
    if level.is_low_bit:
        return "fp16"
    return "half" if level.has_half_weights else "fp32"


_KERNEL = 2.0  # µs of a kernel of torch without work, in a CUDA graph
_ROWS = 16  # FP8 GEMMs take multiples: an input and an output gradient of other rows are copied, and padded


class Call(NamedTuple):
    """One call of a layer [rows, ins] to [rows, outs].

    Attributes:
        name: of the layer.
        rows: product of the input's leading dimensions.
        dgrad, wgrad: whether the input and the weight get gradients.
    """

    name: str
    rows: int
    ins: int
    outs: int
    dgrad: bool
    wgrad: bool

    @property
    def flop(self) -> float:
        """FLOP of one GEMM."""
        return 2.0 * self.rows * self.ins * self.outs


@dataclass(frozen=True)
class Roofline:
    """Speed of the GEMMs in one format.

    Attributes:
        launch: µs of a GEMM without work.
        flop: FLOP/µs of a large GEMM.
        power: the rounding: time = launch + (time of FLOP ** power + time of bytes ** power) ** (1 / power).
    """

    launch: float
    flop: float
    power: float

    def time(self, flop: float, of_bytes: float) -> float:
        """µs of a GEMM of ``flop`` FLOP, whose bytes take ``of_bytes`` µs."""
        return self.launch + ((flop / self.flop) ** self.power + of_bytes**self.power) ** (1 / self.power)


@dataclass(frozen=True)
class GemmTimes:
    """The times of one family of GPUs.

    Attributes:
        family: the GPUs' name.
        fp8, half: speeds of the GEMMs.
        bandwidth: bytes/µs that a GEMM moves.
        cast: (µs, bytes/µs) of a quantization.
        measured: whether the times were measured, and not scaled from another GPU's.
    """

    family: str
    fp8: Roofline
    half: Roofline
    bandwidth: float
    cast: tuple[float, float]
    measured: bool = False

    def scaled(self, family: str, flop: float, bandwidth: float) -> GemmTimes:
        """The times of a GPU with ``flop`` times the FLOP and ``bandwidth`` times the bytes a second."""
        return GemmTimes(
            family,
            replace(self.fp8, flop=self.fp8.flop * flop),
            replace(self.half, flop=self.half.flop * flop),
            self.bandwidth * bandwidth,
            (self.cast[0], self.cast[1] * bandwidth),
        )

    def in_half(self, call: Call) -> float:
        """µs of a call in half precision."""
        return self._gemms(call, (False, False, False))

    def in_fp8(self, call: Call, recipe: Recipe, is_offered: bool = False) -> float:
        """µs of a call with quantization of the output gradient, without that of input and weight.

        ``is_offered``: the module quantizes the gradient that computes it.
        """
        fprop, dgrad, wgrad = recipe.override_linear_precision
        total = self._gemms(call, (not fprop, not dgrad, not wgrad))
        reads = (call.dgrad and not dgrad) or (call.wgrad and not wgrad)
        return total + self._cast(call.rows, call.outs, recipe) * (OFFERED if is_offered else 1.0) if reads else total

    def of_input(self, call: Call, recipe: Recipe, is_offered: bool) -> float:
        """µs to quantize the input. ``is_offered``: the module does it that computes the input."""
        fprop, _, wgrad = recipe.override_linear_precision
        if fprop and (wgrad or not call.wgrad):
            return 0.0
        return self._cast(call.rows, call.ins, recipe) * (OFFERED if is_offered else 1.0)

    def of_weight(self, elements: int, stored: Stored) -> tuple[float, float]:
        """(µs a step to quantize a weight, µs to cast the weight for half precision and its gradient back)."""
        bandwidth = self.cast[1]
        return stored.quantize * elements / bandwidth, stored.casts * _KERNEL + stored.cast * elements / bandwidth

    def _cast(self, rows: int, features: int, recipe: Recipe) -> float:
        launch, bandwidth = self.cast
        time = launch + rows * features * _CAST_BYTES.get(recipe.scaling, 4.0) / bandwidth
        return time + (launch + 4.0 * rows * features / bandwidth if rows % _ROWS else 0.0)

    def _gemms(self, call: Call, fp8: tuple[bool, bool, bool]) -> float:
        x, w, y = call.rows * call.ins, call.ins * call.outs, call.rows * call.outs
        # (operands, bytes of the result) of fprop, dgrad, wgrad; gradients of weights are FP32.
        gemms = ((x + w, 2 * y), (y + w, 2 * x), (x + y, 4 * w))
        total = 0.0
        for wanted, is_fp8, (operands, result) in zip((True, call.dgrad, call.wgrad), fp8, gemms, strict=True):
            if wanted:
                moved = operands * (1 if is_fp8 else 2) + result
                total += (self.fp8 if is_fp8 else self.half).time(call.flop, moved / self.bandwidth)
        return total


_H200 = GemmTimes(
    "H200",
    fp8=Roofline(2.64, 1447e6, 2.375),
    half=Roofline(3.52, 738e6, 3.03),
    bandwidth=2994e3,
    cast=(4.30, 3399e3),
    measured=True,
)
_H100 = GemmTimes(  # SXM
    "H100",
    fp8=Roofline(2.60, 1530e6, 1.685),
    half=Roofline(3.42, 756e6, 2.37),
    bandwidth=2738e3,
    cast=(4.03, 2944e3),
    measured=True,
)

# By a part of the GPU's name; None for no table. "cpu" is the name of a CPU.
FAMILIES: dict[str, GemmTimes | None] = {
    "NVIDIA H200": _H200,
    "NVIDIA H100 80GB HBM3": _H100,
}

# Dense half-precision FLOP of one multiprocessor in a clock, by compute capability, from NVIDIA's architecture papers;
# FP8 has twice as many.
_FLOP = {(8, 9): 1024, (9, 0): 4096, (10, 0): 8192, (10, 3): 8192, (12, 0): 1024, (12, 1): 1024}
_H200_FLOP, _H200_BANDWIDTH = 132 * 4096 * 1.98e6, 4.8e6  # FLOP/ms at the boost clock, bytes/µs


def times_of(device: torch.device) -> GemmTimes | None:
    """The times of ``device``; None where nobody knows them: on a CPU, and on a GPU without FP8."""
    if device.type != "cuda":
        return FAMILIES.get(device.type)
    if not torch.cuda.is_available():
        return None
    name = torch.cuda.get_device_name(device)
    for part, times in FAMILIES.items():
        if part in name:
            return times
    properties = torch.cuda.get_device_properties(device)
    # kHz, kHz and bits; two transfers a clock
    flop = properties.multi_processor_count * _FLOP.get((properties.major, properties.minor), 0) * properties.clock_rate
    bandwidth = 2e-3 * properties.memory_clock_rate * properties.memory_bus_width / 8
    if not flop or not bandwidth:
        return None
    return _H200.scaled(name, flop / _H200_FLOP, bandwidth / _H200_BANDWIDTH)
