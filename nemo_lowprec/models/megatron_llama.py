"""Builds Megatron-core's ``GPTModel`` from the transformers config of a Llama-family architecture."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F

from nemo_lowprec.lines import one_line

# transformers' model types of this shape, with the fields of TransformerConfig that follow from the type alone.
_FAMILY: dict[str, dict[str, bool]] = {
    "llama": {},
    "mistral": {},
    "qwen2": {"add_qkv_bias": True},
    "qwen3": {"qk_layernorm": True},
}

# Fields of a transformers config that GPTModel follows at one value only.
_PLAIN = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "sliding_window": None}

# RotaryEmbedding of Megatron-core (0.16 to 0.19) takes the factor only, and has these values fixed.
_LLAMA3_ROPE = {"low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 8192}

# Fused kernels, on by default and no part of the architecture: SwiGLU and residual addition are compiled by torch; RoPE
# is Transformer Engine's kernel, which rotates in FP32 whatever the dtype of queries and keys.
_FUSIONS = {"bias_activation_fusion": True, "bias_dropout_fusion": True, "apply_rope_fusion": True}
_ROUTER = {"moe_router_dtype": "fp32"}  # rounded scores are often equal


@dataclass(frozen=True)
class GptArchitecture:
    """One architecture in Megatron-core's terms."""

    transformer: dict[str, Any]  # the fields of ``TransformerConfig`` that follow from the architecture
    gpt: dict[str, Any]  # the arguments of ``GPTModel`` that follow from the architecture, with ``vocab_size``


def gpt_architecture(hf_config: Any) -> GptArchitecture:
    """The architecture of a transformers config.

    Args:
        hf_config: ``LlamaConfig``, ``MistralConfig``, ``Qwen2Config`` or ``Qwen3Config``, as ``AutoConfig.for_model``
            makes them.

    Raises:
        ValueError: another model type, or a field whose value Megatron-core's layers cannot follow.
    """
    kind = hf_config.model_type
    if kind not in _FAMILY:
        raise ValueError(f"No GPTModel is made of model_type {kind!r}: {', '.join(_FAMILY)} work.")
    for name, value in _PLAIN.items():
        found = getattr(hf_config, name, value)
        if found != value:
            raise ValueError(f"{name}={found!r} has no counterpart in the GPTModel that is made here: set {value!r}.")
    heads = hf_config.num_attention_heads
    transformer = {
        "num_layers": hf_config.num_hidden_layers,
        "hidden_size": hf_config.hidden_size,
        "ffn_hidden_size": hf_config.intermediate_size,
        "num_attention_heads": heads,
        "num_query_groups": hf_config.num_key_value_heads,
        "kv_channels": getattr(hf_config, "head_dim", None) or hf_config.hidden_size // heads,
        "normalization": "RMSNorm",
        "layernorm_epsilon": hf_config.rms_norm_eps,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": False,
        "add_qkv_bias": False,
        "qk_layernorm": False,
        "attention_dropout": hf_config.attention_dropout,
        "hidden_dropout": 0.0,
        "init_method_std": hf_config.initializer_range,
        **_FAMILY[kind],
    }
    gpt = {
        "vocab_size": hf_config.vocab_size,
        "max_sequence_length": hf_config.max_position_embeddings,
        "position_embedding_type": "rope",
        **_rope(dict(hf_config.rope_parameters)),
        "share_embeddings_and_output_weights": hf_config.tie_word_embeddings,
    }
    return GptArchitecture(transformer, gpt)


def _rope(rope: dict[str, Any]) -> dict[str, Any]:
    """GPTModel's arguments of transformers' ``rope_parameters``."""
    kind = rope["rope_type"]
    arguments: dict[str, Any] = {"rotary_base": rope["rope_theta"]}
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError("partial_rotary_factor other than 1: Llama's layers rotate whole heads.")
    if kind == "linear":
        arguments["seq_len_interpolation_factor"] = rope["factor"]
    elif kind == "llama3":
        for name, value in _LLAMA3_ROPE.items():
            if rope[name] != value:
                raise ValueError(
                    f"rope_type llama3 with {name}={rope[name]}: Megatron-core has it fixed at {value}, and only the "
                    "factor may be chosen."
                )
        arguments |= {"rope_scaling": True, "rope_scaling_factor": rope["factor"]}
    elif kind != "default":
        raise ValueError(f"rope_type {kind!r} is none of Megatron-core's for this model: default, linear, llama3 work.")
    return arguments


def build_gpt(
    architecture: GptArchitecture,
    fields: dict[str, Any],
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: int | None = None,
) -> Any:
    """Build this rank's part of the GPTModel on its GPU, with Transformer Engine's layers and random weights.

    The caller has initialized ``megatron.core.parallel_state`` and Megatron-core's random states
    (``model_parallel_cuda_manual_seed``). The logits of the last stage have the shape [batch, sequence, vocabulary /
    tensor-parallel size].

    Args:
        architecture: of the whole model.
        fields: the other fields of ``TransformerConfig``: dtypes, parallel sizes, recomputation, fusions to turn off.
        pre_process: whether the part has the embedding, as the first pipeline stage does.
        post_process: whether the part has the last norm and the head, as the last pipeline stage does.
        vp_stage: index of the virtual pipeline stage; None without virtual stages.

    Raises:
        ValueError: the vocabulary does not divide by the tensor-parallel ranks, or TransformerConfig refuses a value.
        TypeError: an unknown field, or a field that follows from the architecture.
    """
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.transformer import TransformerConfig

    try:
        config = TransformerConfig(**architecture.transformer, **{**_FUSIONS, **_ROUTER, **fields})
    except Exception as error:  # assertions among them
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"Megatron-core makes no TransformerConfig of this: {one_line(error)}") from error
    rows, ranks = architecture.gpt["vocab_size"], config.tensor_model_parallel_size
    if rows % ranks:
        raise ValueError(f"A vocabulary of {rows} does not split over {ranks} tensor-parallel ranks: pad it.")
    return GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=vp_stage),
        pre_process=pre_process,
        post_process=post_process,
        parallel_output=True,
        vp_stage=vp_stage,
        **architecture.gpt,
    )
