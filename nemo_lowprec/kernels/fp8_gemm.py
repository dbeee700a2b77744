"""FP8 GEMMs by cuBLASLt, which ``torch._scaled_mm`` calls, too: less host time, and a faster algorithm on Hopper.

``torch._scaled_mm`` asks the heuristic of cuBLASLt for an algorithm at every call, and takes the first proposal. For
fast accumulation on Hopper the first proposal is often an algorithm whose custom option has the bit ``_EXACT_OPTION``,
as all algorithms for exact accumulation of large matrices have. Algorithms without the bit give equal results in less
time. So the first proposal without the bit is taken here. A GEMM also adds to its result (``total``); with torch an
addition is a pass of its own.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import lru_cache
from typing import Any
from weakref import finalize

import torch
from torch import Tensor

from nemo_lowprec.compat import cublas
from nemo_lowprec.compat.native import address, native
from nemo_lowprec.compat.tensors import dispatch_modes
from nemo_lowprec.compat.triton import current_device
from nemo_lowprec.kernels.memory import workspace

_WORKSPACE = 32 << 20  # bytes that an algorithm may use, as in torch on Hopper
_PROPOSALS = 8  # for fast accumulation
_EXACT_OPTION = 4
_ALIGNMENT = 256  # of addresses, at most
_KEPT = 4096  # shapes

Scales = tuple[int, int]  # of ``cublas.SCALE_OF_...``
PER_TENSOR: Scales = (cublas.SCALE_OF_TENSOR, cublas.SCALE_OF_TENSOR)
OUTER: Scales = (cublas.SCALE_OF_ROW, cublas.SCALE_OF_ROW)
ROWS: Scales = (cublas.SCALE_OF_1X128, cublas.SCALE_OF_1X128)
ROWS_AND_SQUARES: Scales = (cublas.SCALE_OF_1X128, cublas.SCALE_OF_128X128)


def _new_call(
    device: int, m: int, n: int, k: int, a: torch.dtype, b: torch.dtype, out: torch.dtype, stride: int,
    fast_accum: bool, no_bias: bool, scales: Scales, alignment: int,
) -> Callable[..., int]:  # fmt: skip
    """A function that launches the GEMM of one shape on the current stream, and returns cuBLASLt's status.

    Its arguments are the addresses of a and b, their 1 / scale, the bias or None, the address of the result, and
    whether the product is added to what is there. cuBLASLt reads matrices in column-major order: a result [M, N] in
    row-major order is its [N, M], its A is our ``b``.
    """
    handle, described = cublas.handle(device), cublas.description()
    cublas.set_attribute(described, cublas.TRANSA, ctypes.c_int32(1))
    cublas.set_attribute(described, cublas.FAST_ACCUM, ctypes.c_int8(fast_accum))
    # The heuristic asks whether these addresses are there, and reads nothing at them.
    somewhere = ctypes.c_uint64(alignment)
    cublas.set_attribute(described, cublas.A_SCALE, somewhere)
    cublas.set_attribute(described, cublas.B_SCALE, somewhere)
    if scales != PER_TENSOR:
        cublas.set_attribute(described, cublas.A_SCALE_MODE, ctypes.c_int32(scales[1]))
        cublas.set_attribute(described, cublas.B_SCALE_MODE, ctypes.c_int32(scales[0]))
    if not no_bias:
        cublas.set_attribute(described, cublas.EPILOGUE, ctypes.c_int32(cublas.EPILOGUE_BIAS))
        cublas.set_attribute(described, cublas.BIAS_TYPE, ctypes.c_int32(cublas.DATA_TYPES[out]))
        cublas.set_attribute(described, cublas.BIAS, somewhere)
    layout_a, layout_b = cublas.layout(b, k, n, k), cublas.layout(a, k, m, k)
    layout_out = cublas.layout(out, n, m, stride)
    chooses = fast_accum and torch.cuda.get_device_capability(device)[0] == 9
    found = cublas.candidates(
        handle, described, (layout_a, layout_b, layout_out, layout_out), _WORKSPACE, alignment,
        _PROPOSALS if chooses else 1,
    )  # fmt: skip
    if not found:
        raise RuntimeError(f"cuBLASLt has no algorithm for [{m}, {k}] x [{n}, {k}].T in {a}, {b} and {out}")
    quick = (one for one in found if not one.option(cublas.CUSTOM_OPTION) & _EXACT_OPTION)
    algorithm = next(quick, found[0]) if chooses else found[0]
    library, size = cublas.library(), algorithm.workspace
    gemm = native().new_gemm(
        address(library.cublasLtMatmul), address(library.cublasLtMatmulDescSetAttribute), handle, described, layout_a,
        layout_b, layout_out, ctypes.addressof(algorithm), size,
    )  # fmt: skip
    launch, current_stream = native().gemm, cublas.current_stream

    def call(a: int, b: int, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None, out: int, adds: bool) -> int:
        stream = current_stream(device)  # type: ignore[misc]
        memory = workspace(device, stream, size) if size else 0
        return launch(gemm, a, b, scale_a, scale_b, bias, out, adds, memory, stream)  # type: ignore[no-any-return]

    finalize(call, cublas.destroy, described, (layout_a, layout_b, layout_out)).atexit = False
    return call


@lru_cache(maxsize=64)
def multiplies_rows(device: int, a: torch.dtype, b: torch.dtype, out: torch.dtype, fast_accum: bool) -> bool:
    """Whether cuBLASLt multiplies matrices with a scale per row (``OUTER``): on Hopper, since CUDA 12.9."""
    if not is_supported() or torch.cuda.get_device_capability(device) != (9, 0):
        return False
    if tuple(map(int, (torch.version.cuda or "0.0").split(".")[:2])) < (12, 9):
        return False
    try:
        with torch.cuda.device(device):
            _new_call(device, 256, 256, 256, a, b, out, 256, fast_accum, True, OUTER, _ALIGNMENT)
    except RuntimeError:
        return False
    return True


_calls: dict[tuple[Any, ...], Callable[..., int]] = {}


@lru_cache(maxsize=1)
def is_supported() -> bool:
    """Whether there is cuBLASLt, and what launches its GEMMs."""
    return cublas.library() is not None and native() is not None


def gemm(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    out_dtype: torch.dtype,
    fast_accum: bool = False,
    bias: Tensor | None = None,
    out: Tensor | None = None,
    total: Tensor | None = None,
) -> Tensor:
    """``(a * scale_a) @ (b * scale_b).T`` [M, N] of FP8 ``a`` [M, K] and ``b`` [N, K].

    Args:
        scale_a, scale_b: FP32 [1].
        out_dtype: FP32 or half.
        fast_accum: whether the tensor cores may add products up in fewer bits than FP32 has.
        bias: [N] in ``out_dtype``.
        out: [M, N] in ``out_dtype``, contiguous within a row, for the result.
        total: like ``out``, in the place of ``out``: the product is added to it.
    """
    made = _multiply(a, b, scale_a, scale_b, out_dtype, fast_accum, bias, out, total, PER_TENSOR)
    if made is not None:
        return made
    result = torch._scaled_mm(
        a, b.t(), scale_a, scale_b, bias=bias, out_dtype=out_dtype, use_fast_accum=fast_accum,
        **({} if out is None else {"out": out}),
    )  # fmt: skip
    return result if total is None else total.add_(result)


def gemm_of_blocks(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    scales: Scales,
    out_dtype: torch.dtype,
    bias: Tensor | None = None,
    out: Tensor | None = None,
    total: Tensor | None = None,
) -> Tensor | None:
    """``gemm`` with scales of blocks; None where cuBLASLt does not take the matrices, or must not bypass torch.

    Args:
        scale_a, scale_b: as ``gemm_block_scaling.scales_shape`` lays them out.
        scales: which blocks ``a`` and ``b`` have; not 128x128 both.
    """
    return _multiply(a, b, scale_a, scale_b, out_dtype, False, bias, out, total, scales)


def gemm_of_rows(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    out_dtype: torch.dtype,
    fast_accum: bool = False,
    bias: Tensor | None = None,
    out: Tensor | None = None,
    total: Tensor | None = None,
) -> Tensor:
    """``gemm`` with a scale for each row of ``a`` and of ``b``.

    Args:
        scale_a, scale_b: FP32 [M, 1] and [N, 1], contiguous.
        bias: in half precision, where ``out_dtype`` is.
    """
    if multiplies_rows(a.get_device(), a.dtype, b.dtype, out_dtype, fast_accum):
        made = _multiply(a, b, scale_a, scale_b, out_dtype, fast_accum, bias, out, total, OUTER)
        if made is not None:
            return made
    if out_dtype == torch.bfloat16:
        made = torch._scaled_mm(
            a, b.t(), scale_a, scale_b.t(), bias=bias, out_dtype=out_dtype, use_fast_accum=fast_accum
        )
    else:  # torch's kernel for scales of rows rounds to BF16
        one = torch.ones(1, dtype=torch.float32, device=a.device)
        made = gemm(a, b, one, one, torch.float32, fast_accum).mul_(scale_a).mul_(scale_b.t())
        made = made if bias is None else made.add_(bias)
    if total is not None:
        return total.add_(made)
    return made.to(out_dtype) if out is None else out.copy_(made)


def _multiply(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, out_dtype: torch.dtype, fast_accum: bool,
    bias: Tensor | None, out: Tensor | None, total: Tensor | None, scales: Scales,
) -> Tensor | None:  # fmt: skip
    given = out if total is None else total
    if not _are_plain(a, b) or (given is not None and (given.stride(1) != 1 or given.data_ptr() % 16)):
        return None
    (m, k), n = a.shape, b.shape[0]
    into = a.new_empty((m, n), dtype=out_dtype) if given is None else given
    gemm_at(
        a.get_device(), m, n, k, a.dtype, b.dtype, a.data_ptr(), b.data_ptr(), scale_a, scale_b, into,
        n if given is None else given.stride(0), fast_accum, bias, total is not None, scales,
    )  # fmt: skip
    return into


def _are_plain(a: Tensor, b: Tensor) -> bool:
    """Whether ``gemm_at`` takes the matrices. Who watches torch's operations, or traces them, sees torch's own GEMM."""
    if type(a) is not Tensor or type(b) is not Tensor or dispatch_modes() or not is_supported():
        return False
    (m, k), n = a.shape, b.shape[0]
    even = m > 0 and not (k % 16 or n % 16 or (a.data_ptr() | b.data_ptr()) % 16)
    return even and a.is_contiguous() and b.is_contiguous()


def gemm_at(
    device: int, m: int, n: int, k: int, a_dtype: torch.dtype, b_dtype: torch.dtype, a: int, b: int, scale_a: Tensor,
    scale_b: Tensor, into: Tensor, stride: int, fast_accum: bool, bias: Tensor | None = None, adds: bool = False,
    scales: Scales = PER_TENSOR,
) -> None:  # fmt: skip
    """``gemm`` in few steps on the host, for matrices that cuBLASLt takes: ``is_supported``, and as follows.

    Args:
        m, n, k: at least 1; ``n`` and ``k`` are multiples of 16.
        a_dtype, b_dtype, a, b: of contiguous matrices, and their addresses, which are multiples of 16.
        into: memory for the result, whose rows are ``stride`` elements apart.
        adds: whether the product is added to what is there.
        scales: what has a scale, of ``a`` and of ``b``.
    """
    if device != current_device():  # type: ignore[misc]
        with torch.cuda.device(device):
            gemm_at(
                device, m, n, k, a_dtype, b_dtype, a, b, scale_a, scale_b, into, stride, fast_accum, bias, adds, scales
            )  # fmt: skip
            return
    out = into.data_ptr()
    bits = a | b | out | _ALIGNMENT
    key = device, m, n, k, a_dtype, b_dtype, into.dtype, stride, fast_accum, bias is None, scales, bits & -bits
    call = _calls.get(key)
    if call is None:
        if len(_calls) >= _KEPT:
            _calls.clear()
        call = _calls[key] = _new_call(*key)
    status = call(a, b, scale_a, scale_b, bias, out, adds)
    if status:
        cublas.check(status)
