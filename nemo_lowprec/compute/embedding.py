"""An ``nn.Embedding`` whose table may be in low-bit storage, or have an FP32 gradient.

Autograd makes the gradient of the table in the dtype of the rows, and casts the whole table where another dtype is
wanted. Here the gradient is summed in FP32 and written once, in the dtype in which layers compute their gradients.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nemo_lowprec.compat.autograd import apply_function, is_batched, is_legacy_batched, unwrap_if_dead
from nemo_lowprec.compat.tensors import is_plain
from nemo_lowprec.compute.backends.base import is_transformed
from nemo_lowprec.compute.class_swap import own_forward, swap
from nemo_lowprec.compute.linear_function import grad_buffer_of, read_grad_buffer
from nemo_lowprec.kernels.loader import embedding_kernels
from nemo_lowprec.tensors import Fp16Weight
from nemo_lowprec.tensors.gradient import computed_dtype


class LowPrecisionEmbedding(nn.Embedding):
    """``nn.Embedding`` for any table. Conversion makes it of an ``nn.Embedding``."""

    def forward(self, input: Tensor) -> Tensor:
        own = not torch.compiler.is_compiling() and self._sums_gradient(input)
        return self._look_up(input) if own else super().forward(input)

    def _sums_gradient(self, input: Tensor) -> bool:
        """Whether autograd would sum the gradient of the table in half precision, or cast the sums."""
        table = self._parameters.get("weight")
        if table is None or not table.requires_grad or not torch.is_grad_enabled() or is_transformed():
            return False
        if self.max_norm is not None or self.scale_grad_by_freq or self.sparse or not is_plain(input):
            return False
        return isinstance(table, Fp16Weight) or (type(table) is nn.Parameter and computed_dtype(table) != table.dtype)

    def _look_up(self, tokens: Tensor) -> Tensor:
        return _apply(unwrap_if_dead(self.weight), tokens, self.padding_idx)  # type: ignore[no-any-return]


class _Lookup(torch.autograd.Function):
    """(table [rows, features], tokens, the token without a gradient) to the rows [..., features]."""

    @staticmethod
    def forward(ctx: Any, table: Tensor, tokens: Tensor, padding: int | None) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.table, ctx.padding = table, padding
        ctx.save_for_backward(tokens)
        read_grad_buffer(table)
        return F.embedding(tokens, table, padding)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, None, None]:
        if grad is None:
            return None, None, None
        (tokens,), table = ctx.saved_tensors, ctx.table
        if torch.is_grad_enabled() or is_batched(grad) or is_legacy_batched(grad):
            absent = -1 if ctx.padding is None else ctx.padding
            found = torch.ops.aten.embedding_dense_backward(grad, tokens, len(table), absent, False)
            return found.to(computed_dtype(table)), None, None
        flat = grad.reshape(-1, grad.shape[-1]).contiguous()
        call = flat, tokens.reshape(-1), len(table), ctx.padding, computed_dtype(table), grad_buffer_of(table)
        kernels = embedding_kernels() if grad.is_cuda else None
        return (table_gradient if kernels is None else kernels.table_gradient)(*call), None, None


_apply = apply_function(_Lookup)


def table_gradient(
    grad: Tensor, tokens: Tensor, rows: int, padding: int | None, dtype: torch.dtype, out: Tensor | None = None
) -> Tensor:
    """The sums of the rows of ``grad`` by token, in FP32 and rounded once: the reference of the kernel.

    Args:
        grad: [count, features] of any float dtype.
        tokens: integers [count].
        rows: of the table.
        padding: the token whose row has no gradient.
        dtype: of the result.
        out: memory for the result.

    Returns:
        [rows, features].
    """
    sums = torch.zeros(rows, grad.shape[1], dtype=torch.float32, device=grad.device)
    sums.index_add_(0, tokens, grad.float())
    if padding is not None:
        sums[padding] = 0.0
    return sums.to(dtype) if out is None else out.copy_(sums)


def convert_embeddings(model: nn.Module) -> None:
    """Let the embeddings of ``model`` sum the gradients of their tables in FP32."""
    for module in model.modules():
        if type(module) is nn.Embedding and not own_forward(module):
            swap(module, LowPrecisionEmbedding)
