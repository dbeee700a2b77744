"""The host's side of the fused step: sorts parameters into launches and keeps the tables that the kernels read."""

from __future__ import annotations

from collections import defaultdict
from ctypes import c_float
from typing import Any

import torch
from torch import Tensor

from nemo_lowprec.formats import E4M3, FP16
from nemo_lowprec.formats.block_scale_128 import exponent_rule
from nemo_lowprec.formats.floats import E2M5, E5M3
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


# What the parameters of one launch have in common: the dtypes of ``_STORED`` (the weight's again in the place of what
# is absent), whether each of them is in blocks, and what else ``_kind_and_row`` finds.
_Kind = tuple[Any, ...]
_STORED = ("weight", "grad", "first", "second", "master")


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
            self.coefficients = torch.empty(len(updates), 2, device=device, dtype=torch.float32)
            self.salts, self.amax, self.changed = torch.zeros(3, len(updates), dtype=torch.int32, device=device)
            self.amaxes = self.amax.view(torch.float32).unbind()
            self.index = torch.tensor([u.index for u in updates], dtype=torch.int32).to(device)
            self.made_for = wanted


class FusedStep:
    """Runs the kernels of ``triton_step`` for the parameters of a group."""

    def __init__(self) -> None:
        self._tables: dict[Any, _Tables] = defaultdict(_Tables)

    def step(self, updates: list[Update], inputs: StepInputs) -> None:
        """One step of these parameters, without waiting for the device (but see ``_is_fused``)."""
        launches: dict[_Kind, tuple[list[Update], list[int]]] = defaultdict(lambda: ([], []))
        for update in updates:
            weight = stored_data(update.param)
            if _is_fused(update.param, weight):
                kind, row = _kind_and_row(update, weight)
                members, rows = launches[kind]
                members.append(update)
                rows += row
            else:
                step_by_reference([update], inputs)
        first = updates[0].index
        for kind, (members, rows) in launches.items():
            # A single parameter (gradient release) keeps tables of its own.
            self._launch(self._tables[inputs.rule, kind, first, len(members) == 1], kind, members, rows, inputs)

    def _launch(self, tables: _Tables, kind: _Kind, updates: list[Update], rows: list[int], inputs: StepInputs) -> None:
        from nemo_lowprec.kernels import triton_step as kernels

        group, grad_scale, found_inf = inputs.group, inputs.grad_scale, inputs.found_inf
        one = updates[0]
        device = one.param.device
        dtypes, blocks = (dict(zip(_STORED, found, strict=True)) for found in kind[:2])
        tables.fit(updates, any(blocks.values()), device)
        tiles = tables.tiles
        width = len(kernels.COLUMNS)
        large = (address for column in _LARGE for address in rows[column::width])
        addresses = tables.pointers.upload(rows, len(updates), device, large)
        aligned = tiles.aligned and tables.pointers.aligned
        types = {name.upper(): kernels.TYPES[dtype] for name, dtype in dtypes.items()}
        lr, (beta1, beta2) = group["lr"], inputs.betas
        value = dtypes["master"]
        stochastic = inputs.stochastic and inputs.rule != "momentum" and value in (torch.float16, torch.bfloat16)
        how = {
            "FIRST_HOW": _how(dtypes["first"], stands_still(beta1, dtypes["first"])),
            "SECOND_HOW": _how(dtypes["second"], stands_still(beta2, dtypes["second"]), positive=True),
            "VALUE_HOW": _how(value, stochastic),
        }
        weight_decay = float(group["weight_decay"])
        lr_tensor = lr.to(device=device, dtype=torch.float32) if isinstance(lr, Tensor) else None
        rate = 0.0 if lr_tensor is not None else float(lr)
        measures = _is_measured(one)
        none = tables.coefficients  # passed in the place of an absent tensor, and not read
        with torch.cuda.device(device):
            kernels.prepare_kernel[(len(updates),)](
                addresses, tables.coefficients, tables.salts, tables.amax, tables.index,
                none if found_inf is None else found_inf, mix(inputs.seed),
                *((lr_tensor, 0.0) if lr_tensor is not None else _two_floats(rate)),
                *_two_floats(beta1), *_two_floats(beta2), *_two_floats(float(group.get("rate_factor", 1.0))),
                1 - float(group.get("dampening", 0.0)),
                RULE=inputs.rule, HAS_LR=lr_tensor is not None, HAS_FOUND=found_inf is not None, num_warps=1,
            )  # fmt: skip
            kernels.step_kernel[(tiles.tiles,)](
                tiles.tensor_of, tiles.grid, addresses, tables.coefficients, tables.salts, tables.amax,
                none if found_inf is None else found_inf, none if grad_scale is None else grad_scale,
                none if lr_tensor is None else lr_tensor,
                1 - rate * weight_decay, weight_decay, *_coefficients(inputs),
                RULE=inputs.rule, **types,
                **{f"{name.upper()}_BLOCKED": flag for name, flag in blocks.items()},
                HAS_MASTER=one.master is not None, HAS_FIRST=one.first is not None,
                DECOUPLED=inputs.is_decoupled, DECAYS=weight_decay != 0, MAXIMIZE=inputs.maximizes,
                NESTEROV=bool(group.get("nesterov")),
                HAS_FOUND=found_inf is not None, HAS_SCALE=grad_scale is not None, HAS_LR=lr_tensor is not None,
                **how, FIRST_STREAM=STREAMS["first"], SECOND_STREAM=STREAMS["second"],
                FP8_MAX=E4M3.max, HAS_AMAX=measures, ALIGNED=aligned, BLOCKS=_BLOCKS, num_warps=_WARPS,
                enable_fp_fusion=False,
            )  # fmt: skip
            if measures:
                for update, amax in zip(updates, tables.amaxes, strict=True):
                    update.param.amax_of_step = amax  # type: ignore[attr-defined]
            for update in updates if isinstance(one.param, QuantizedTensor) else ():
                mark_stepped(update.param)
            if isinstance(one.param, Fp8Weight):
                self._fit_scales(tables, addresses, one, found_inf, MASTER=types["MASTER"], ALIGNED=aligned)

    def _fit_scales(
        self, tables: _Tables, addresses: Tensor, one: Update, found_inf: Tensor | None, **options: Any
    ) -> None:
        """Give FP8 weights the scales of their new amaxes; only weights whose scale has changed are written again."""
        from nemo_lowprec.kernels import triton_step as kernels

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


_LARGE = (0, 2, 5, 7, 9)  # columns of elements, which kernels read 16 bytes at a time
_BLOCK_FORMATS = {fmt.dtype: fmt for fmt in (E4M3, E5M3, E2M5, FP16)}


def _how(dtype: torch.dtype, stochastic: bool, positive: bool = False) -> tuple[int, int, int, float, float]:
    """How ``triton_step`` stores a tensor of this dtype."""
    fmt = _BLOCK_FORMATS.get(dtype)
    bits, smallest_normal = rounding_rule(dtype) if stochastic else (0, 0.0)
    smallest = fmt.smallest if fmt is not None and positive else 0.0
    return *(exponent_rule(fmt) if fmt is not None else (0, 0)), bits, smallest_normal, smallest


def _is_measured(update: Update) -> bool:
    """Whether the kernel leaves an amax on the parameter for its FP8 operand; an FP8 weight is scaled in the step."""
    return update.measures or isinstance(update.param, (Fp16Weight, Fp8Gathered))


def _is_fused(param: Tensor, weight: Tensor) -> bool:
    """Whether the kernels can step the parameter. Otherwise the reference does, which waits for the device.

    The parameter's elements must lie in memory in the order of its states' elements (a channels-last weight's do not),
    and an FP8 weight must have power-of-two scales.
    """
    return weight.is_contiguous() and (not isinstance(param, Fp8Weight) or param.power_of_two)


def _kind_and_row(update: Update, weight: Tensor) -> tuple[_Kind, tuple[int, ...]]:
    """A key, and the addresses of ``triton_step.COLUMNS``; parameters with equal keys share a launch.

    The weight's address stands in the place of absent tensors. Called for every parameter at every step: nothing is
    remembered of a tensor, whose storage may be another one at the next step.

    Args:
        weight: the tensor that holds the elements of the parameter.
    """
    param, grad = update.param, update.grad
    dtype, address = weight.dtype, weight.data_ptr()
    weight_blocked, scale, margin = False, address, None
    if isinstance(param, Fp8Weight):
        scale, margin = param.scale_inv.data_ptr(), param.margin
    elif isinstance(param, BlockScaledTensor):
        weight_blocked, scale = True, param.exponent.data_ptr()
    grad_blocked = isinstance(grad, GradientTensor)
    if isinstance(grad, GradientTensor):
        gradient = grad.data_blocks.data_ptr(), grad.exponent.data_ptr(), grad.factor.data_ptr()
    else:
        update.grad = grad = grad.contiguous()  # held there until the kernel is launched
        gradient = grad.data_ptr(), address, address
    first, first_blocked, *first_row = _storage(update.first, dtype, address)
    second, second_blocked, *second_row = _storage(update.second, dtype, address)
    master, master_blocked, *master_row = _storage(update.master, dtype, address)
    shape, in_row = weight.shape, weight.numel()
    if len(shape) > 1 and (weight_blocked or grad_blocked or first_blocked or second_blocked or master_blocked):
        in_row //= shape[0]
    kind = (
        (dtype, E4M3.dtype if grad_blocked else grad.dtype, first, second, master),
        (weight_blocked, grad_blocked, first_blocked, second_blocked, master_blocked),
        update.master is None, update.first is None, margin, _is_measured(update), in_row % 128 == 0,
        weight.get_device(),
    )  # fmt: skip
    return kind, (address, scale, *gradient, *first_row, *second_row, *master_row, update.step.data_ptr())


def _storage(tensor: Tensor | None, dtype: torch.dtype, absent: int) -> tuple[torch.dtype, bool, int, int]:
    """Of a state or master: dtype, whether it is in blocks, and the addresses of its elements and exponents.

    Args:
        dtype, absent: what stands in the place of None.
    """
    if tensor is None:
        return dtype, False, absent, absent
    if isinstance(tensor, BlockScaledTensor):
        data = tensor.data_blocks
        return data.dtype, True, data.data_ptr(), tensor.exponent.data_ptr()
    return tensor.dtype, False, tensor.data_ptr(), absent


def _coefficients(inputs: StepInputs) -> tuple[float, float, float, float]:
    """Of the kernel's arguments: weight of the gradient in the first moment, decay and weight in another, and eps."""
    group, rule = inputs.group, inputs.rule
    if rule == "adam":
        beta1, beta2 = map(float, group["betas"])
        return 1 - beta1, beta2, 1 - beta2, float(group["eps"])
    if rule == "lion":
        beta1, beta2 = map(float, group["betas"])
        return 1 - beta2, 0.0, 1 - beta1, 0.0
    momentum = float(group.get("momentum", 0.0))
    return 1 - momentum, momentum, 0.0, 0.0


def _two_floats(value: float) -> tuple[float, float]:
    """An FP64 number as the sum of two FP32 ones."""
    high = c_float(value).value
    return high, value - high
