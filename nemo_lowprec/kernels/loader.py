"""Loads the Triton kernels, on machines that have Triton and a GPU on which the kernels round as the reference does."""

from __future__ import annotations

import importlib
from functools import cache, partial
from types import ModuleType


@cache
def _load(name: str) -> ModuleType | None:
    """A module of kernels; None without Triton or without a supported GPU."""
    try:
        cast = importlib.import_module("nemo_lowprec.kernels.triton_cast")
        return importlib.import_module(name) if cast.is_supported() else None
    except ImportError:
        return None


fused_kernels = partial(_load, "nemo_lowprec.kernels.triton_cast")  # per-tensor scaling
tile_kernels = partial(_load, "nemo_lowprec.kernels.triton_tiles")  # operands of GEMMs with 1x128 and 128x128 blocks
row_kernels = partial(_load, "nemo_lowprec.kernels.triton_rows")  # operands of GEMMs with a scale per row
block_kernels = partial(_load, "nemo_lowprec.kernels.triton_blocks")  # tensors in blocks
weight_kernels = partial(_load, "nemo_lowprec.kernels.triton_weights")  # quantizes all weights of a model
norm_kernels = partial(_load, "nemo_lowprec.kernels.triton_norm")  # norms from FP32 or half to half precision
sum_kernels = partial(_load, "nemo_lowprec.kernels.triton_sums")  # adds partial sums up
copy_kernels = partial(_load, "nemo_lowprec.kernels.triton_copy")  # copies masters into half weights
rotary_kernels = partial(_load, "nemo_lowprec.kernels.triton_rotary")  # rotates queries and keys
join_kernels = partial(_load, "nemo_lowprec.kernels.triton_join")  # joins the gradients of q, k and v
loss_kernels = partial(_load, "nemo_lowprec.kernels.triton_cross_entropy")  # cross entropy of half logits
activation_kernels = partial(_load, "nemo_lowprec.kernels.triton_activations")  # activations between FP8 layers
embedding_kernels = partial(_load, "nemo_lowprec.kernels.triton_embedding")  # gradients of embeddings
grouped_kernels = partial(_load, "nemo_lowprec.kernels.triton_grouped")  # grouped GEMMs of experts
expert_kernels = partial(_load, "nemo_lowprec.kernels.triton_experts")  # what experts do between these GEMMs
grouped_block_kernels = partial(_load, "nemo_lowprec.kernels.triton_grouped_blocks")  # the same with scales of blocks
transpose_kernels = partial(_load, "nemo_lowprec.kernels.triton_transpose")  # transposes of FP8 weights
sample_kernels = partial(_load, "nemo_lowprec.kernels.triton_sample")  # reads some elements of many tensors
error_kernels = partial(_load, "nemo_lowprec.kernels.triton_errors")  # sums of the errors of rounding
