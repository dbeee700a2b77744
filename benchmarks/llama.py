"""The model of the throughput benchmarks: a transformers Llama of Llama-3-8B's layer shape, 8 layers deep."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

__all__ = ["BATCH", "SEQUENCE", "VOCAB", "Llama", "loader", "loss_of", "new_model"]

VOCAB, SEQUENCE, BATCH = 32_768, 4096, 2


def new_model(dtype: torch.dtype, layers: int = 8, device: str = "cuda") -> torch.nn.Module:
    """A randomly initialised Llama on a device, in training mode."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=4096, intermediate_size=14336, num_hidden_layers=layers, num_attention_heads=32,
        num_key_value_heads=8, max_position_embeddings=SEQUENCE, use_cache=False, attn_implementation="sdpa",
        tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model = LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(previous)
    return model.train()


def loss_of(model: torch.nn.Module, tokens: Tensor) -> Tensor:
    """Next-token cross entropy of [batch, sequence + 1] tokens, in FP32."""
    logits = model(input_ids=tokens[:, :-1]).logits
    return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


class Llama(pl.LightningModule):
    """The model with a fused AdamW."""

    def __init__(self, dtype: torch.dtype, layers: int = 8) -> None:
        super().__init__()
        self.model = new_model(dtype, layers)

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        return loss_of(self.model, batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-5, fused=True)


class _Random(IterableDataset):
    def __iter__(self) -> Iterator[Tensor]:
        generator = torch.Generator().manual_seed(0)
        while True:
            yield torch.randint(VOCAB, (BATCH, SEQUENCE + 1), generator=generator)


def loader() -> DataLoader:
    """Endless batches of random tokens, in page-locked memory: from other memory each copy waits for the GPU."""
    return DataLoader(_Random(), batch_size=None, pin_memory=True)
