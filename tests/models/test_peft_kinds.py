"""LoRA on layers of other kinds: embeddings and heads, GPT-2's Conv1D, a vision model with a whole classifier."""

import pytest
import torch
from adapted_models import TOKENS, llama, loss_of
from peft import LoraConfig, get_peft_model
from support import plugin
from transformers import GPT2Config, GPT2LMHeadModel, ViTConfig, ViTForImageClassification

from nemo_lowprec.tensors import Fp8Weight

IMAGES = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(0))


def embeddings_and_head():
    return get_peft_model(llama(torch.bfloat16), LoraConfig(r=8, target_modules=["embed_tokens", "q_proj", "lm_head"]))


def gpt2():
    config = GPT2Config(
        vocab_size=64, n_embd=32, n_layer=1, n_head=2, n_positions=32, use_cache=False, bos_token_id=0, eos_token_id=0
    )
    how = LoraConfig(r=8, target_modules=["c_attn", "c_fc", "c_proj"], fan_in_fan_out=True)
    return get_peft_model(GPT2LMHeadModel(config).bfloat16(), how)


def vision():
    config = ViTConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64, image_size=16, patch_size=8,
        num_labels=4,
    )  # fmt: skip
    how = LoraConfig(r=8, target_modules="all-linear", modules_to_save=["classifier"])
    return get_peft_model(ViTForImageClassification(config), how)


def loss(model):
    if model.config.model_type != "vit":
        return loss_of(model, TOKENS[0])
    return torch.nn.functional.cross_entropy(model(pixel_values=IMAGES).logits.float(), torch.arange(4))


@pytest.mark.parametrize("level", ["te_fp8", "msamp_o2", "bf16_with_fp8_mixed"])
@pytest.mark.parametrize(("make", "in_fp8"), [(embeddings_and_head, 7), (gpt2, 4), (vision, 6)])
def test_it_learns_and_is_merged(make, in_fp8, level):
    torch.manual_seed(0)
    model, engine = make(), plugin(level).engine
    engine.convert(model, torch.device("cpu"))
    engine.settle()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-3)
    engine.attach(optimizer)
    losses = []
    for _ in range(6):
        with engine.forward_context():
            found = loss(model)
        with engine.backward_context():
            found.backward()
        engine.step.run(optimizer)
        optimizer.zero_grad()
        losses.append(found.item())
    assert losses[-1] < losses[0] - 0.1
    assert sum(isinstance(p, Fp8Weight) for p in model.parameters()) == in_fp8
    merged = model.merge_and_unload()
    exported = {name: value.clone() for name, value in merged.state_dict().items()}
    engine.revert()
    for name, value in merged.state_dict().items():
        assert torch.equal(value.float(), exported[name].float()), name
    assert not any(isinstance(p, Fp8Weight) for p in merged.parameters())
