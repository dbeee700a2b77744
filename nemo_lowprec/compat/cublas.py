"""cuBLASLt, the library of GEMMs that torch has loaded, called from Python.

Names and numbers are those of ``cublasLt.h``, which have not changed from version 12 to 13.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch

DATA_TYPES = {
    torch.float32: 0, torch.float16: 2, torch.bfloat16: 14, torch.float8_e4m3fn: 28, torch.float8_e5m2: 29,
}  # fmt: skip
TRANSA, EPILOGUE, BIAS, A_SCALE, B_SCALE, FAST_ACCUM, BIAS_TYPE = 3, 7, 8, 17, 18, 25, 26
A_SCALE_MODE, B_SCALE_MODE = 31, 32  # since version 12.8
SCALE_OF_TENSOR, SCALE_OF_ROW, SCALE_OF_1X128, SCALE_OF_128X128 = 0, 3, 4, 5
EPILOGUE_BIAS = 4
CUSTOM_OPTION = 5  # of an algorithm
_COMPUTE_32F, _R_32F = 68, 0
_MAX_WORKSPACE, _MIN_ALIGNMENTS = 1, (5, 6, 7, 8)  # of a preference

current_stream = torch._C._cuda_getCurrentRawStream if torch.backends.cuda.is_built() else None


class Candidate(ctypes.Structure):
    """One of the algorithms that the heuristic proposes (``cublasLtMatmulHeuristicResult_t``)."""

    _fields_ = (
        ("algorithm", ctypes.c_uint64 * 8),
        ("workspace", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )

    def option(self, attribute: int) -> int:
        """A number of the algorithm's configuration."""
        value, written = ctypes.c_uint32(), ctypes.c_size_t()
        check(
            library().cublasLtMatmulAlgoConfigGetAttribute(
                ctypes.byref(self.algorithm), attribute, ctypes.byref(value), ctypes.c_size_t(4), ctypes.byref(written)
            )
        )
        return value.value


@lru_cache(maxsize=1)
def library() -> Any:
    """The library; None where torch was built without CUDA, or for another version than 12 or 13."""
    major = (torch.version.cuda or "").split(".")[0]
    if major not in ("12", "13"):
        return None
    try:
        found = ctypes.CDLL(f"libcublasLt.so.{major}")
    except OSError:
        return None
    found.cublasLtMatmulDescSetAttribute.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t]
    return found


def check(status: int) -> None:
    """Raise for a status that is not success."""
    if status:
        raise RuntimeError(f"cuBLASLt has failed with status {status}")


@lru_cache(maxsize=16)
def handle(device: int) -> int:
    """cuBLASLt's state on ``device``, which has to be the current one."""
    made = ctypes.c_void_p()
    check(library().cublasLtCreate(ctypes.byref(made)))
    assert made.value is not None
    return made.value


def description() -> int:
    """A GEMM with FP32 accumulation and FP32 factors; ``set_attribute`` completes it, ``destroy`` frees it."""
    made = ctypes.c_void_p()
    check(library().cublasLtMatmulDescCreate(ctypes.byref(made), _COMPUTE_32F, _R_32F))
    assert made.value is not None
    return made.value


def set_attribute(description: int, attribute: int, value: Any) -> None:
    """Set an attribute of a GEMM to ``value``, a number of ``ctypes``."""
    check(
        library().cublasLtMatmulDescSetAttribute(description, attribute, ctypes.addressof(value), ctypes.sizeof(value))
    )


def layout(dtype: torch.dtype, rows: int, columns: int, leading: int) -> int:
    """A matrix in column-major order, whose columns are ``leading`` elements apart."""
    made = ctypes.c_void_p()
    check(
        library().cublasLtMatrixLayoutCreate(
            ctypes.byref(made), DATA_TYPES[dtype], ctypes.c_uint64(rows), ctypes.c_uint64(columns),
            ctypes.c_int64(leading),
        )
    )  # fmt: skip
    assert made.value is not None
    return made.value


def destroy(description: int, layouts: Sequence[int]) -> None:
    """Free a GEMM's description and the layouts of its matrices."""
    for each in layouts:
        library().cublasLtMatrixLayoutDestroy(ctypes.c_void_p(each))
    library().cublasLtMatmulDescDestroy(ctypes.c_void_p(description))


def candidates(
    handle: int, description: int, layouts: tuple[int, int, int, int], workspace: int, alignment: int, count: int
) -> list[Candidate]:
    """The algorithms that the heuristic proposes, by the time that it expects, the shortest first.

    Args:
        layouts: of A, B, C and D.
        workspace: bytes of memory that an algorithm may use.
        alignment: all addresses are multiples of it.
        count: how many are wanted; there may be fewer.
    """
    preference, found, made = ctypes.c_void_p(), ctypes.c_int(), (Candidate * count)()
    check(library().cublasLtMatmulPreferenceCreate(ctypes.byref(preference)))
    try:
        size, aligned = ctypes.c_size_t(workspace), ctypes.c_uint32(alignment)
        for attribute, value in ((_MAX_WORKSPACE, size), *((each, aligned) for each in _MIN_ALIGNMENTS)):
            check(
                library().cublasLtMatmulPreferenceSetAttribute(
                    preference, attribute, ctypes.byref(value), ctypes.c_size_t(ctypes.sizeof(value))
                )
            )
        a, b, c, d = map(ctypes.c_void_p, layouts)
        check(
            library().cublasLtMatmulAlgoGetHeuristic(
                ctypes.c_void_p(handle), ctypes.c_void_p(description), a, b, c, d, preference, count,
                ctypes.byref(made), ctypes.byref(found),
            )
        )  # fmt: skip
    finally:
        library().cublasLtMatmulPreferenceDestroy(preference)
    return list(made[: found.value])
