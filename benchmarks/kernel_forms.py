"""The forms in which training compiles this package's Triton kernels; ``other_gpus`` compiles them for other GPUs.

    python -m benchmarks.kernel_forms --out benchmarks/results/kernel_forms_h200.jsonl

Three steps of a small Llama and of a small ViT at each level that Hopper runs, on one GPU. A form is what Triton
compiles a kernel for: the types of its arguments, which of them are multiples of 16, its constants, and its options.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, ViTConfig, ViTForImageClassification

import nemo_lowprec
from benchmarks.levels import HOPPER
from benchmarks.record import Record, arguments

_STEPS = 3
_KEPT = ("signature", "constant_keys", "constant_vals", "attrs_keys", "attrs_vals")  # as Triton names them
_OPTIONS = ("num_warps", "num_ctas", "num_stages", "maxnreg", "enable_fp_fusion", "launch_cooperative_grid")
_SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4}


@contextmanager
def collected() -> Iterator[list[dict[str, Any]]]:
    """The different forms that are compiled or read from Triton's cache meanwhile, filled at the end."""
    from triton import knobs

    forms: dict[str, dict[str, Any]] = {}

    def note(*, fn: Any, compile: dict[str, Any], **_: Any) -> None:
        if fn.module.startswith("nemo_lowprec."):
            data = json.loads(compile["specialization_data"])
            form = {"module": fn.module, "kernel": fn.name, **{name: data[name] for name in _KEPT}}
            form["options"] = {
                name: data["options"][name] for name in _OPTIONS if data["options"].get(name) is not None
            }
            forms[json.dumps(form)] = form

    found: list[dict[str, Any]] = []
    before, knobs.runtime.jit_post_compile_hook = knobs.runtime.jit_post_compile_hook, note
    try:
        yield found
    finally:
        knobs.runtime.jit_post_compile_hook = before
        found += forms.values()


def models() -> dict[str, tuple[nn.Module, dict[str, torch.Tensor]]]:
    """A model of language and one of images, each with a batch."""
    tokens = torch.randint(512, (4, 128))
    labels, pixels = torch.randint(10, (16,)), torch.randn(16, 3, 64, 64)
    vit = ViTConfig(**_SIZES, image_size=64, patch_size=8, num_labels=10)
    return {
        "llama": (LlamaForCausalLM(LlamaConfig(**_SIZES, vocab_size=512)), {"input_ids": tokens, "labels": tokens}),
        "vit": (ViTForImageClassification(vit), {"pixel_values": pixels, "labels": labels}),
    }


def train(level: str, model: nn.Module, batch: dict[str, torch.Tensor], device: torch.device) -> None:
    """Train some steps, all layers converted."""
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    every_layer: dict[str, Any] = {"convert": None} if nemo_lowprec.CHART[level].has_fp8 else {}
    model, optimizer = nemo_lowprec.prepare(model, optimizer, level, **every_layer)
    half = torch.float16 if level.startswith("fp16") else torch.bfloat16
    for _ in range(_STEPS):
        with torch.autocast(device.type, half):
            loss = model(**{name: tensor.to(device) for name, tensor in batch.items()}).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def main() -> None:
    args = arguments(__doc__.split("\n")[0], "kernel_forms_h200.jsonl").parse_args()
    record = Record(args.out)
    with collected() as forms:
        for level in HOPPER:
            for model, batch in models().values():
                train(level, model, batch, torch.device("cuda"))
    for form in forms:
        record.add(benchmark="kernel_form", **form)


if __name__ == "__main__":
    main()
