"""Kinds of kernels, told by their names.

A kernel that quantizes its own result, as the norm before a linear layer may, counts as ``elementwise``.
"""

from __future__ import annotations

import re

__all__ = ["COMMUNICATION", "KINDS", "OPTIMIZER", "kind_of"]

OPTIMIZER, COMMUNICATION = "optimizer", "communication"
# In this order: kernels of attention may have "cutlass" in their names, and "transpose" is a part of GEMMs' names.
_NAMES = {
    "attention": r"flash|fmha|sdpa|attention|cudnn::fusion",
    COMMUNICATION: r"nccl|c10d::|gloo:|_wire_",
    "gemm": r"nvjet|gemm|cutlass|cublas|xmma|convolve|cudnn_generated|splitk|::(add|b|baddb|_scaled_|_grouped_)?mm$"
    r"|_convolution|convolution_backward$|grouped_rows|grouped_weights",
    "quantization": r"quantize|_amax_kernel|^_cast_kernel|_whole_rows_kernel|_tiles_kernel|^_transpose_kernel"
    r"|^_weights_kernel|^_rows_kernel|cast_transpose|compute_amax|fp8_transpose",
}
_OF_NAMES = {kind: re.compile(pattern, re.IGNORECASE) for kind, pattern in _NAMES.items()}
_ELEMENTWISE = "elementwise"  # norms, activations, sums, copies
KINDS = ("gemm", "quantization", "attention", _ELEMENTWISE, OPTIMIZER, COMMUNICATION)


def kind_of(kernel: str) -> str:
    """One of ``KINDS``, but for ``optimizer``, which the place of a kernel tells. Convolutions are GEMMs."""
    return next((kind for kind, names in _OF_NAMES.items() if names.search(kernel)), _ELEMENTWISE)
