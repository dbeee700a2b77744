"""The models of ``benchmarks.everyday``, with random FP32 weights, and a random batch of each.

Without a GPU every model is small (two narrow blocks a stack, a batch of two), so that the script can be tried.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import llama
from benchmarks.measure import DEVICE

__all__ = ["MODELS", "Batch", "Task", "loss_of"]

SMALL = DEVICE.type == "cpu"
MASKED = 0.15  # of BERT's tokens: those that have a loss
IGNORED = -100  # target of a token without a loss


@dataclass(frozen=True)
class Batch:
    """Keyword arguments of a model's forward, and the class of each row of its logits."""

    inputs: dict[str, Tensor]
    targets: Tensor  # int64, of the shape of the logits without their last dimension


@dataclass(frozen=True)
class Task:
    """How a model and its batch are made, on the GPU.

    ``te_layers`` makes the same architecture from Transformer Engine's own layers.
    """

    model: Callable[[], nn.Module]
    batch: Callable[[], Batch]
    te_layers: Callable[[], nn.Module] | None = None


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    """Cross entropy in FP32."""
    out = model(**batch.inputs)
    logits = getattr(out, "logits", out)
    return F.cross_entropy(logits.flatten(0, -2).float(), batch.targets.flatten(), ignore_index=IGNORED)


def _sizes(full: dict[str, Any], **small: Any) -> dict[str, Any]:
    return full | small if SMALL else full


def _images(name: str, batch: int) -> Batch:
    """[batch, 3, 224, 224] images of 1000 classes."""
    batch = 2 if SMALL else batch
    return Batch({name: torch.randn(batch, 3, 224, 224, device=DEVICE)}, _tokens(1000, batch))


def _tokens(vocabulary: int, *size: int) -> Tensor:
    return torch.randint(vocabulary, size, device=DEVICE)


def _timm_vit(name: str) -> nn.Module:
    import timm

    return timm.create_model(name, **_sizes({}, embed_dim=64, depth=2, num_heads=2))


def _of_memory(name: str) -> nn.Module:
    """Swin-1.0B or DeiT-1.2B."""
    if not SMALL:
        from benchmarks.memory import new_model

        return new_model(name)
    if name == "deit_1b":
        return _timm_vit("vit_base_patch16_224")
    from timm.models.swin_transformer import SwinTransformer

    return SwinTransformer(embed_dim=16, depths=(2, 2, 2, 2), num_heads=(1, 2, 4, 8))


def _of_transformers(name: str, config: Callable[[], dict[str, Any]]) -> nn.Module:
    """The model ``name`` of transformers; its configuration has the class name's part before ``For``."""
    import transformers

    settings = getattr(transformers, name.split("For")[0] + "Config")(**config(), attn_implementation="sdpa")
    return getattr(transformers, name)(settings)


def _bert() -> dict[str, Any]:
    full = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
    return _sizes(full, hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=128)


def _bert_batch() -> Batch:
    """[32, 512] tokens."""
    size = (2, 64) if SMALL else (32, 512)
    tokens = _tokens(30_522, *size)
    return Batch({"input_ids": tokens}, tokens.masked_fill(torch.rand(size, device=DEVICE) > MASKED, IGNORED))


def _vit() -> dict[str, Any]:
    return _bert() | {"num_labels": 1000}  # of the same shape


def _whisper() -> dict[str, Any]:
    def both(**stack: int) -> dict[str, int]:
        return {f"{side}_{name}": value for side in ("encoder", "decoder") for name, value in stack.items()}

    full = both(layers=12, attention_heads=12, ffn_dim=3072) | {"d_model": 768, "use_cache": False}
    few = both(layers=2, attention_heads=2, ffn_dim=128)
    return _sizes(full, **few, d_model=64, max_source_positions=50)


def _whisper_batch() -> Batch:
    """[16, 80, 3000] log-mel features and [16, 448] tokens."""
    batch, frames, length = (2, 100, 32) if SMALL else (16, 3000, 448)
    tokens = _tokens(51_865, batch, length + 1)
    features = torch.randn(batch, 80, frames, device=DEVICE)
    return Batch({"input_features": features, "decoder_input_ids": tokens[:, :-1]}, tokens[:, 1:])


@dataclass(frozen=True)
class _Llama:
    """Widths of a Llama; ``groups`` counts its heads of keys and values."""

    hidden: int
    ffn: int
    layers: int
    heads: int
    groups: int
    vocabulary: int = 32_000
    tied: bool = False

    def config(self) -> dict[str, Any]:
        full = {
            "hidden_size": self.hidden, "intermediate_size": self.ffn, "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads, "num_key_value_heads": self.groups, "vocab_size": self.vocabulary,
            "max_position_embeddings": llama.SEQUENCE, "tie_word_embeddings": self.tied, "use_cache": False,
        }  # fmt: skip
        return _sizes(
            full, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=2, vocab_size=256,
        )  # fmt: skip

    def batch(self, batch: int, sequence: int) -> Batch:
        """[batch, sequence] tokens, and those that follow them."""
        batch, sequence = (2, 64) if SMALL else (batch, sequence)
        tokens = _tokens(self.config()["vocab_size"], batch, sequence + 1)
        return Batch({"input_ids": tokens[:, :-1]}, tokens[:, 1:])

    def task(self, batch: int, sequence: int) -> Task:
        return Task(partial(_of_transformers, "LlamaForCausalLM", self.config), partial(self.batch, batch, sequence))


class _TELlama(nn.Module):
    """A Llama of ``te.TransformerLayer``, which has kernels of its own for attention, too."""

    def __init__(self, shape: _Llama) -> None:
        super().__init__()
        import transformer_engine.pytorch as te

        self.embedding = nn.Embedding(shape.vocabulary, shape.hidden)
        self.layers = nn.ModuleList(
            te.TransformerLayer(
                shape.hidden, shape.ffn, shape.heads, num_gqa_groups=shape.groups, layernorm_epsilon=1e-6,
                hidden_dropout=0.0, attention_dropout=0.0, layer_number=i + 1, self_attn_mask_type="causal",
                params_dtype=torch.float32, fuse_qkv_params=True, bias=False, activation="swiglu",
                normalization="RMSNorm", attn_input_format="bshd",
            )
            for i in range(shape.layers)
        )  # fmt: skip
        self.rotary = te.RotaryPositionEmbedding(shape.hidden // shape.heads)
        self.norm = te.RMSNorm(shape.hidden, eps=1e-6)
        self.head = nn.Linear(shape.hidden, shape.vocabulary, bias=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        """[batch, sequence] tokens to [batch, sequence, vocabulary] logits."""
        x, angles = self.embedding(input_ids), self.rotary(input_ids.shape[1])
        for layer in self.layers:
            x = layer(x, rotary_pos_emb=angles)
        return self.head(self.norm(x))


_LLAMA_100M = _Llama(768, 2048, 12, 12, 12, tied=True)  # 85M and the embedding
_LLAMA_350M = _Llama(1024, 2816, 24, 16, 16)
_LLAMA_1B = _Llama(2048, 5632, 22, 32, 4)
_LLAMA_8B = _Llama(4096, 14336, 8, 32, 8, llama.VOCAB)  # that of benchmarks.llama

MODELS: dict[str, Task] = {
    "timm ViT-B, batch 128": Task(partial(_timm_vit, "vit_base_patch16_224"), partial(_images, "x", 128)),
    "timm ViT-L, batch 64": Task(partial(_timm_vit, "vit_large_patch16_224"), partial(_images, "x", 64)),
    "timm Swin-1.0B, batch 16": Task(partial(_of_memory, "swin_1b"), partial(_images, "x", 16)),
    "timm DeiT-1.2B, batch 32": Task(partial(_of_memory, "deit_1b"), partial(_images, "x", 32)),
    "BERT-large, 32 x 512": Task(partial(_of_transformers, "BertForMaskedLM", _bert), _bert_batch),
    "transformers ViT-L, batch 64": Task(
        partial(_of_transformers, "ViTForImageClassification", _vit), partial(_images, "pixel_values", 64)
    ),
    "Whisper-small, batch 16": Task(
        partial(_of_transformers, "WhisperForConditionalGeneration", _whisper), _whisper_batch
    ),
    "Llama 100M, 8 x 2048": _LLAMA_100M.task(8, 2048),
    "Llama 350M, 8 x 2048": _LLAMA_350M.task(8, 2048),
    "Llama 1.1B, 1 x 512": _LLAMA_1B.task(1, 512),
    "Llama 1.1B, 4 x 2048": _LLAMA_1B.task(4, 2048),
    "Llama 8B-shaped, 2 x 4096": Task(
        partial(_of_transformers, "LlamaForCausalLM", _LLAMA_8B.config),
        partial(_LLAMA_8B.batch, llama.BATCH, llama.SEQUENCE),
        partial(_TELlama, _LLAMA_8B),
    ),
}
