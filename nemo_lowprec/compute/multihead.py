"""The converted ``nn.MultiheadAttention``: its projections are the level's GEMMs, also in evaluation.

torch's module reads ``in_proj_weight`` and ``out_proj.weight`` in ``F.multi_head_attention_forward``, and in evaluation
in a fused kernel, so that no converted layer is called. The fused kernel of ``nn.TransformerEncoderLayer`` and the
nested tensors of ``nn.TransformerEncoder`` bypass the layers of a whole block; ``FUSED`` switches both off.
"""

from __future__ import annotations

import math
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from nemo_lowprec.compute.compiled import has_own_weight, read_parameter
from nemo_lowprec.compute.gemm_plan import GemmPlan
from nemo_lowprec.compute.half_linear import compiled_half_linear, half_linear
from nemo_lowprec.compute.linear import compiled_linear, linear

# By class: an attribute, and the value with which the class calls its layers in evaluation, too.
FUSED: dict[type[nn.Module], tuple[str, Any]] = {
    nn.TransformerEncoderLayer: ("activation_relu_or_gelu", 0),
    nn.TransformerEncoder: ("use_nested_tensor", False),
}


def projection_weights(module: nn.MultiheadAttention) -> list[str]:
    """Names of the weights of the input projections of ``module``: one of three, or where kdim or vdim differ three."""
    parts = module._parameters.get("q_proj_weight") is not None
    return [f"{x}_proj_weight" for x in "qkv"] if parts else ["in_proj_weight"]


def has_torchs_forward(module: nn.Module) -> bool:
    """Whether ``module`` is an ``nn.MultiheadAttention``, maybe of a subclass, that computes by torch's forward."""
    own: Any = type(module)
    return (
        isinstance(module, nn.MultiheadAttention)
        and not isinstance(module, LowPrecisionMultiheadAttention)
        and "forward" not in module.__dict__
        and not is_parametrized(module)
        and (own.forward, own.merge_masks) == (nn.MultiheadAttention.forward, nn.MultiheadAttention.merge_masks)
    )


class LowPrecisionMultiheadAttention(nn.MultiheadAttention):
    """``nn.MultiheadAttention`` whose input projections have a ``GemmPlan``. Conversion makes it of torch's module.

    ``out_proj`` is a linear layer and called as such. One GEMM projects query, key and value where they are one tensor;
    otherwise each is multiplied with its rows of ``in_proj_weight``, which has one scale in both cases. Attention is
    ``scaled_dot_product_attention``, or with ``need_weights`` the operations of torch's module.

    Attributes:
        gemm_plans: by the name of the weight; a projection without a backend is computed in half precision.
    """

    gemm_plans: dict[str, GemmPlan]

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Arguments and results are those of ``nn.MultiheadAttention``; the output is of the autocast dtype.

        Raises:
            ValueError: a nested tensor, or other than 2 or 3 dimensions.
            RuntimeError: ``is_causal`` without ``attn_mask``, or a mask of another shape.
        """
        if query.is_nested or key.is_nested or value.is_nested:
            raise ValueError(
                "A converted MultiheadAttention takes no nested tensors. Pass padded ones and key_padding_mask."
            )
        dims = [x.dim() for x in (query, key, value)]
        if dims not in ([2] * 3, [3] * 3):
            raise ValueError(f"query, key and value have {dims} dimensions, and should all have 2 or 3, with a batch.")
        batched = dims[0] == 3
        if is_causal and attn_mask is None:
            raise RuntimeError("is_causal=True is a hint about attn_mask. Pass attn_mask, too.")
        q, k, v = (self._heads(x, batched) for x in self._project(query, key, value))
        mask = self._mask(q, k, key_padding_mask, attn_mask, batched)
        # is_causal replaces the mask where nothing else reads the mask.
        causal = is_causal and key_padding_mask is None and not need_weights
        k, v, mask = self._extended(k, v, None if causal else mask)

        dropout = self.dropout if self.training else 0.0
        weights = None
        if need_weights:
            scores = (q * math.sqrt(1.0 / self.head_dim)) @ k.transpose(-2, -1)
            weights = F.softmax(scores if mask is None else scores + mask, dim=-1)
            weights = F.dropout(weights, dropout) if dropout else weights
            out = weights.to(v.dtype) @ v
            weights = weights.mean(dim=1) if average_attn_weights else weights
            weights = weights if batched else weights.squeeze(0)
        else:
            out = F.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal=causal)
        # [batch, heads, length, head_dim] to the layout of the query.
        order = (0, 2, 1, 3) if self.batch_first or not batched else (2, 0, 1, 3)
        return self.out_proj(out.permute(order).reshape(query.shape)), weights

    def train(self, mode: bool = True) -> Self:
        for plan in self.gemm_plans.values():
            if not mode and plan.weight is not None:
                plan.weight.look_again()
        return super().train(mode)

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        """The projected query, key and value, each [..., embed_dim]."""
        size, biases = self.embed_dim, self._biases()
        if self.in_proj_weight is None:
            each = (None, None, None) if biases is None else biases.chunk(3)
            inputs = zip(projection_weights(self), (query, key, value), each, strict=True)
            return tuple(self._linear(x, name, bias) for name, x, bias in inputs)
        if query is key and key is value:
            return self._linear(query, "in_proj_weight", biases).chunk(3, dim=-1)
        parts = [(query, 0, 1), (key, 1, 3)] if key is value else [(query, 0, 1), (key, 1, 2), (value, 2, 3)]
        found: list[Tensor] = []
        for x, first, last in parts:
            rows = (first * size, last * size)
            bias = None if biases is None else biases[slice(*rows)]
            found += self._linear(x, "in_proj_weight", bias, rows).chunk(last - first, dim=-1)
        return tuple(found)

    def _biases(self) -> Tensor | None:
        """The biases of the input projections."""
        for plan in self.gemm_plans.values() if torch.compiler.is_compiling() else ():
            if plan.entry is not None and plan.entry.prepare():
                return read_parameter(self, "in_proj_bias", plan.entry.bias)
        return self.in_proj_bias

    def _linear(self, x: Tensor, name: str, bias: Tensor | None, rows: tuple[int, int] | None = None) -> Tensor:
        if torch.compiler.is_compiling():
            return self._compiled_linear(x, name, bias, rows)
        weight, plan = getattr(self, name), self.gemm_plans.get(name)
        if plan is None or plan.backend is None:
            return half_linear(x, weight, bias, rows, plan)
        return linear(x, weight, bias, plan, self.training, False, rows)

    def _compiled_linear(self, x: Tensor, name: str, bias: Tensor | None, rows: tuple[int, int] | None) -> Tensor:
        plan = self.gemm_plans.get(name)
        if plan is None:
            return F.linear(x, getattr(self, name)[slice(*(rows or (None,)))], bias)
        fits = plan.entry.prepare() and has_own_weight(self, name, plan.entry)
        # The rows of a weight in FP8 would be rounded again.
        if not fits or (rows is not None and plan.entry.weight.scale_inv is not None):
            return _uncompiled(self, x, name, bias, rows)  # type: ignore[no-any-return]
        run = compiled_half_linear if plan.backend is None else compiled_linear
        return run(x, self, name, bias, plan, False, rows)

    def _heads(self, x: Tensor, batched: bool) -> Tensor:
        """A projection in the layout [batch, heads, length, head_dim]."""
        x = x.unflatten(-1, (self.num_heads, self.head_dim))
        if not batched:
            return x.unsqueeze(0).transpose(1, 2)
        return x.transpose(1, 2) if self.batch_first else x.permute(1, 2, 0, 3)

    def _mask(
        self, q: Tensor, k: Tensor, key_padding_mask: Tensor | None, attn_mask: Tensor | None, batched: bool
    ) -> Tensor | None:
        """The sum of all masks, which is added to the scores: [batch or 1, heads or 1, queries or 1, keys]; or None.

        Raises:
            RuntimeError: a mask of another shape.
        """
        (batch, heads, queries, _), keys = q.shape, k.shape[2]
        mask = None
        if attn_mask is not None:
            shape = (queries, keys) if attn_mask.dim() == 2 else (batch * heads, queries, keys)
            if attn_mask.shape != shape:
                raise RuntimeError(f"attn_mask has the shape {tuple(attn_mask.shape)}, and should have {shape}.")
            mask = _additive(attn_mask, q.dtype)
            mask = mask if mask.dim() == 2 else mask.view(batch, heads, queries, keys)
            mask = mask.expand(1, 1, -1, -1) if mask.dim() == 2 else mask
        if key_padding_mask is not None:
            padding = _additive(key_padding_mask if batched else key_padding_mask.unsqueeze(0), q.dtype)
            if padding.shape != (batch, keys):
                raise RuntimeError(
                    f"key_padding_mask has the shape {tuple(padding.shape)}, and should have {(batch, keys)}."
                )
            padding = padding[:, None, None]
            mask = padding if mask is None else mask + padding
        return mask

    def _extended(self, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Keys, values and mask, extended by the keys and values of ``add_bias_kv`` and ``add_zero_attn``."""
        more: list[tuple[Tensor, Tensor]] = []
        if self.bias_k is not None and self.bias_v is not None:
            sizes = (1, self.num_heads, 1, self.head_dim)
            more.append((self.bias_k.view(sizes), self.bias_v.view(sizes)))
        if self.add_zero_attn:
            more.append((k.new_zeros(()), v.new_zeros(())))
        for key, value in more:
            shape = (*k.shape[:2], 1, self.head_dim)
            k = torch.cat([k, key.to(k.dtype).expand(shape)], dim=2)
            v = torch.cat([v, value.to(v.dtype).expand(shape)], dim=2)
            mask = None if mask is None else F.pad(mask, (0, 1))
        return k, v, mask


@torch.compiler.disable
def _uncompiled(module: LowPrecisionMultiheadAttention, *arguments: Any) -> Tensor:
    return module._linear(*arguments)


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask to add to scores: minus infinity where a boolean ``mask`` is True; another mask in ``dtype``."""
    if mask.dtype == torch.bool:
        return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, float("-inf"))
    return mask.to(dtype)
