"""The fused step of an optimizer: one pass over all parameters of a group, in a handful of launches.

States are bit for bit those of ``optim.reference``, since the compiler may not fuse multiplications and additions.
Weights are, too, except for one unit in the last place where ``_quotient`` is off, and outside the range of
``_square_root``. Importing this file needs Triton.

A row of the table of addresses is a parameter: see ``COLUMNS``. A tuple ``HOW`` tells how a tensor is stored: the two
numbers of ``exponent_rule``, the two of ``rounding_rule`` (bits are 0 for rounding to nearest), and the smallest number
that may stand in a block with a positive value, or 0. ``RULE`` is a rule of the reference.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice

from nemo_lowprec.kernels.triton_blocks import (
    GROUP,
    block_amax,
    decoded,
    exponents_of,
    keep_positive,
    power_of_two,
    to_stored,
)
from nemo_lowprec.kernels.triton_cast import TYPES, raise_amax, saturate
from nemo_lowprec.kernels.triton_stochastic import mix, round_stochastic

__all__ = ["COLUMNS", "TYPES", "prepare_kernel", "scale_kernel", "step_kernel", "weights_kernel"]

COLUMNS = (
    "weight", "weight_scale_inv", "grad", "grad_exponent", "grad_factor", "first", "first_exponent", "second",
    "second_exponent", "master", "master_exponent", "step",
)  # fmt: skip
_WIDTH = tl.constexpr(len(COLUMNS))


@triton.jit
def _address(row, COLUMN: tl.constexpr, dtype: tl.constexpr, ALIGNMENT: tl.constexpr):
    # The hint must be here: the caller's hint on the result of a call is lost when the call is inlined.
    return tl.multiple_of(tl.load(row + COLUMN).to(tl.pointer_type(dtype)), ALIGNMENT)


@triton.jit
def _place(row, COLUMN: tl.constexpr, dtype: tl.constexpr, BLOCKED: tl.constexpr, ALIGNED: tl.constexpr, first, base):
    """Pointers to a tile's first element and first exponent."""
    size: tl.constexpr = dtype.primitive_bitwidth // 8
    elements = _address(row, COLUMN, dtype, 16 if ALIGNED else size) + base
    if BLOCKED:
        return elements, _address(row, COLUMN + 1, tl.uint8, 1) + first
    else:
        return elements, elements


@triton.jit
def _square_root(x):
    """Rounded to nearest for zero and from 2**-100 on, without branches; NaN for infinity."""
    # The smallest normal number keeps the inverse of zero finite.
    inverse = tl.inline_asm_elementwise(
        "rsqrt.approx.ftz.f32 $0, $1;", "=f,f", [x + 1.1754943508222875e-38], tl.float32, is_pure=True, pack=1
    )
    root = x * inverse
    return tl.fma(tl.fma(root * -1.0, root, x), inverse * 0.5, root)


@triton.jit
def _quotient(x, y):
    """x / y without branches, for y from 2**-126 to 2**126: off by one unit in the last place once in a million."""
    inverse = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [y], tl.float32, is_pure=True, pack=1)
    quotient = x * inverse
    return tl.fma(tl.fma(y * -1.0, quotient, x), inverse, quotient)


@triton.jit(do_not_specialize=["seed"])
def prepare_kernel(
    address_ptr, coefficient_ptr, salt_ptr, amax_ptr, index_ptr, found_inf_ptr, seed, lr, lr_low, beta1, beta1_low,
    beta2, beta2_low, factor, factor_low, undamped, RULE: tl.constexpr, HAS_LR: tl.constexpr, HAS_FOUND: tl.constexpr,
):  # fmt: skip
    """Count the step of one parameter; compute its two coefficients (in FP64) and its random stream."""
    tensor = tl.program_id(0)
    step_ptr = _address(address_ptr + tensor * _WIDTH, 11, tl.float32, 4)
    step = tl.load(step_ptr)
    live = 1.0
    if HAS_FOUND:
        live = tl.where(tl.load(found_inf_ptr) == 0.0, 1.0, 0.0)
    if RULE != "momentum":
        tl.store(step_ptr, step + live)
    tl.store(amax_ptr + tensor, 0)
    step = (step + 1.0).to(tl.float64)
    # A float argument is FP32: two of them carry the FP64 value.
    first = beta1.to(tl.float64) + beta1_low.to(tl.float64)
    second = beta2.to(tl.float64) + beta2_low.to(tl.float64)
    if HAS_LR:
        rate = tl.load(lr).to(tl.float64)
    else:
        rate = lr.to(tl.float64) + lr_low.to(tl.float64)
    one = tl.full((), 1.0, tl.float64)
    if RULE == "adam":
        tl.store(coefficient_ptr + tensor * 2, (rate / (one - libdevice.pow(first, step))).to(tl.float32))
        correction = one / tl.sqrt(one - libdevice.pow(second, step))
        tl.store(coefficient_ptr + tensor * 2 + 1, correction.to(tl.float32))
    else:
        rate = rate * (factor.to(tl.float64) + factor_low.to(tl.float64))
        tl.store(coefficient_ptr + tensor * 2, rate.to(tl.float32))
        tl.store(coefficient_ptr + tensor * 2 + 1, tl.where(step == one, 1.0, undamped))  # SGD's dampening
    salt = mix(mix(seed.to(tl.uint32) ^ step.to(tl.uint32)) ^ tl.load(index_ptr + tensor).to(tl.uint32))
    tl.store(salt_ptr + tensor, salt.to(tl.int32, bitcast=True))


@triton.jit
def _tile(tile, tensor_of_ptr, grid_ptr, ALIGNED: tl.constexpr, BLOCKS: tl.constexpr):
    """The tensor of a tile, the tile's blocks there, the offsets of their elements, and which of both are inside."""
    tensor = tl.load(tensor_of_ptr + tile // GROUP)
    grid = grid_ptr + tensor * 4
    cols, per_row, total = tl.load(grid + 1), tl.load(grid + 2), tl.load(grid + 3)
    first = (tile - tl.load(grid)) * BLOCKS
    block = tl.arange(0, BLOCKS)
    lane = tl.arange(0, 128)
    live = block < tl.minimum(total - first, BLOCKS).to(tl.int32)
    inside = live[:, None] & (lane >= 0)[None, :]
    if ALIGNED:
        base = first * 128
        offset = block[:, None] * 128 + lane[None, :]
    else:
        base = tl.zeros((), tl.int64)
        col = ((first + block) % per_row)[:, None] * 128 + lane[None, :]
        inside = inside & (col < cols)
        offset = ((first + block) // per_row)[:, None] * cols + col
    return tensor, first, block, live, base, offset, inside


@triton.jit
def _read(place, BLOCKED: tl.constexpr, factor, block, live, offset, inside):
    """FP32 values of a tile; a BLOCKED tile's values times ``factor``."""
    x = decoded(place[0], offset, inside)
    if BLOCKED:
        exponent = tl.load(place[1] + block, mask=live, other=127).to(tl.int32)
        x = x * (power_of_two(exponent) * factor)[:, None]  # as x * 2**e * factor, since 2**e rounds nothing
    return x


@triton.jit
def _store(place, BLOCKED: tl.constexpr, HOW: tl.constexpr, x, index, salt, block, live, offset, inside):
    """Store a tile in the form HOW of this module's docstring; returns the stored values, but of E5M3 and E2M5."""
    dtype: tl.constexpr = place[0].dtype.element_ty
    TOP: tl.constexpr = HOW[0]
    MANTISSA: tl.constexpr = HOW[1]
    ROUND_BITS: tl.constexpr = HOW[2]
    ROUND_SMALLEST: tl.constexpr = HOW[3]
    SMALLEST: tl.constexpr = HOW[4]
    if BLOCKED:
        amax = block_amax(x)
        exponent = exponents_of(amax, TOP, MANTISSA)
        tl.store(place[1] + block, exponent.to(tl.uint8), mask=live)
        scaled = to_stored(x, exponent, tl.float32)
        if SMALLEST > 0:
            scaled = keep_positive(scaled, amax, SMALLEST)
    else:
        scaled = x
    if ROUND_BITS > 0:
        scaled = round_stochastic(scaled, index, salt, ROUND_BITS, ROUND_SMALLEST)
    if tl.uint8 == dtype:
        bits = scaled.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32)
        bits = (bits + 0x3F + ((bits >> 7) & 1)) >> 7
        tl.store(place[0] + offset, tl.where(scaled == scaled, bits, 0xFC).to(tl.uint8), mask=inside)
        values = scaled
    elif tl.int8 == dtype:
        small = tl.abs(scaled) < 1.0
        bits = (tl.abs(scaled) + tl.where(small, 1.0, 0.0)).to(tl.int32, bitcast=True)
        size = ((bits + 0x1FFFF + ((bits >> 18) & 1)) >> 18) - 4064 + tl.where(small, 0, 32)
        code = tl.where(scaled < 0.0, -size, size)
        tl.store(place[0] + offset, tl.where(scaled == scaled, code, -128).to(tl.int8), mask=inside)
        values = scaled
    else:
        stored = scaled.to(dtype)
        tl.store(place[0] + offset, stored, mask=inside)
        values = stored.to(tl.float32)
    if BLOCKED:
        values = values * power_of_two(exponent)[:, None]
    return values


@triton.jit
def _inverse(power):
    """1 / ``power`` of a power of two."""
    return (0x7F000000 - power.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)


@triton.jit
def step_kernel(
    tensor_of_ptr, grid_ptr, address_ptr, coefficient_ptr, salt_ptr, amax_ptr, found_inf_ptr, grad_scale_ptr, lr_ptr,
    decay, weight_decay, one_minus_beta1, beta2, one_minus_beta2, eps,
    RULE: tl.constexpr, WEIGHT: tl.constexpr, GRAD: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr,
    MASTER: tl.constexpr, WEIGHT_BLOCKED: tl.constexpr, GRAD_BLOCKED: tl.constexpr, FIRST_BLOCKED: tl.constexpr,
    SECOND_BLOCKED: tl.constexpr, MASTER_BLOCKED: tl.constexpr, HAS_MASTER: tl.constexpr, HAS_FIRST: tl.constexpr,
    DECOUPLED: tl.constexpr, DECAYS: tl.constexpr, MAXIMIZE: tl.constexpr, NESTEROV: tl.constexpr,
    HAS_FOUND: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_LR: tl.constexpr,
    FIRST_HOW: tl.constexpr, SECOND_HOW: tl.constexpr, VALUE_HOW: tl.constexpr, FIRST_STREAM: tl.constexpr,
    SECOND_STREAM: tl.constexpr, FP8_MAX: tl.constexpr, HAS_AMAX: tl.constexpr, ALIGNED: tl.constexpr,
    BLOCKS: tl.constexpr,
):  # fmt: skip
    """Unscale, decay, update and store a tile of one parameter and its states."""
    tensor, first, block, live, base, offset, inside = _tile(tl.program_id(0), tensor_of_ptr, grid_ptr, ALIGNED, BLOCKS)
    row = address_ptr + tensor * _WIDTH
    all_blocks, everywhere = live, inside
    if HAS_FOUND:
        goes = tl.load(found_inf_ptr) == 0.0
        live, inside = live & goes, inside & goes

    grad_at = _place(row, 2, GRAD, GRAD_BLOCKED, ALIGNED, first, base)
    if HAS_FIRST:
        moment_at = _place(row, 5, FIRST, FIRST_BLOCKED, ALIGNED, first, base)
    if RULE == "adam":
        second_at = _place(row, 7, SECOND, SECOND_BLOCKED, ALIGNED, first, base)
    weight_at = _place(row, 0, WEIGHT, WEIGHT_BLOCKED, ALIGNED, first, base)
    factor = 1.0
    if GRAD_BLOCKED:
        factor = tl.load(_address(row, 4, tl.float32, 4))
    grad = _read(grad_at, GRAD_BLOCKED, factor, block, live, offset, inside)
    if HAS_FIRST:
        moment = _read(moment_at, FIRST_BLOCKED, 1.0, block, live, offset, inside)
    if RULE == "adam":
        second = _read(second_at, SECOND_BLOCKED, 1.0, block, live, offset, inside)
    if HAS_MASTER:
        master_at = _place(row, 9, MASTER, MASTER_BLOCKED, ALIGNED, first, base)
        value = _read(master_at, MASTER_BLOCKED, 1.0, block, all_blocks, offset, everywhere)
    elif RULE == "momentum":
        value = grad
    else:
        value = _read(weight_at, WEIGHT_BLOCKED, 1.0, block, all_blocks, offset, everywhere)
    before = value

    if HAS_SCALE:
        grad = grad * tl.div_rn(tl.full((), 1.0, tl.float32), tl.load(grad_scale_ptr))
    if MAXIMIZE:
        grad = grad * -1.0  # Triton's minus is 0 - grad, which has no negative zeros
    if DECOUPLED:
        if HAS_LR:
            one = tl.full((), 1.0, tl.float64)
            decay = (one - tl.load(lr_ptr).to(tl.float64) * weight_decay.to(tl.float64)).to(tl.float32)
        value = value * decay
    elif DECAYS:
        grad = grad + value * weight_decay
    step_size = tl.load(coefficient_ptr + tensor * 2)
    if RULE == "adam":
        moment = moment + (grad - moment) * one_minus_beta1
        second = second * beta2 + (grad * grad) * one_minus_beta2
        denominator = _square_root(second) * tl.load(coefficient_ptr + tensor * 2 + 1) + eps
        value = value - _quotient(moment, denominator) * step_size
    elif RULE == "lion":
        between = moment + (grad - moment) * one_minus_beta2
        between = tl.where(between == 0.0, 0.0, between)
        value = value - tl.where(between > 0.0, 1.0, tl.where(between < 0.0, -1.0, between)) * step_size
        moment = moment + (grad - moment) * one_minus_beta1
    elif RULE == "momentum":
        moment = moment + (grad - moment) * one_minus_beta1
        value = moment
        if NESTEROV:
            value = moment + (grad - moment) * one_minus_beta1
    else:
        if HAS_FIRST:
            moment = moment * beta2 + grad * tl.load(coefficient_ptr + tensor * 2 + 1)
            if NESTEROV:
                grad = grad + moment * beta2
            else:
                grad = moment
        value = value - grad * step_size

    index = base.to(tl.uint32) + offset.to(tl.uint32)
    salt = tl.load(salt_ptr + tensor).to(tl.uint32, bitcast=True)
    if HAS_FIRST:
        stream = mix(salt ^ FIRST_STREAM)
        _store(moment_at, FIRST_BLOCKED, FIRST_HOW, moment, index, stream, block, live, offset, inside)
    if RULE == "adam":
        stream = mix(salt ^ SECOND_STREAM)
        _store(second_at, SECOND_BLOCKED, SECOND_HOW, second, index, stream, block, live, offset, inside)
    if HAS_MASTER:
        value = _store(master_at, MASTER_BLOCKED, VALUE_HOW, value, index, salt, block, live, offset, inside)
        if tl.float8e4nv == WEIGHT:
            # With the weight's present scale. Where its new amax gives another scale, weights_kernel writes it again.
            scale = _inverse(tl.load(_address(row, 1, tl.float32, 4)))
            tl.store(weight_at[0] + offset, saturate(value * scale, FP8_MAX).to(tl.float8e4nv), mask=inside)
            raise_amax(amax_ptr + tensor, tl.where(inside, value, 0.0))
        else:
            tl.store(weight_at[0] + offset, value.to(WEIGHT), mask=inside)
            if HAS_AMAX:  # see below
                if HAS_FOUND:
                    value = tl.where(goes, value, before)
                raise_amax(amax_ptr + tensor, tl.where(everywhere, value.to(WEIGHT).to(tl.float32), 0.0))
    else:
        value = _store(weight_at, WEIGHT_BLOCKED, VALUE_HOW, value, index, salt, block, live, offset, inside)
        if HAS_AMAX:  # of the weight's values as they are now, also after a skipped step
            if HAS_FOUND:
                value = tl.where(goes, value, before)
            raise_amax(amax_ptr + tensor, tl.where(everywhere, value, 0.0))


@triton.jit
def scale_kernel(
    address_ptr, amax_ptr, changed_ptr, found_inf_ptr, margin, HAS_FOUND: tl.constexpr, TOP: tl.constexpr,
    MANTISSA: tl.constexpr,
):  # fmt: skip
    """Give one FP8 weight the scale of the amax that step_kernel has stored, and note whether the scale has changed."""
    tensor = tl.program_id(0)
    amax = tl.load(amax_ptr + tensor)
    exponent = exponents_of(amax, TOP, MANTISSA) + margin
    exponent = tl.where((amax > 0) & (amax < 0x7F800000), exponent, 127)
    place = _address(address_ptr + tensor * _WIDTH, 1, tl.float32, 4)
    changed = tl.load(place).to(tl.int32, bitcast=True) != (exponent << 23)
    if HAS_FOUND:
        changed = changed & (tl.load(found_inf_ptr) == 0.0)
    tl.store(place, power_of_two(exponent), mask=changed)
    tl.store(changed_ptr + tensor, changed.to(tl.int32))


@triton.jit
def weights_kernel(
    tensor_of_ptr, grid_ptr, address_ptr, changed_ptr,
    MASTER: tl.constexpr, MASTER_BLOCKED: tl.constexpr, FP8_MAX: tl.constexpr, ALIGNED: tl.constexpr,
    BLOCKS: tl.constexpr,
):  # fmt: skip
    """Write the FP8 weights whose scale has changed from their masters; a program works on ``GROUP`` tiles."""
    group = tl.program_id(0)
    tensor = tl.load(tensor_of_ptr + group)
    if tl.load(changed_ptr + tensor) != 0:
        row = address_ptr + tensor * _WIDTH
        scale = _inverse(tl.load(_address(row, 1, tl.float32, 4)))
        for i in range(GROUP):
            _, first, block, live, base, offset, inside = _tile(
                group * GROUP + i, tensor_of_ptr, grid_ptr, ALIGNED, BLOCKS
            )
            master_at = _place(row, 9, MASTER, MASTER_BLOCKED, ALIGNED, first, base)
            value = _read(master_at, MASTER_BLOCKED, 1.0, block, live, offset, inside)
            weight_at = _place(row, 0, tl.float8e4nv, False, ALIGNED, first, base)
            tl.store(weight_at[0] + offset, saturate(value * scale, FP8_MAX).to(tl.float8e4nv), mask=inside)
