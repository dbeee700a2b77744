"""transformers' Llama with its matrices side by side, as Megatron-core's layers keep them."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["fused_llama"]


def fused_llama(llama: Any) -> Any:
    """The same model with one matrix for queries, keys and values, and one for SwiGLU's gate and values.

    Args:
        llama: a ``LlamaForCausalLM`` without biases and without scaled RoPE.

    Returns:
        a ``Phi3ForCausalLM``, which computes the same.
    """
    from transformers import Phi3Config, Phi3ForCausalLM

    same = (
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "max_position_embeddings", "rms_norm_eps", "initializer_range", "tie_word_embeddings",
        "bos_token_id", "eos_token_id", "pad_token_id",
    )  # fmt: skip
    fused = Phi3ForCausalLM(
        Phi3Config(
            **{name: getattr(llama.config, name) for name in same},
            original_max_position_embeddings=llama.config.max_position_embeddings,
            rope_parameters={**llama.config.rope_parameters, "partial_rotary_factor": 1.0},
            attn_implementation=llama.config._attn_implementation,
        )
    )
    ours, theirs = fused.state_dict(), llama.state_dict()
    for name in ours:
        block, _, last = name.rpartition("self_attn.qkv_proj.")
        if block:
            parts = [f"{block}self_attn.{which}_proj.{last}" for which in "qkv"]
        else:
            block, _, last = name.rpartition("mlp.gate_up_proj.")
            parts = [f"{block}mlp.{which}_proj.{last}" for which in ("gate", "up")] if block else [name]
        ours[name] = torch.cat([theirs.pop(part) for part in parts])
    assert not theirs, f"{list(theirs)} have no place"
    fused.load_state_dict(ours)
    return fused
