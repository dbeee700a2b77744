"""FP8 GEMMs by cuBLASLt, which ``torch._scaled_mm`` calls, too: less host time, and a better algorithm on Hopper.

``torch._scaled_mm`` asks the heuristic of cuBLASLt for an algorithm at every call, and takes the first proposal. For
fast accumulation on Hopper the first proposal is often one of the kind that exact accumulation takes. Algorithms of the
other kind give equal results in 4 to 22 % less time; the heuristic proposes them, too, and here they come first. And a
GEMM adds to its result (``total``), where torch needs a pass of its own.
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
from nemo_lowprec.compat.capture import is_capturing
from nemo_lowprec.compat.tensors import has_dispatch_mode
from nemo_lowprec.compat.triton import current_device

_WORKSPACE = 32 << 20  # bytes that an algorithm may use, as in torch on Hopper
_PROPOSALS = 8  # for fast accumulation
_EXACT_OPTION = 4  # the bit of an algorithm's custom option that fast accumulation does not need
_ALIGNMENT = 256  # of addresses, at most
_KEPT = 4096  # forms

_ONE, _ZERO = ctypes.c_float(1.0), ctypes.c_float(0.0)
_ADDRESS_OF_ONE, _ADDRESS_OF_ZERO = ctypes.addressof(_ONE), ctypes.addressof(_ZERO)


class _Form:
    """The GEMM of one shape: what cuBLASLt needs of it, and the algorithm.

    cuBLASLt reads matrices in column-major order: a result [M, N] in row-major order is its [N, M], its A is our ``b``.
    """

    __slots__ = ("__weakref__", "_algorithm", "_described", "_layouts", "_pointers", "call", "workspace")

    def __init__(
        self, device: int, m: int, n: int, k: int, strides: tuple[int, int, int], a: torch.dtype, b: torch.dtype,
        out: torch.dtype, fast_accum: bool, bias: bool, alignment: int,
    ) -> None:  # fmt: skip
        handle, described = cublas.handle(device), cublas.description()
        cublas.set_attribute(described, cublas.TRANSA, ctypes.c_int32(1))
        cublas.set_attribute(described, cublas.FAST_ACCUM, ctypes.c_int8(fast_accum))
        addresses = [cublas.A_SCALE, cublas.B_SCALE]
        if bias:
            cublas.set_attribute(described, cublas.EPILOGUE, ctypes.c_int32(cublas.EPILOGUE_BIAS))
            cublas.set_attribute(described, cublas.BIAS_TYPE, ctypes.c_int32(cublas.DATA_TYPES[out]))
            addresses.append(cublas.BIAS)
        # The heuristic asks whether the addresses are there, and reads none.
        self._pointers = [(kind, ctypes.c_uint64(alignment)) for kind in addresses]
        for kind, pointer in self._pointers:
            cublas.set_attribute(described, kind, pointer)
        ld_a, ld_b, ld_out = strides
        layouts = cublas.layout(b, k, n, ld_b), cublas.layout(a, k, m, ld_a), cublas.layout(out, n, m, ld_out)
        self._described, self._layouts = described, layouts
        chooses = fast_accum and torch.cuda.get_device_capability(device)[0] == 9
        found = cublas.candidates(
            handle, described, (*layouts, layouts[2]), _WORKSPACE, alignment, _PROPOSALS if chooses else 1
        )
        if not found:
            raise RuntimeError(f"cuBLASLt has no algorithm for [{m}, {k}] x [{n}, {k}].T in {a}, {b} and {out}")
        quick = (one for one in found if not one.option(cublas.CUSTOM_OPTION) & _EXACT_OPTION)
        self._algorithm = next(quick, found[0]) if chooses else found[0]
        self.workspace: int = self._algorithm.workspace
        finalize(self, cublas.destroy, described, layouts).atexit = False
        self.call = self._caller(handle)

    def _caller(self, handle: int) -> Callable[..., int]:
        """A function that launches the GEMM: of addresses, of a factor of the result's old values, and of a stream."""
        matmul, set_attribute = cublas.library().cublasLtMatmul, cublas.library().cublasLtMatmulDescSetAttribute
        described, lock, size = self._described, Lock(), self.workspace
        algorithm = ctypes.addressof(self._algorithm)
        layout_a, layout_b, layout_out = self._layouts
        (kind_b, scale_b), (kind_a, scale_a), *biases = self._pointers
        at_b, at_a = ctypes.addressof(scale_b), ctypes.addressof(scale_a)

        def call(
            a: int, b: int, scale_of_a: int, scale_of_b: int, bias: int, out: int, beta: int, memory: int, stream: int
        ) -> int:
            with lock:  # two threads must not set the addresses of one GEMM
                scale_a.value, scale_b.value = scale_of_a, scale_of_b
                set_attribute(described, kind_b, at_b, 8)
                set_attribute(described, kind_a, at_a, 8)
                for kind, pointer in biases:
                    pointer.value = bias
                    cublas.set_attribute(described, kind, pointer)
                return matmul(  # type: ignore[no-any-return]
                    handle, described, _ADDRESS_OF_ONE, b, layout_a, a, layout_b, beta, out, layout_out, out,
                    layout_out, algorithm, memory, size, stream,
                )  # fmt: skip

        return call


_LIBRARY = cublas.library() is not None
_forms: dict[tuple[Any, ...], _Form] = {}
_workspaces: dict[tuple[int, int], Tensor] = {}


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
    m, k = a.shape
    n, (ld_a, a_along), (ld_b, b_along) = b.shape[0], a.stride(), b.stride()
    at_a, at_b = a.data_ptr(), b.data_ptr()
    even = not (k % 16 or n % 16 or (at_a | at_b) % 16) and m > 0 and a_along == b_along == 1
    # Who watches the operations of torch, or traces them, sees torch's own GEMM.
    direct = even and _LIBRARY and type(a) is Tensor and type(b) is Tensor and not has_dispatch_mode()
    if direct and given is not None:
        direct = not given.data_ptr() % 16 and given.stride(1) == 1
    if not direct:
        result = torch._scaled_mm(
            a, b.t(), scale_a, scale_b, bias=bias, out_dtype=out_dtype, use_fast_accum=fast_accum,
            **({} if out is None else {"out": out}),
        )  # fmt: skip
        return result if total is None else total.add_(result)
    device = a.get_device()
    if device != current_device():  # type: ignore[misc]
        with torch.cuda.device(device):
            return gemm(a, b, scale_a, scale_b, out_dtype, fast_accum, bias, out, total)
    into = a.new_empty((m, n), dtype=out_dtype) if given is None else given
    at_out = into.data_ptr()
    bits = at_a | at_b | at_out | _ALIGNMENT
    strides = ld_a, ld_b, n if given is None else given.stride(0)
    key = device, m, n, k, strides, a.dtype, b.dtype, out_dtype, fast_accum, bias is not None, bits & -bits
    form = _forms.get(key)
    if form is None:
        if len(_forms) >= _KEPT:
            _forms.clear()
        form = _forms[key] = _Form(*key)
    stream = cublas.current_stream(device)  # type: ignore[misc]
    status = form.call(
        at_a, at_b, scale_a.data_ptr(), scale_b.data_ptr(), 0 if bias is None else bias.data_ptr(), at_out,
        _ADDRESS_OF_ZERO if total is None else _ADDRESS_OF_ONE, _workspace(device, stream, form.workspace), stream,
    )  # fmt: skip
    if status:
        cublas.check(status)
    return into


def _workspace(device: int, stream: int, size: int) -> int:
    """The address of ``size`` bytes for a GEMM on ``stream``, where GEMMs run one after another."""
    if not size:
        return 0
    if is_capturing():  # a CUDA graph has memory of its own; what follows may take it
        return torch.empty(size, dtype=torch.uint8, device=torch.device("cuda", device)).data_ptr()
    there = _workspaces.get((device, stream))
    if there is None or there.numel() < size:
        there = torch.empty(size, dtype=torch.uint8, device=torch.device("cuda", device))
        _workspaces[device, stream] = there
    return there.data_ptr()
