"""The precision chart: one row for each level, one column for each decision.

The plugins, the nemo_run factories, the Hydra group, the README's table and ``audit`` are all made from ``CHART``. A
new level is a new row. A level that scales GEMM operands in a new way also needs the numerics of that scaling in
``formats/``.

The first five rows are the chart of MS-AMP's documentation. The other rows are NeMo's mixed-precision recipes, and
torchtitan's rowwise one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

__all__ = ["ALIASES", "CHART", "COLUMNS", "NOT_SERVED", "Alias", "PrecisionLevel", "get_level", "preset_of"]

Compute = Literal["fp16", "bf16", "fp8", "mxfp8", "nvfp4"]
Stored = Literal["fp32", "fp16", "bf16", "fp8"]
Half = Literal["bf16", "fp16"]
Scaling = Literal["delayed", "current", "rowwise", "blockwise", "mxfp8", "nvfp4"]


@dataclass(frozen=True, kw_only=True)
class PrecisionLevel:
    """One row of the chart.

    The columns describe the weights of converted layers. ``rest`` is the format of every other parameter (norms,
    biases, embeddings, the head). Optimizer states and Comm cover all parameters.

    Attributes:
        name: the level's name in Python, in YAML and on the command line.
        summary: one line for the start-up table and ``--help``.
        compute: column Computation (GEMM).
        comm: column Comm, the format of gradients between processes.
        weight: column Weight.
        master_weight: column Master weight; None where the weight is the only copy.
        weight_grad: column Weight gradient, as stored between backward and step.
        optimizer_states: column Optimizer states, (first moment, second moment) of Adam; the first is that of SGD's,
            Lion's and Muon's momentum.
        rest: format of the parameters that are not weights of converted layers.
        vectors: format of parameters of fewer than two dimensions (norms, biases) in every column; None: as ``rest``.
        autocast: half format of the forward pass outside the low-precision GEMMs.
        scaling: how low-precision GEMM operands are scaled; None without low-precision GEMMs.
        fp8_params: whether weights may be stored in FP8 on request (NeMo's ``fp8_params``).
        half: whether the half format may be chosen (``half="fp16"``).
    """

    name: str
    summary: str
    compute: Compute
    comm: Stored
    weight: Stored
    master_weight: Stored | None = None
    weight_grad: Stored
    optimizer_states: tuple[Stored, Stored]
    rest: Stored
    vectors: Stored | None = None
    autocast: Half
    scaling: Scaling | None = None
    fp8_params: bool = False
    half: bool = False

    @property
    def has_fp8(self) -> bool:
        """Whether GEMMs run below 16 bits, so that the FP8 arguments apply."""
        return self.scaling is not None

    @property
    def has_loss_scale(self) -> bool:
        """Whether gradients may overflow FP16, so that the loss is scaled."""
        return self.autocast == "fp16"

    @property
    def has_half_weights(self) -> bool:
        """Whether parameters are stored in less than 32 bits, with FP32 masters or without masters (``is_low_bit``)."""
        return self.rest != "fp32"

    @property
    def is_low_bit(self) -> bool:
        """Whether gradients are stored in FP8 and an optimizer of this package updates the weights in 16 bits."""
        return self.weight_grad == "fp8"

    def validate(self) -> PrecisionLevel:
        """Check the columns of this row one by one, and return the row.

        Raises:
            ValueError: a value that its column does not have; the message names the column.
        """
        fp8 = ("delayed", "current", "rowwise", "blockwise")
        low_precision = {"fp8": fp8, "mxfp8": ("mxfp8",), "nvfp4": ("nvfp4",)}
        stored = get_args(Stored)
        columns: dict[str, tuple[str | None, ...]] = {
            "compute": get_args(Compute),
            **dict.fromkeys(("comm", "weight", "weight_grad", "optimizer_states", "rest"), stored),
            **dict.fromkeys(("master_weight", "vectors"), (None, *stored)),
            "autocast": get_args(Half),
            "scaling": low_precision.get(self.compute, (None,)),
        }
        if len(self.optimizer_states) != 2:
            raise ValueError(f"optimizer_states={self.optimizer_states!r} must be two formats, one for each moment.")
        for column, choices in columns.items():
            value = getattr(self, column)
            for part in value if column == "optimizer_states" else (value,):
                if part not in choices:
                    of = f" with compute={self.compute!r}" if column == "scaling" else ""
                    known = ", ".join(map(str, choices))
                    raise ValueError(f"{column}={value!r} of the row {self.name!r} must be one of: {known}{of}.")
        return self

    @property
    def has_fp8_states(self) -> bool:
        """Whether the first moment is in FP8, so that the second one may be, too."""
        return self.optimizer_states[0] == "fp8"

    def with_states(self, states: str) -> PrecisionLevel:
        """The same row with other optimizer states.

        Args:
            states: the row's own, or ``fp8+fp8``.

        Raises:
            ValueError: another value.
        """
        own = "+".join(self.optimizer_states)
        if states not in (own, "fp8+fp8"):
            raise ValueError(f"states={states!r} must be {own!r} or 'fp8+fp8'.")
        return self if states == own else replace(self, optimizer_states=("fp8", "fp8"))

    def with_half(self, half: str) -> PrecisionLevel:
        """The same row with ``half`` as the format outside the low-precision GEMMs.

        Raises:
            ValueError: ``half`` is neither bf16 nor fp16.
        """
        if half not in ("bf16", "fp16"):
            raise ValueError(f"half={half!r} must be 'bf16' or 'fp16'.")
        return self if half == self.autocast else replace(self, autocast=half)  # type: ignore[arg-type]

    def columns(self, fp8_params: bool | None = None) -> dict[str, str]:
        """The cells of the row by the titles of their columns.

        Args:
            fp8_params: the choice of a run; None: the cell names both.
        """
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


# A row that resembles another one is that row with the columns in which the two differ.
# fmt: off
_FP16_AMP = PrecisionLevel(
    name="fp16_amp", summary="FP16 automatic mixed precision: FP32 weights, FP16 GEMMs, loss scaling",
    compute="fp16", comm="fp32", weight="fp32", weight_grad="fp32", optimizer_states=("fp32", "fp32"),
    rest="fp32", autocast="fp16",
)
_TE_FP8 = replace(
    _FP16_AMP, name="te_fp8", summary="Transformer Engine: FP32 weights, FP8 GEMMs with delayed scaling",
    compute="fp8", scaling="delayed", autocast="bf16",
)
_MSAMP_O1 = PrecisionLevel(
    name="msamp_o1", summary="MS-AMP O1: FP16 weights, FP8 gradients and communication",
    compute="fp8", comm="fp8", weight="fp16", weight_grad="fp8", optimizer_states=("fp32", "fp32"),
    rest="fp16", vectors="fp32", autocast="bf16", scaling="delayed", half=True,
)
_MSAMP_O2 = replace(
    _MSAMP_O1, name="msamp_o2", summary="MS-AMP O2: O1 with FP8 and FP16 optimizer states",
    optimizer_states=("fp8", "fp16"),
)
_MSAMP_O3 = replace(
    _MSAMP_O2, name="msamp_o3", summary="MS-AMP O3: O2 with FP8 weights and FP16 masters",
    weight="fp8", master_weight="fp16",
)
_FP16_MIXED = PrecisionLevel(
    name="fp16_mixed", summary="NeMo FP16 mixed: FP16 weights and gradients, FP32 masters, loss scaling",
    compute="fp16", comm="fp16", weight="fp16", master_weight="fp32", weight_grad="fp16",
    optimizer_states=("fp32", "fp32"), rest="fp16", autocast="fp16",
)
_BF16_MIXED = PrecisionLevel(
    name="bf16_mixed", summary="NeMo BF16 mixed: BF16 weights, FP32 masters and gradients",
    compute="bf16", comm="fp32", weight="bf16", master_weight="fp32", weight_grad="fp32",
    optimizer_states=("fp32", "fp32"), rest="bf16", autocast="bf16",
)
_BF16_WITH_FP8_MIXED = replace(
    _BF16_MIXED, name="bf16_with_fp8_mixed", summary="NeMo BF16 mixed with FP8 GEMMs, delayed scaling",
    compute="fp8", scaling="delayed", fp8_params=True,
)
_FP16_WITH_FP8_MIXED = replace(
    _FP16_MIXED, name="fp16_with_fp8_mixed", summary="NeMo FP16 mixed with FP8 GEMMs, delayed scaling",
    compute="fp8", scaling="delayed", fp8_params=True,
)
_CURRENT_SCALING = replace(
    _BF16_WITH_FP8_MIXED, name="bf16_with_fp8_current_scaling_mixed",
    summary="BF16 mixed with FP8 GEMMs, per-tensor current scaling", scaling="current",
)
_ROWWISE_SCALING = replace(
    _BF16_MIXED, name="bf16_with_fp8_rowwise_mixed",
    summary="BF16 mixed with FP8 GEMMs, a scale per row (torchtitan's recipe)", compute="fp8", scaling="rowwise",
)
_SUBCHANNEL_SCALING = replace(
    _BF16_MIXED, name="bf16_with_fp8_subchannel_scaling_mixed",
    summary="BF16 mixed with FP8 GEMMs, scales per 1x128 and 128x128 block", compute="fp8", scaling="blockwise",
)
_MXFP8 = replace(
    _BF16_MIXED, name="bf16_with_mxfp8_mixed", summary="BF16 mixed with MXFP8 GEMMs (Blackwell)",
    compute="mxfp8", scaling="mxfp8",
)
_NVFP4 = replace(
    _BF16_MIXED, name="bf16_with_nvfp4_mixed", summary="BF16 mixed with NVFP4 GEMMs (Blackwell)",
    compute="nvfp4", scaling="nvfp4",
)
_ROWS = (
    _FP16_AMP, _TE_FP8, _MSAMP_O1, _MSAMP_O2, _MSAMP_O3, _FP16_MIXED, _BF16_MIXED, _BF16_WITH_FP8_MIXED,
    _FP16_WITH_FP8_MIXED, _CURRENT_SCALING, _ROWWISE_SCALING, _SUBCHANNEL_SCALING, _MXFP8, _NVFP4,
)
# fmt: on

CHART: dict[str, PrecisionLevel] = {row.name: row for row in _ROWS}
COLUMNS: tuple[str, ...] = tuple(_ROWS[0].columns())


@dataclass(frozen=True)
class Alias:
    """A further name of a level.

    Attributes:
        level: the name in the chart.
        options: the arguments that the name stands for; a caller's argument of the same name counts instead.
    """

    level: str
    options: Mapping[str, Any]


# Megatron-Bridge's names of mixed-precision recipes that are none of the chart's. (A name of the chart is its level,
# whose defaults may differ from the recipe's.) The recipes' ``fp8_param_gather`` is ``fp8_params`` here; ``tensorwise``
# is current scaling, and ``blockwise`` subchannel scaling.
# Source: NVIDIA-NeMo/Megatron-Bridge, src/megatron/bridge/training/mixed_precision.py of August 2026.
_TWO_AND_TWO = {"num_layers_at_start_in_half": 2, "num_layers_at_end_in_half": 2}

ALIASES: dict[str, Alias] = {
    "bf16_with_fp8_delayed_scaling_mixed": Alias("bf16_with_fp8_mixed", {"fp8_params": True}),
    "fp16_with_fp8_delayed_scaling_mixed": Alias("fp16_with_fp8_mixed", {"fp8_params": True}),
    "nemotron_h_bf16_with_fp8_current_scaling_mixed": Alias(
        "bf16_with_fp8_current_scaling_mixed", {"fp8_params": True, **_TWO_AND_TWO}
    ),
    # The recipe has blockwise scaling, whatever its name says. Its FP8 weights have no counterpart at this level.
    "nanov2_bf16_with_fp8_current_scaling_mixed": Alias(
        "bf16_with_fp8_subchannel_scaling_mixed", {"fp8": "hybrid", **_TWO_AND_TWO}
    ),
    # The recipe's NVFP4 weights have no counterpart.
    "nemotron_3_super_bf16_with_nvfp4_mixed": Alias("bf16_with_nvfp4_mixed", {"num_layers_at_end_in_half": 14}),
}

# Recipes without a level, and the level that comes nearest.
NOT_SERVED: dict[str, str] = {
    "fp16_with_fp8_current_scaling_mixed": "bf16_with_fp8_current_scaling_mixed",
    "fp16_with_fp8_subchannel_scaling_mixed": "bf16_with_fp8_subchannel_scaling_mixed",
    "fp16_with_mxfp8_mixed": "bf16_with_mxfp8_mixed",
}


def get_level(name: str | PrecisionLevel) -> PrecisionLevel:
    """Return the row of a level, or of an alias; a row of the caller's own is checked and returned.

    ``preset_of`` has the arguments that an alias stands for.

    Raises:
        ValueError: no row has the name; or a column of the row has a value that it does not take.
    """
    if isinstance(name, PrecisionLevel):
        return name.validate()
    if isinstance(name, str) and name in NOT_SERVED:
        raise ValueError(
            f"{name}, a recipe of Megatron-Bridge, has no level here: its scaling comes with BF16 only. The nearest "
            f"level is {NOT_SERVED[name]}."
        )
    if isinstance(name, str) and name in ALIASES:
        name = ALIASES[name].level
    if not isinstance(name, str) or name not in CHART:
        raise ValueError(f"Unknown precision level {name!r}. Choose one of: {', '.join(CHART)}.")
    return CHART[name]


def preset_of(level: object) -> dict[str, Any]:
    """The arguments that a level's name stands for: an alias' own; empty for a name of the chart or a row."""
    return dict(ALIASES[level].options) if isinstance(level, str) and level in ALIASES else {}
