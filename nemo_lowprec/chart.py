"""The precision chart: one row a level, one column a decision.

Every face of the project (plugins, nemo_run factories, the Hydra group, the README's table, ``audit``) is read
from ``CHART``. To add a level, add a row here; a recipe of scaling that no row has yet also needs its numerics in
``formats/``.

The first five rows are the chart of MS-AMP's documentation, the others NeMo's mixed-precision recipes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

__all__ = ["CHART", "COLUMNS", "PrecisionLevel", "get_level"]

Format = Literal["fp32", "fp16", "bf16", "fp8", "mxfp8", "nvfp4"]
Scaling = Literal["delayed", "current", "blockwise", "mxfp8", "nvfp4"]


@dataclass(frozen=True)
class PrecisionLevel:
    """One row of the chart.

    The columns hold for the weights of converted layers; ``rest`` is the format of every other parameter (norms,
    biases, embeddings, the head). Optimizer states and communication cover all parameters.

    Attributes:
        name: the level's name on every face.
        compute: column Computation (GEMM).
        comm: column Comm, the format of gradients on the wire.
        weight: column Weight.
        master_weight: column Master weight; None where the weight is the only copy.
        weight_grad: column Weight gradient, as stored between backward and step.
        optimizer_states: column Optimizer states, (first moment, second moment) of Adam.
        rest: format of the parameters that are not weights of converted layers.
        vectors: format of parameters of fewer than two dimensions (norms, biases) in every column; None: as ``rest``.
        autocast: half format of the forward pass outside the low-precision GEMMs.
        scaling: how low-precision GEMM operands are scaled; None without low-precision GEMMs.
        fp8_params: whether weights may be stored in FP8 on request (NeMo's ``fp8_params``).
        summary: one line for the start-up table and ``--help``.
        half: whether the half format may be chosen (``half="fp16"``).
    """

    name: str
    compute: Format
    comm: Format
    weight: Format
    master_weight: Format | None
    weight_grad: Format
    optimizer_states: tuple[Format, Format]
    rest: Format
    autocast: Literal["bf16", "fp16"]
    summary: str
    scaling: Scaling | None = None
    fp8_params: bool = False
    half: bool = False
    vectors: Format | None = None

    @property
    def has_fp8(self) -> bool:
        """Whether GEMMs run below 16 bits, so that the FP8 arguments apply."""
        return self.scaling is not None

    @property
    def has_loss_scale(self) -> bool:
        """Whether gradients may leave FP16's range, so that the loss is scaled."""
        return self.autocast == "fp16"

    @property
    def has_half_weights(self) -> bool:
        """Whether parameters are stored below FP32: as half copies of FP32 masters, or without (``is_low_bit``)."""
        return self.rest != "fp32"

    @property
    def is_low_bit(self) -> bool:
        """Whether weights take their updates in 16 bits, with FP8 gradients and an optimizer of this package."""
        return self.weight_grad == "fp8"

    def with_half(self, half: str) -> PrecisionLevel:
        """The row with another half format outside the low-precision GEMMs.

        Raises:
            ValueError: ``half`` is neither bf16 nor fp16.
        """
        if half not in ("bf16", "fp16"):
            raise ValueError(f"half={half!r} must be 'bf16' or 'fp16'.")
        return self if half == self.autocast else replace(self, autocast=half)  # type: ignore[arg-type]

    def columns(self, fp8_params: bool | None = None) -> dict[str, str]:
        """The row as the chart prints it: column title to cell; for one choice of ``fp8_params`` where it is given."""
        weight = self.weight.upper()
        if self.fp8_params and fp8_params is not False:
            weight = "FP8" if fp8_params else f"{weight}, FP8 with fp8_params"
        return {
            "Level": self.name,
            "Computation (GEMM)": self.compute.upper(),
            "Comm": self.comm.upper(),
            "Weight": weight,
            "Master weight": self.master_weight.upper() if self.master_weight else "–",
            "Weight gradient": self.weight_grad.upper(),
            "Optimizer states": "+".join(s.upper() for s in self.optimizer_states),
        }


def _mixed_bf16(name: str, compute: Format, scaling: Scaling | None, summary: str, fp8_params: bool = False):
    return PrecisionLevel(
        name, compute, "fp32", "bf16", "fp32", "fp32", ("fp32", "fp32"), "bf16", "bf16", summary, scaling, fp8_params
    )


def _msamp(name: str, weight: Format, master: Format | None, states: tuple[Format, Format], summary: str):
    return PrecisionLevel(
        name, "fp8", "fp8", weight, master, "fp8", states, "fp16", "bf16", summary, "delayed", half=True, vectors="fp32"
    )


_ROWS = (
    PrecisionLevel(
        "fp16_amp", "fp16", "fp32", "fp32", None, "fp32", ("fp32", "fp32"), "fp32", "fp16",
        "FP16 automatic mixed precision: FP32 weights, FP16 GEMMs, loss scaling",
    ),
    PrecisionLevel(
        "te_fp8", "fp8", "fp32", "fp32", None, "fp32", ("fp32", "fp32"), "fp32", "bf16",
        "Transformer Engine: FP32 weights, FP8 GEMMs with delayed scaling", "delayed",
    ),
    _msamp("msamp_o1", "fp16", None, ("fp32", "fp32"), "MS-AMP O1: FP16 weights, FP8 gradients and communication"),
    _msamp("msamp_o2", "fp16", None, ("fp8", "fp16"), "MS-AMP O2: O1 with FP8 and FP16 optimizer states"),
    _msamp("msamp_o3", "fp8", "fp16", ("fp8", "fp16"), "MS-AMP O3: O2 with FP8 weights and FP16 masters"),
    PrecisionLevel(
        "fp16_mixed", "fp16", "fp16", "fp16", "fp32", "fp16", ("fp32", "fp32"), "fp16", "fp16",
        "NeMo FP16 mixed: FP16 weights and gradients, FP32 masters, loss scaling",
    ),
    _mixed_bf16("bf16_mixed", "bf16", None, "NeMo BF16 mixed: BF16 weights, FP32 masters and gradients"),
    _mixed_bf16(
        "bf16_with_fp8_mixed", "fp8", "delayed",
        "NeMo BF16 mixed with FP8 GEMMs, delayed scaling", fp8_params=True,
    ),
    PrecisionLevel(
        "fp16_with_fp8_mixed", "fp8", "fp16", "fp16", "fp32", "fp16", ("fp32", "fp32"), "fp16", "fp16",
        "NeMo FP16 mixed with FP8 GEMMs, delayed scaling", "delayed", fp8_params=True,
    ),
    _mixed_bf16(
        "bf16_with_fp8_current_scaling_mixed", "fp8", "current",
        "BF16 mixed with FP8 GEMMs, per-tensor current scaling", fp8_params=True,
    ),
    _mixed_bf16(
        "bf16_with_fp8_subchannel_scaling_mixed", "fp8", "blockwise",
        "BF16 mixed with FP8 GEMMs, scales per 1x128 and 128x128 block",
    ),
    _mixed_bf16("bf16_with_mxfp8_mixed", "mxfp8", "mxfp8", "BF16 mixed with MXFP8 GEMMs (Blackwell)"),
    _mixed_bf16("bf16_with_nvfp4_mixed", "nvfp4", "nvfp4", "BF16 mixed with NVFP4 GEMMs (Blackwell)"),
)  # fmt: skip

CHART: dict[str, PrecisionLevel] = {row.name: row for row in _ROWS}
COLUMNS: tuple[str, ...] = tuple(_ROWS[0].columns())


def get_level(name: str) -> PrecisionLevel:
    """Return a row that can be trained with.

    Raises:
        ValueError: the name is no row of the chart.
    """
    if not isinstance(name, str) or name not in CHART:
        raise ValueError(f"Unknown precision level {name!r}. Choose one of: {', '.join(CHART)}.")
    return CHART[name]
