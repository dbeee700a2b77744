"""Chooses the implementations of a row's columns; no other file reads a row's columns.

Each function chooses one column. A combination without an implementation is a ValueError that names the columns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nemo_lowprec.chart import PrecisionLevel
from nemo_lowprec.chart.options import Options
from nemo_lowprec.chart.recipe import Recipe
from nemo_lowprec.column import Column
from nemo_lowprec.comm import Averaging, ShardAveraging, reduce_amax
from nemo_lowprec.compute import AmaxState, Computation, CurrentAmaxes, DelayedAmaxes
from nemo_lowprec.engine.columns import Columns
from nemo_lowprec.grads import Fp8Gradients
from nemo_lowprec.observers import Observers
from nemo_lowprec.optim import LowBitOptimizerStates, MasterStep, OptimizerStates, StateFormats
from nemo_lowprec.tensors.weak_hooks import weakly
from nemo_lowprec.weights import Fp32Weights, FrozenInFp8, LowBitWeights, MasterWeights, ShardedWeights, WeightStore

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_HALVES = ("fp16", "bf16")


@dataclass(frozen=True)
class Sharding:
    """The process groups of a sharded model.

    Attributes:
        world: all processes that train together.
        shards: the processes that hold one copy of the model among them.
        replicas: the processes that hold the same shards; None where there is one copy of the model.
        frees_weights: whether gathered weights are freed between forward and backward.
    """

    world: dist.ProcessGroup | None
    shards: dist.ProcessGroup | None
    replicas: dist.ProcessGroup | None = None
    frees_weights: bool = True


def new_amaxes(recipe: Recipe | None, renews: bool = True) -> AmaxState:
    """The amaxes of a model's FP8 operands: histories with delayed scaling, weight scales with scales per tensor."""
    kinds = {"delayed": DelayedAmaxes, "current": CurrentAmaxes}
    kind = kinds.get(recipe.scaling) if recipe is not None else None
    return AmaxState() if recipe is None or kind is None else kind(recipe, renews)


def check_row(row: PrecisionLevel) -> None:
    """Raise ValueError, naming the columns, where a row has no implementation."""
    row.validate()
    if row.scaling is None and row.compute != row.autocast:
        raise ValueError(
            f"{row.name}: Computation (GEMM) in {row.compute.upper()} with autocast to {row.autocast.upper()} has no "
            "implementation. Half GEMMs run in the autocast's format."
        )
    grads = {"fp32": ("fp32",), "masters": ("fp32", row.rest), "low_bit": ("fp8",)}[_kind_of_weights(row)]
    if row.weight_grad not in grads:
        raise ValueError(
            f"{row.name}: Weight gradient {row.weight_grad.upper()} with Weight {row.weight.upper()} and Master weight "
            f"{(row.master_weight or 'none').upper()} has no implementation. Use {' or '.join(grads).upper()}."
        )
    wires = ("fp8",) if row.weight_grad == "fp8" else ("fp32", *_HALVES)
    if row.comm not in wires:
        raise ValueError(
            f"{row.name}: Comm {row.comm.upper()} with Weight gradient {row.weight_grad.upper()} has no "
            f"implementation. Use {', '.join(wires).upper()}."
        )


def build(
    options: Options, sharding: Sharding | None, amaxes: AmaxState, reads_as: torch.dtype, observers: Observers
) -> Columns:
    """The columns of a row.

    Args:
        options: the row, and its arguments.
        sharding: the process groups of a sharded model; None where each process holds the whole model.
        amaxes: the state from ``new_amaxes``, new or of an earlier conversion of the same model.
        reads_as: dtype that matrices stored in FP16 read as.
        observers: the engine's.

    Raises:
        ValueError: see ``check_row``.
    """
    row, low = options.level, options.low_bit
    check_row(row)
    kind, half = _kind_of_weights(row), DTYPES[row.autocast]
    fp32_wgrad = row.weight_grad == "fp32"
    gathered_as = None
    if sharding is not None:
        gathered_as = {"fp32": torch.float32, "masters": half, "low_bit": torch.float16}[kind]
    computation = Computation(
        options, half, amaxes,
        half_weights=kind != "fp32",
        fp32_wgrad=kind != "fp32" and fp32_wgrad,
        opens_autocast=reads_as != torch.float32,
        gathered_as=gathered_as,
        frees_weights=sharding is not None and sharding.frees_weights,
        observers=observers,
    )  # fmt: skip
    if sharding is not None and kind == "masters" and row.comm == row.rest != row.weight_grad:
        raise ValueError(
            f"{row.name}: Comm {row.comm.upper()} with Weight gradient {row.weight_grad.upper()} has no implementation "
            f"on shards: FSDP2 reduces gradients of {row.rest.upper()} weights as they are stored. Use "
            f"comm={row.weight_grad!r}, or strategy='lowprec_ddp'."
        )
    weights = _weights(options, kind, sharding, computation, amaxes, reads_as, observers)
    states = OptimizerStates()
    if kind == "low_bit" or row.optimizer_states != ("fp32", "fp32"):
        states = LowBitOptimizerStates(state_formats(options), low.gradient_release)
    gradients = _gradients(row, weights, states, observers)
    wire = partial(_wire, row, weights)
    share = partial(amaxes.share, of_weights=sharding is not None)
    comm: Averaging
    if sharding is None or not isinstance(gradients, Fp8Gradients):
        comm = Averaging(wire, share, low.gradient_release, observers)
    else:
        assert isinstance(weights, ShardedWeights)
        comm = ShardAveraging(
            wire, share, sharding.world, sharding.shards, sharding.replicas, weights.gathered_matrices,
            low.gradient_release, observers,
        )  # fmt: skip
    return Columns(computation, weights, gradients, states, comm)


def state_formats(options: Options) -> StateFormats:
    """The formats in which Adam keeps the states of a row."""
    row, low = options.level, options.low_bit
    first, second = row.optimizer_states
    return StateFormats(
        first, second, stochastic_rounding=low.stochastic_rounding, seed=low.rounding_seed,  # type: ignore[arg-type]
        vectors=row.vectors is None,
    )  # fmt: skip


def mixed_precision_policy(row: PrecisionLevel) -> Any:
    """FSDP2's policy: dtypes in which FSDP2 gathers and reduces. Shards of low-bit matrices convert themselves."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    kind = _kind_of_weights(row)
    if kind == "low_bit":
        return MixedPrecisionPolicy(cast_forward_inputs=False)
    reduce_dtype = None if kind == "fp32" and row.comm == "fp32" else DTYPES[row.comm]
    gathered = DTYPES[row.rest] if kind == "masters" else None
    return MixedPrecisionPolicy(gathered, reduce_dtype, cast_forward_inputs=False)


def _kind_of_weights(row: PrecisionLevel) -> str:
    """``fp32``, ``masters`` (half or FP8 weights, FP32 masters) or ``low_bit`` (FP16, or FP8 with FP16 masters)."""
    storage = row.weight, row.master_weight, row.rest, row.vectors
    if storage == ("fp32", None, "fp32", None):
        return "fp32"
    like_autocast = row.vectors is None and row.rest == row.autocast and row.weight in (row.rest, "fp8")
    if row.master_weight == "fp32" and like_autocast:
        return "masters"
    if storage in (("fp16", None, "fp16", "fp32"), ("fp8", "fp16", "fp16", "fp32")):
        return "low_bit"
    master = row.master_weight.upper() if row.master_weight is not None else "no"
    raise ValueError(
        f"{row.name}: Weight {row.weight.upper()} with {master} Master weight (other parameters {row.rest.upper()}, "
        f"vectors {(row.vectors or row.rest).upper()}, autocast {row.autocast.upper()}) has no implementation. There "
        "are FP32 weights; weights in the autocast's format or FP8 with FP32 masters; and FP16 weights, or FP8 ones "
        "with FP16 masters, with FP32 vectors."
    )


def _weights(
    options: Options,
    kind: str,
    sharding: Sharding | None,
    computation: Computation,
    amaxes: AmaxState,
    reads_as: torch.dtype,
    observers: Observers,
) -> WeightStore:
    row, recipe = options.level, options.recipe
    in_fp8 = row.weight == "fp8" or (recipe is not None and recipe.fp8_params)
    names: Callable[[], list[str]] = (lambda: computation.conversion.weights) if in_fp8 else list
    margin = recipe.fp8_margin if recipe is not None else 0
    half = DTYPES[row.autocast]
    whole: WeightStore
    reads_frozen_as = {"low_bit": reads_as, "masters": half, "fp32": None}[kind]
    frozen = FrozenInFp8(computation.frozen_in_fp8, reads_frozen_as, margin, lambda: computation.device)
    if kind == "low_bit":
        whole = LowBitWeights(reads_as, names, margin, frozen)
    elif kind == "masters":
        measures = amaxes.histories is not None
        whole = MasterWeights(
            half, row.weight_grad == "fp32", names, margin, measures, MasterStep(measures).step, frozen
        )
    else:
        whole = Fp32Weights(row.name if row.has_loss_scale else None, frozen)
    if sharding is None:
        return whole
    sharded = ShardedWeights(
        kind == "low_bit",
        reads_as if kind == "low_bit" else half,
        names,
        margin,
        DTYPES[row.weight_grad] if kind == "masters" else None,
        partial(reduce_amax, group=sharding.world, observers=observers),
        amaxes.restart,
        whole.check,
    )
    sharded.when_gathered.append(computation.follow_gathered)
    return sharded


def _gradients(row: PrecisionLevel, weights: WeightStore, states: OptimizerStates, observers: Observers) -> Column:
    if row.weight_grad != "fp8":
        return Column()
    half = DTYPES[row.autocast]
    if isinstance(weights, ShardedWeights):
        gradients = Fp8Gradients(detached=True, observers=observers, half=half)
        weights.when_gathered.append(lambda params: gradients.cover(p for p in params if weights.is_matrix(p)))
        return gradients
    if not isinstance(states, LowBitOptimizerStates) or not states.releases:
        return Fp8Gradients(params=weakly(weights.matrices), observers=observers, half=half)
    return Fp8Gradients(weakly(states.step_at_once), params=weakly(weights.params), observers=observers, half=half)


def _wire(row: PrecisionLevel, weights: WeightStore, param: Tensor) -> torch.dtype:
    """Dtype of the gradient of ``param`` on the wire; ``float8_e4m3fn`` for gradients that are stored in FP8."""
    if weights.is_matrix(param):
        return torch.float8_e4m3fn
    if row.comm in _HALVES and (param.dtype in (torch.float16, torch.bfloat16) or row.rest == "fp32"):
        return DTYPES[row.comm]
    return torch.float64 if param.dtype == torch.float64 else torch.float32
