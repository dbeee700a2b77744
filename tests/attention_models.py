"""Attention modules with one linear layer for queries, keys and values, as timm has them; their conversion."""

import torch
import torch.nn.functional as F
from torch import nn

from nemo_lowprec.chart.groups import LayerFilter
from nemo_lowprec.chart.recipe import Recipe
from nemo_lowprec.compute import ReferenceBackend, convert_layers, patterns
from nemo_lowprec.compute.operands import new_histories


def convert_without(pattern, model, half, scaling="delayed", **layers):
    """(conversion of ``model``, histories) by all patterns but those of the class ``pattern``; None leaves none out."""
    recipe = Recipe(scaling)
    histories = new_histories(recipe)
    every = patterns.PATTERNS
    patterns.PATTERNS = [p for p in every if pattern is None or not isinstance(p, pattern)]
    try:
        return convert_layers(
            model, half, recipe, ReferenceBackend(), None, LayerFilter(**layers), histories
        ), histories
    finally:
        patterns.PATTERNS = every


class Attention(nn.Module):
    """timm's ``Attention``, with its options."""

    def __init__(self, dim=48, num_heads=3, qk_norm=False, fused=True, drop=0.0):
        super().__init__()
        self.num_heads, self.head_dim, self.fused_attn = num_heads, dim // num_heads, fused
        self.scale = self.head_dim**-0.5
        self.qkv = nn.Linear(dim, dim * 3)
        self.q_norm = nn.LayerNorm(self.head_dim) if qk_norm else nn.Identity()
        self.k_norm = nn.LayerNorm(self.head_dim) if qk_norm else nn.Identity()
        self.attn_drop = nn.Dropout(drop)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x, attn_mask=None):
        B, N, C = x.shape
        qkv = self.qkv(x).reshape(B, N, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        q, k = self.q_norm(q), self.k_norm(k)
        if self.fused_attn:
            p = self.attn_drop.p if self.training else 0.0
            x = F.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask, dropout_p=p)
        else:
            q = q * self.scale
            attn = (q @ k.transpose(-2, -1)).softmax(dim=-1)
            x = self.attn_drop(attn) @ v
        return self.proj(x.transpose(1, 2).reshape(B, N, C))


class Window(Attention):
    """Swin's ``WindowAttention``: a bias of a fixed number of tokens, q scaled in place, parts by their index."""

    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.randn(3, 16, 16, generator=torch.Generator().manual_seed(0)))

    def forward(self, x):
        B_, N, C = x.shape
        qkv = self.qkv(x).reshape(B_, N, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        q, k, v = qkv[0], qkv[1], qkv[2]
        q *= self.scale
        attn = (q @ k.transpose(-2, -1) + self.bias.to(q.dtype)).softmax(-1)
        return self.proj((attn @ v).transpose(1, 2).reshape(B_, N, C))
