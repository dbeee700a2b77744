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
from threading import Lock
from typing import Any
from weakref import finalize

import torch
from torch import Tensor

from nemo_lowprec.compat import cublas
from nemo_lowprec.compat.tensors import dispatch_modes
from nemo_lowprec.compat.triton import current_device
from nemo_lowprec.kernels.memory import workspace

_WORKSPACE = 32 << 20  # bytes that an algorithm may use, as in torch on Hopper
_PROPOSALS = 8  # for fast accumulation
_EXACT_OPTION = 4
_ALIGNMENT = 256  # of addresses, at most
_KEPT = 4096  # shapes

_ONE, _ZERO = ctypes.c_float(1.0), ctypes.c_float(0.0)
_ADDRESS_OF_ONE, _ADDRESS_OF_ZERO = ctypes.addressof(_ONE), ctypes.addressof(_ZERO)


def _new_call(
    device: int, m: int, n: int, k: int, a: torch.dtype, b: torch.dtype, out: torch.dtype, stride: int,
    fast_accum: bool, no_bias: bool, alignment: int,
) -> Callable[..., int]:  # fmt: skip
    """A function that launches the GEMM of one shape on the current stream, and returns cuBLASLt's status.

    Its arguments are the addresses of a, b, their 1 / scale, the bias (or 0), the result, and of the factor of the
    result's old values. cuBLASLt reads matrices in column-major order: a result [M, N] in row-major order is its [N,
    M], its A is our ``b``.
    """
    handle, described = cublas.handle(device), cublas.description()
    cublas.set_attribute(described, cublas.TRANSA, ctypes.c_int32(1))
    cublas.set_attribute(described, cublas.FAST_ACCUM, ctypes.c_int8(fast_accum))
    # The heuristic asks whether these addresses are there, and reads nothing at them.
    scale_b, scale_a, biases = ctypes.c_uint64(alignment), ctypes.c_uint64(alignment), ctypes.c_uint64(alignment)
    cublas.set_attribute(described, cublas.A_SCALE, scale_b)
    cublas.set_attribute(described, cublas.B_SCALE, scale_a)
    if not no_bias:
        cublas.set_attribute(described, cublas.EPILOGUE, ctypes.c_int32(cublas.EPILOGUE_BIAS))
        cublas.set_attribute(described, cublas.BIAS_TYPE, ctypes.c_int32(cublas.DATA_TYPES[out]))
        cublas.set_attribute(described, cublas.BIAS, biases)
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
    at_algorithm = ctypes.addressof(algorithm)
    at_b, at_a, at_bias = map(ctypes.addressof, (scale_b, scale_a, biases))
    library = cublas.library()
    matmul, set_attribute = library.cublasLtMatmul, library.cublasLtMatmulDescSetAttribute
    lock, current_stream = Lock(), cublas.current_stream

    def call(a: int, b: int, scale_of_a: int, scale_of_b: int, bias: int, out: int, beta: int) -> int:
        stream = current_stream(device)  # type: ignore[misc]
        size = algorithm.workspace  # ``call`` holds the algorithm, whose address it hands over
        memory = workspace(device, stream, size) if size else 0
        with lock:  # two threads must not set the addresses of one GEMM
            scale_b.value, scale_a.value = scale_of_b, scale_of_a
            set_attribute(described, cublas.A_SCALE, at_b, 8)
            set_attribute(described, cublas.B_SCALE, at_a, 8)
            if bias:
                biases.value = bias
                set_attribute(described, cublas.BIAS, at_bias, 8)
            return matmul(  # type: ignore[no-any-return]
                handle, described, _ADDRESS_OF_ONE, b, layout_a, a, layout_b, beta, out, layout_out, out, layout_out,
                at_algorithm, memory, size, stream,
            )  # fmt: skip

    finalize(call, cublas.destroy, described, (layout_a, layout_b, layout_out)).atexit = False
    return call


_LIBRARY = cublas.library() is not None
_calls: dict[tuple[Any, ...], Callable[..., int]] = {}


def is_supported() -> bool:
    """Whether there is cuBLASLt."""
    return _LIBRARY


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
    given = out if total is None else total
    if _are_plain(a, b) and (given is None or (given.stride(1) == 1 and not given.data_ptr() % 16)):
        (m, k), n = a.shape, b.shape[0]
        into = a.new_empty((m, n), dtype=out_dtype) if given is None else given
        gemm_at(
            a.get_device(), m, n, k, a.dtype, b.dtype, a.data_ptr(), b.data_ptr(), scale_a, scale_b, into,
            n if given is None else given.stride(0), fast_accum, bias, total is not None,
        )  # fmt: skip
        return into
    result = torch._scaled_mm(
        a, b.t(), scale_a, scale_b, bias=bias, out_dtype=out_dtype, use_fast_accum=fast_accum,
        **({} if out is None else {"out": out}),
    )  # fmt: skip
    return result if total is None else total.add_(result)


def _are_plain(a: Tensor, b: Tensor) -> bool:
    """Whether ``gemm_at`` takes the matrices. Who watches torch's operations, or traces them, sees torch's own GEMM."""
    if type(a) is not Tensor or type(b) is not Tensor or dispatch_modes() or not _LIBRARY:
        return False
    (m, k), n = a.shape, b.shape[0]
    even = m > 0 and not (k % 16 or n % 16 or (a.data_ptr() | b.data_ptr()) % 16)
    return even and a.is_contiguous() and b.is_contiguous()


def gemm_at(
    device: int, m: int, n: int, k: int, a_dtype: torch.dtype, b_dtype: torch.dtype, a: int, b: int, scale_a: Tensor,
    scale_b: Tensor, into: Tensor, stride: int, fast_accum: bool, bias: Tensor | None = None, adds: bool = False,
) -> None:  # fmt: skip
    """``gemm`` in few steps on the host, for matrices that cuBLASLt takes: ``is_supported``, and as follows.

    Args:
        m, n, k: at least 1; ``n`` and ``k`` are multiples of 16.
        a_dtype, b_dtype, a, b: of contiguous matrices, and their addresses, which are multiples of 16.
        into: memory for the result, whose rows are ``stride`` elements apart.
        adds: whether the product is added to what is there.
    """
    if device != current_device():  # type: ignore[misc]
        with torch.cuda.device(device):
            gemm_at(device, m, n, k, a_dtype, b_dtype, a, b, scale_a, scale_b, into, stride, fast_accum, bias, adds)
            return
    out = into.data_ptr()
    bits = a | b | out | _ALIGNMENT
    key = device, m, n, k, a_dtype, b_dtype, into.dtype, stride, fast_accum, bias is None, bits & -bits
    call = _calls.get(key)
    if call is None:
        if len(_calls) >= _KEPT:
            _calls.clear()
        call = _calls[key] = _new_call(*key)
    status = call(
        a, b, scale_a.data_ptr(), scale_b.data_ptr(), 0 if bias is None else bias.data_ptr(), out,
        _ADDRESS_OF_ONE if adds else _ADDRESS_OF_ZERO,
    )  # fmt: skip
    if status:
        cublas.check(status)
