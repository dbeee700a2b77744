"""Tiny models of transformers under adapters of PEFT, for several files of tests."""

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from peft import (
    AdaLoraConfig,
    IA3Config,
    LoraConfig,
    PrefixTuningConfig,
    PromptTuningConfig,
    TaskType,
    get_peft_model,
)
from transformers import LlamaConfig, LlamaForCausalLM

STEPS = 24
METHODS = {
    "lora": lambda: LoraConfig(r=8, lora_alpha=16, target_modules="all-linear"),
    "dora": lambda: LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", use_dora=True),
    "whole head": lambda: LoraConfig(r=8, target_modules="all-linear", modules_to_save=["lm_head"]),
    "adalora": lambda: AdaLoraConfig(target_modules="all-linear", total_step=STEPS, init_r=8, target_r=4),
    "ia3": lambda: IA3Config(task_type=TaskType.CAUSAL_LM),
    "prompt": lambda: PromptTuningConfig(task_type=TaskType.CAUSAL_LM, num_virtual_tokens=4),
    "prefix": lambda: PrefixTuningConfig(task_type=TaskType.CAUSAL_LM, num_virtual_tokens=4),
}
TOKENS = torch.randint(0, 8, (8, 4, 17), generator=torch.Generator().manual_seed(1))


def llama(dtype=torch.float32, layers=1):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=layers, num_attention_heads=2,
        initializer_range=0.2, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(dtype)


def adapted(method="lora", dtype=torch.float32, layers=1):
    model = llama(dtype, layers)
    return get_peft_model(model, METHODS[method]())


def loss_of(model, tokens):
    logits = model(input_ids=tokens[:, :-1]).logits[:, -tokens.shape[1] + 1 :]  # without a prompt's
    return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def base_layers(model):
    """The layers that adapters wrap, by name."""
    return {name: module for name, module in model.named_modules() if name.endswith(".base_layer")}


class Adapted(pl.LightningModule):
    """Trains the adapters of a model."""

    def __init__(self, method="lora", dtype=torch.float32):
        super().__init__()
        self.model = adapted(method, dtype)
        self.losses = []

    def training_step(self, batch, index):
        loss = loss_of(self.model, batch)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)
