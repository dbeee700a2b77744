"""Models of torch's own modules, each with a loss of one batch: attention, recurrent layers and others, and a DiT."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

BATCH, LENGTH, WIDTH, HEADS, CLASSES = 4, 8, 32, 4, 8

Batch = dict[str, Tensor]
Call = Callable[[Any, Tensor, Batch], Tensor]


def batch() -> Batch:
    """Tokens with padding, [4, 8], classes, and latents with noise and times for flow matching."""
    drawn = torch.Generator().manual_seed(5)
    padding = torch.zeros(BATCH, LENGTH, dtype=torch.bool)
    padding[0, -3:] = padding[2, -1:] = True
    return {
        "tokens": torch.randint(0, 16, (BATCH, LENGTH), generator=drawn),
        "classes": torch.arange(BATCH),
        "padding": padding,
        "latents": torch.randn(BATCH, 4, 16, 16, generator=drawn),
        "noise": torch.randn(BATCH, 4, 16, 16, generator=drawn),
        "times": torch.rand(BATCH, generator=drawn),
    }


class Classifier(nn.Module):
    """An embedding, the module in question, and a head.

    Args:
        body: makes the module.
        call: the module's output [batch, out] for embedded tokens [batch, length, width] and the whole batch.
    """

    def __init__(self, body: Callable[[], nn.Module], call: Call, out: int) -> None:
        super().__init__()
        self.table = nn.Embedding(16, WIDTH)
        self.body, self.call = body(), call
        self.head = nn.Linear(out, CLASSES)

    def forward(self, batch: Batch) -> Tensor:
        return F.cross_entropy(self.head(self.call(self.body, self.table(batch["tokens"]), batch)), batch["classes"])


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    """The models compute their losses."""
    return model(batch)  # type: ignore[no-any-return]


def mean(x: Tensor, batch: Batch) -> Tensor:
    """Of the tokens that are no padding, for which torch's fast path computes zeros."""
    return x.masked_fill(batch["padding"][..., None], 0.0).mean(1)


# Attention


class BatchFirst(nn.MultiheadAttention):
    """A subclass with torch's forward."""

    def __init__(self) -> None:
        super().__init__(WIDTH, HEADS, batch_first=True)


class OwnLayer(nn.TransformerEncoderLayer):
    """A subclass with a forward of its own."""

    def forward(self, src: Tensor, src_mask: Any = None, src_key_padding_mask: Any = None, is_causal: bool = False):
        src = src + self._sa_block(self.norm1(src), src_mask, src_key_padding_mask, is_causal=is_causal)
        return src + self._ff_block(self.norm2(src))


class AttentionPool(nn.Module):
    """Reads the weights of its layers, and calls none of them, as OpenAI's CLIP does."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.c_proj = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(0, 1)
        biases = torch.cat([self.q_proj.bias, self.k_proj.bias, self.v_proj.bias])
        pooled, _ = F.multi_head_attention_forward(
            x[:1], x, x, WIDTH, HEADS, None, biases, None, None, False, 0.0, self.c_proj.weight, self.c_proj.bias,
            self.training, need_weights=False, use_separate_proj_weight=True, q_proj_weight=self.q_proj.weight,
            k_proj_weight=self.k_proj.weight, v_proj_weight=self.v_proj.weight,
        )  # fmt: skip
        return pooled[0]


def layer(kind: Any = nn.TransformerEncoderLayer, **options: Any) -> nn.Module:
    return kind(WIDTH, HEADS, 2 * WIDTH, **{"dropout": 0.0, "batch_first": True} | options)  # type: ignore[no-any-return]


def padded(model: Any, x: Tensor, batch: Batch) -> Tensor:
    return mean(model(x, src_key_padding_mask=batch["padding"]), batch)


def causal(model: Any, x: Tensor, batch: Batch) -> Tensor:
    mask = nn.Transformer.generate_square_subsequent_mask(LENGTH, device=x.device)
    return model(x, mask=mask, is_causal=True).mean(1)  # type: ignore[no-any-return]


def translated(model: Any, x: Tensor, batch: Batch) -> Tensor:
    mask = nn.Transformer.generate_square_subsequent_mask(LENGTH, device=x.device)
    padding = batch["padding"]
    out = model(x, x, src_key_padding_mask=padding, tgt_mask=mask, memory_key_padding_mask=padding, tgt_is_causal=True)
    return out.mean(1)  # type: ignore[no-any-return]


def attended(model: Any, x: Tensor, batch: Batch, **options: Any) -> Tensor:
    return mean(model(x, x, x, key_padding_mask=batch["padding"], **options)[0], batch)


# Recurrent layers


class Cells(nn.Module):
    """A cell, step by step."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.cell = kind(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        state = None
        for step in x.unbind(1):
            state = self.cell(step, state)
        return state[0] if isinstance(state, tuple) else state  # type: ignore[return-value]


def last(model: Any, x: Tensor, batch: Batch) -> Tensor:
    return model(x)[0][:, -1]  # type: ignore[no-any-return]


def flattened(model: Any, x: Tensor, batch: Batch) -> Tensor:
    """As many models call it, which moves the weights in every pass on a GPU."""
    model.flatten_parameters()
    return last(model, x, batch)


def packed(model: Any, x: Tensor, batch: Batch) -> Tensor:
    lengths = (~batch["padding"]).sum(1).cpu()
    out, _ = model(pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False))
    return pad_packed_sequence(out, batch_first=True)[0].sum(1) / 4


def recurrent(kind: Any, **options: Any) -> Callable[[], nn.Module]:
    return lambda: kind(WIDTH, WIDTH, batch_first=True, **options)


# Others


def called(model: Any, x: Tensor, batch: Batch) -> Tensor:
    return model(x)  # type: ignore[no-any-return]


def pooled(model: Any, x: Tensor, batch: Batch) -> Tensor:
    return model(x.mean(1))  # type: ignore[no-any-return]


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv1d(LENGTH, 8, 3, padding=1), nn.BatchNorm1d(8), nn.ReLU(), nn.ConvTranspose1d(8, 8, 3, padding=1),
        nn.Flatten(),
    )  # fmt: skip


def constrained() -> nn.Module:
    return nn.Sequential(
        parametrizations.spectral_norm(nn.Linear(WIDTH, 64)), nn.ReLU(), nn.utils.spectral_norm(nn.Linear(64, WIDTH))
    )


# Name: what makes the module, how it is called, the size of its output.
KINDS: dict[str, tuple[Callable[[], nn.Module], Call, int]] = {
    "attention": (lambda: nn.MultiheadAttention(WIDTH, HEADS, batch_first=True), attended, WIDTH),
    "attention of a subclass": (BatchFirst, partial(attended, need_weights=False), WIDTH),
    "attention with more keys": (
        lambda: nn.MultiheadAttention(WIDTH, HEADS, add_bias_kv=True, add_zero_attn=True, batch_first=True),
        attended, WIDTH,
    ),
    "attention of other sizes": (
        lambda: nn.MultiheadAttention(WIDTH, HEADS, kdim=64, vdim=64, batch_first=True),
        lambda m, x, b: m(x, (two := torch.cat([x, x], -1)), two)[0].mean(1), WIDTH,
    ),
    "attention pooling": (AttentionPool, called, WIDTH),
    "encoder": (lambda: nn.TransformerEncoder(layer(), 2), padded, WIDTH),
    "encoder, norms first": (
        lambda: nn.TransformerEncoder(layer(activation="gelu", norm_first=True), 2, nn.LayerNorm(WIDTH), False), causal,
        WIDTH,
    ),
    "encoder of a subclass": (lambda: nn.TransformerEncoder(layer(OwnLayer), 2), padded, WIDTH),
    "encoder and decoder": (
        lambda: nn.Transformer(WIDTH, HEADS, 1, 1, 2 * WIDTH, 0.0, batch_first=True), translated, WIDTH,
    ),
    "LSTM": (recurrent(nn.LSTM, num_layers=2, bidirectional=True), last, 2 * WIDTH),
    "LSTM, projected": (recurrent(nn.LSTM, proj_size=16), last, 16),
    "LSTM, packed": (recurrent(nn.LSTM), packed, WIDTH),
    "LSTM, flattened": (recurrent(nn.LSTM), flattened, WIDTH),
    "GRU": (recurrent(nn.GRU, bias=False), last, WIDTH),
    "GRU, packed": (recurrent(nn.GRU), packed, WIDTH),
    "RNN": (recurrent(nn.RNN), flattened, WIDTH),
    "LSTMCell": (lambda: Cells(nn.LSTMCell), called, WIDTH),
    "GRUCell": (lambda: Cells(nn.GRUCell), called, WIDTH),
    "RNNCell": (lambda: Cells(nn.RNNCell), called, WIDTH),
    "Bilinear": (lambda: nn.Bilinear(WIDTH, WIDTH, WIDTH), lambda m, x, b: m(x[:, 0], x[:, 1]), WIDTH),
    "EmbeddingBag": (lambda: nn.EmbeddingBag(16, WIDTH), lambda m, x, b: m(b["tokens"]) + x.mean(1), WIDTH),
    "convolutions": (convolutions, called, 8 * WIDTH),
    "spectral norm": (constrained, pooled, WIDTH),
    "orthogonal": (lambda: parametrizations.orthogonal(nn.Linear(WIDTH, WIDTH)), pooled, WIDTH),
}  # fmt: skip


def rate_of(kind: str) -> float:
    """AdamW's learning rate, at which FP32's own loss falls without a jump."""
    return 3e-3 if kind == "spectral norm" else 1e-2


def classifier(kind: str) -> Callable[[], nn.Module]:
    """Makes the model of a kind."""
    return lambda: Classifier(*KINDS[kind])


# A diffusion transformer


class Block(nn.Module):
    """A transformer block whose norms have no parameters: shifts, scales and gates are computed of the condition."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = (nn.LayerNorm(WIDTH, elementwise_affine=False, eps=1e-6) for _ in range(2))
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU("tanh"), nn.Linear(2 * WIDTH, WIDTH))
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(WIDTH, 6 * WIDTH))

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(condition)[:, None].chunk(6, -1)
        q, k, v = self.qkv(self.norm1(x) * (1 + scale1) + shift1).unflatten(-1, (3, HEADS, -1)).unbind(2)
        heads = F.scaled_dot_product_attention(*(each.transpose(1, 2) for each in (q, k, v)))
        x = x + gate1 * self.proj(heads.transpose(1, 2).flatten(2))
        return x + gate2 * self.mlp(self.norm2(x) * (1 + scale2) + shift2)


class DiT(nn.Module):
    """Predicts the velocity of flow matching on latents [batch, 4, 16, 16]; the loss is its squared error.

    Modulations and the last layer are zero at first, so that blocks are identities (adaLN-Zero).
    """

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(4, WIDTH, 4, 4)
        self.position = nn.Parameter(torch.randn(1, 16, WIDTH) * 0.02)
        self.time = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))
        self.labels = nn.Embedding(CLASSES + 1, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH, elementwise_affine=False, eps=1e-6)
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(WIDTH, 2 * WIDTH))
        self.out = nn.Linear(WIDTH, 4 * 16)
        for zero in (self.out, self.modulation[1], *(block.modulation[1] for block in self.blocks)):
            nn.init.zeros_(zero.weight)
            nn.init.zeros_(zero.bias)

    def velocity(self, x: Tensor, times: Tensor, classes: Tensor) -> Tensor:
        frequencies = torch.exp(torch.arange(WIDTH // 2, device=x.device) * (-9.2 / (WIDTH // 2)))
        angles = 1000 * times[:, None] * frequencies
        condition = self.time(torch.cat([angles.cos(), angles.sin()], -1)) + self.labels(classes)
        h = self.patches(x).flatten(2).transpose(1, 2) + self.position
        for block in self.blocks:
            h = block(h, condition)
        shift, scale = self.modulation(condition)[:, None].chunk(2, -1)
        out = self.out(self.norm(h) * (1 + scale) + shift)  # [batch, 4 · 4 patches, 4 · 4 · 4]
        return out.unflatten(1, (4, 4)).unflatten(-1, (4, 4, 4)).permute(0, 3, 1, 4, 2, 5).flatten(4).flatten(2, 3)

    def forward(self, batch: Batch) -> Tensor:
        times, latents, noise = batch["times"], batch["latents"], batch["noise"]
        along = times[:, None, None, None]
        found = self.velocity((1 - along) * noise + along * latents, times, batch["classes"])
        return F.mse_loss(found.float(), latents - noise)
