"""A small Llama on the bytes of Python's ``argparse``, by transformers' Trainer at a level.

python examples/transformers_llama.py msamp_o2
torchrun --nproc-per-node 2 examples/transformers_llama.py bf16_with_fp8_mixed
"""

import argparse
import sys
from pathlib import Path

from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

from nemo_lowprec.transformers import LowPrecisionTrainer


def main(level: str = "msamp_o2", folder: str = "outputs/transformers_llama", steps: int = 40) -> float:
    """Train at ``level`` and save the model in ``folder``; returns the loss of the model that is read from there."""
    text = list(Path(argparse.__file__).read_bytes())
    data = [{"input_ids": text[i : i + 64], "labels": text[i : i + 64]} for i in range(0, len(text) - 64, 64)]
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, max_position_embeddings=64, **sizes))
    half = {"fp16": level.startswith("fp16")}
    arguments = TrainingArguments(folder, max_steps=steps, per_device_train_batch_size=16, learning_rate=3e-3, **half)
    trainer = LowPrecisionTrainer(model, arguments, train_dataset=data, level=level)
    trainer.train()
    trainer.save_model()
    trainer.accelerator.wait_for_everyone()
    plain = LlamaForCausalLM.from_pretrained(folder)
    loss = plain(**trainer.data_collator(data[:16])).loss.item()
    trainer.accelerator.print(f"{level}: loss {loss:.3f}")
    return loss


if __name__ == "__main__":
    main(*sys.argv[1:3])
