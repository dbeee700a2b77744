"""The host's side of the fused step: sorts parameters into launches and keeps the tables that the kernels read."""

from __future__ import annotations

import importlib
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor

from nemo_lowprec.formats import E4M3, FP16
from nemo_lowprec.formats.block_scale_128 import exponent_rule
from nemo_lowprec.formats.stochastic import mix, rounding_rule
from nemo_lowprec.kernels.multi_tensor import PointerTable, TileTable
from nemo_lowprec.optim.reference import STREAMS, StepInputs, Update, step_by_reference
from nemo_lowprec.optim.storage import stands_still
from nemo_lowprec.tensors import (
    BlockScaledTensor,
    Fp8Gathered,
    Fp8Weight,
    Fp16Weight,
    GradientTensor,
    QuantizedTensor,
    stored_data,
)
from nemo_lowprec.tensors.marks import mark_stepped

_BLOCKS, _WARPS = 8, 2


class _Tables:
    """Tensors on the device that the launches for one kind of parameters keep from step to step."""

    made_for: Any = None

    def __init__(self) -> None:
        self.pointers = PointerTable()

    def fit(self, updates: list[Update], blocked: bool, device: torch.device) -> None:
        """Make the tables for these parameters, where the last step had other parameters."""
        wanted = device, [(u.param.shape, u.index) for u in updates]
        if wanted != self.made_for:
            self.made_for = None  # until all tables are there: an allocation may fail
            shapes = [u.param.shape if blocked else torch.Size([u.param.numel()]) for u in updates]
            self.tiles = TileTable(shapes, _BLOCKS, device)
            self.coefficients = torch.empty(len(updates), 2, device=device)
            self.salts, self.amax, self.changed = torch.zeros(3, len(updates), dtype=torch.int32, device=device)
            self.index = torch.tensor([u.index for u in updates], dtype=torch.int32).to(device)
            self.made_for = wanted


class FusedStep:
    """Runs the kernels of ``triton_adam`` for the parameters of a group."""

    def __init__(self) -> None:
        self._tables: dict[Any, _Tables] = defaultdict(_Tables)

    def step(self, updates: list[Update], inputs: StepInputs) -> None:
        """One step of these parameters, without waiting for the device (but see ``_is_fused``)."""
        launches: dict[Any, list[Update]] = defaultdict(list)
        for update in updates:
            if _is_fused(update):
                launches[_kind(update)].append(update)
            else:
                step_by_reference([update], inputs)
        first = updates[0].index
        for kind, members in launches.items():
            # A single parameter (gradient release) keeps tables of its own.
            self._launch(self._tables[kind, first, len(members) == 1], members, inputs)

    def _launch(self, tables: _Tables, updates: list[Update], inputs: StepInputs) -> None:
        group, grad_scale, found_inf = inputs.group, inputs.grad_scale, inputs.found_inf
        kernels = importlib.import_module("nemo_lowprec.kernels.triton_adam")
        one = updates[0]
        device = one.param.device
        blocks = {name: isinstance(getattr(one, name), BlockScaledTensor) for name in ("grad", *_STATES, "master")}
        blocks["weight"] = isinstance(one.param, BlockScaledTensor)
        tables.fit(updates, any(blocks.values()), device)
        tiles = tables.tiles
        rows = [_row(u) for u in updates]
        addresses = tables.pointers.get(rows, device)
        aligned = tiles.aligned and tables.pointers.aligned
        storage = {name: rows[0][kernels.COLUMNS.index(name)].dtype for name in ("weight", "grad", *_STATES, "master")}
        types = {name.upper(): kernels.TYPES[dtype] for name, dtype in storage.items()}
        lr, (beta1, beta2) = group["lr"], (float(b) for b in group["betas"])
        value = storage["master"] if one.master is not None else storage["weight"]
        how = {
            "EXP_AVG_HOW": _how(storage["exp_avg"], stands_still(beta1, storage["exp_avg"])),
            "EXP_AVG_SQ_HOW": _how(storage["exp_avg_sq"], stands_still(beta2, storage["exp_avg_sq"]), positive=True),
            "VALUE_HOW": _how(value, inputs.stochastic and value in (torch.float16, torch.bfloat16)),
        }
        weight_decay = float(group["weight_decay"])
        lr_tensor = lr.to(device=device, dtype=torch.float32) if isinstance(lr, Tensor) else None
        rate = 0.0 if lr_tensor is not None else float(lr)
        measures = _is_measured(one.param)
        none = tables.coefficients  # passed in the place of an absent tensor, and not read
        with torch.cuda.device(device):
            kernels.prepare_kernel[(len(updates),)](
                addresses, tables.coefficients, tables.salts, tables.amax, tables.index,
                none if found_inf is None else found_inf, mix(inputs.seed),
                *((lr_tensor, 0.0) if lr_tensor is not None else _two_floats(rate)),
                *_two_floats(beta1), *_two_floats(beta2),
                HAS_LR=lr_tensor is not None, HAS_FOUND=found_inf is not None, num_warps=1,
            )  # fmt: skip
            kernels.adam_kernel[(tiles.tiles,)](
                tiles.tensor_of, tiles.grid, addresses, tables.coefficients, tables.salts, tables.amax,
                none if found_inf is None else found_inf, none if grad_scale is None else grad_scale,
                none if lr_tensor is None else lr_tensor,
                1 - rate * weight_decay, weight_decay, 1 - beta1, beta2, 1 - beta2, float(group["eps"]),
                **types,
                **{f"{name.upper()}_BLOCKED": flag for name, flag in blocks.items()},
                HAS_MASTER=one.master is not None, DECOUPLED=bool(group["decoupled_weight_decay"]),
                DECAYS=weight_decay != 0, MAXIMIZE=bool(group["maximize"]),
                HAS_FOUND=found_inf is not None, HAS_SCALE=grad_scale is not None, HAS_LR=lr_tensor is not None,
                **how, FIRST_STREAM=STREAMS["exp_avg"], SECOND_STREAM=STREAMS["exp_avg_sq"],
                FP8_MAX=E4M3.max, HAS_AMAX=measures, ALIGNED=aligned, BLOCKS=_BLOCKS, num_warps=_WARPS,
                enable_fp_fusion=False,
            )  # fmt: skip
            if measures:
                for update, amax in zip(updates, tables.amax.view(torch.float32).unbind(), strict=True):
                    update.param.amax_of_step = amax  # type: ignore[attr-defined]
            for update in updates if isinstance(one.param, QuantizedTensor) else ():
                mark_stepped(update.param)
            if isinstance(one.param, Fp8Weight):
                self._fit_scales(tables, addresses, one, found_inf, MASTER=types["MASTER"], ALIGNED=aligned)

    def _fit_scales(
        self, tables: _Tables, addresses: Tensor, one: Update, found_inf: Tensor | None, **options: Any
    ) -> None:
        """Give FP8 weights the scales of their new amaxes; only weights whose scale has changed are written again."""
        kernels = importlib.import_module("nemo_lowprec.kernels.triton_adam")
        tiles, (top, mantissa) = tables.tiles, exponent_rule(E4M3)
        assert isinstance(one.param, Fp8Weight)
        kernels.scale_kernel[(len(tables.amax),)](
            addresses, tables.amax, tables.changed, tables.coefficients if found_inf is None else found_inf,
            one.param.margin, HAS_FOUND=found_inf is not None, TOP=top, MANTISSA=mantissa, num_warps=1,
        )  # fmt: skip
        kernels.weights_kernel[(tiles.tensor_of.numel(),)](
            tiles.tensor_of, tiles.grid, addresses, tables.changed,
            MASTER_BLOCKED=isinstance(one.master, BlockScaledTensor), FP8_MAX=E4M3.max, BLOCKS=_BLOCKS,
            num_warps=_WARPS, enable_fp_fusion=False, **options,
        )  # fmt: skip


_STATES = ("exp_avg", "exp_avg_sq")
_BLOCK_FORMATS = {fmt.dtype: fmt for fmt in (E4M3, FP16)}


def _how(dtype: torch.dtype, stochastic: bool, positive: bool = False) -> tuple[int, int, int, float, float]:
    """How ``triton_adam`` stores a tensor of this dtype."""
    fmt = _BLOCK_FORMATS.get(dtype)
    bits, smallest_normal = rounding_rule(dtype) if stochastic else (0, 0.0)
    smallest = fmt.smallest if fmt is not None and positive else 0.0
    return *(exponent_rule(fmt) if fmt is not None else (0, 0)), bits, smallest_normal, smallest


def _kind(update: Update) -> tuple[Any, ...]:
    """A key; parameters with equal keys share a launch."""
    tensors = (update.grad, update.exp_avg, update.exp_avg_sq, update.master)
    storage = tuple(None if t is None else (isinstance(t, BlockScaledTensor), stored_data(t).dtype) for t in tensors)
    blocked = any(isinstance(t, BlockScaledTensor) for t in (update.param, *tensors))
    shape = update.param.shape
    in_row = shape.numel() // shape[0] if blocked and len(shape) > 1 else shape.numel()
    margin = update.param.margin if isinstance(update.param, Fp8Weight) else None
    weight = isinstance(update.param, BlockScaledTensor), stored_data(update.param).dtype
    return (*storage, *weight, margin, _is_measured(update.param), in_row % 128 == 0, update.param.device)


def _is_measured(param: Tensor) -> bool:
    """Whether the kernel leaves an amax on ``param`` for its FP8 operand; an FP8 weight is scaled in the step."""
    return isinstance(param, Fp16Weight | Fp8Gathered)


def _is_fused(update: Update) -> bool:
    """Whether the kernels can step the parameter. Otherwise the reference does, which waits for the device.

    The parameter's elements must lie in memory in the order of its states' elements (a channels-last weight's do not),
    and an FP8 weight must have power-of-two scales.
    """
    scaled = isinstance(update.param, Fp8Weight)
    return stored_data(update.param).is_contiguous() and (not scaled or update.param.power_of_two)  # type: ignore[attr-defined]


def _row(update: Update) -> list[Tensor]:
    """The tensors of one row of ``triton_adam.COLUMNS``, with the weight in the place of absent ones."""
    weight = stored_data(update.param)
    scale_inv = weight
    if isinstance(update.param, Fp8Weight):
        scale_inv = update.param.scale_inv
    elif isinstance(update.param, BlockScaledTensor):
        scale_inv = update.param.exponent
    grad = update.grad
    if isinstance(grad, GradientTensor):
        gradient: list[Tensor] = [grad.data_blocks, grad.exponent, grad.factor]
    else:
        gradient = [grad.contiguous(), weight, weight]
    row = [weight, scale_inv, *gradient]
    for state in (update.exp_avg, update.exp_avg_sq, update.master):
        if isinstance(state, BlockScaledTensor):
            row += [state.data_blocks, state.exponent]
        else:
            row += [weight if state is None else state, weight]
    return [*row, update.step]


def _two_floats(value: float) -> tuple[float, float]:
    """An FP64 number as the sum of two FP32 ones."""
    high = float(torch.tensor(value, dtype=torch.float32))
    return high, value - high
