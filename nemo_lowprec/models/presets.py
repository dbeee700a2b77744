"""Architectures as data: fields of a transformers config by preset name.

The published sizes are those of the models' own config.json; ``vocab_size`` is missing where the data decide it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["PRESETS", "Preset", "get_preset"]


@dataclass(frozen=True)
class Preset:
    """One architecture.

    Attributes:
        model_type: transformers' name of the architecture, as ``AutoConfig.for_model`` takes it.
        config: fields of its config class that differ from that class' defaults.
        summary: one line for people.
    """

    model_type: str
    config: dict[str, Any]
    summary: str


PRESETS: dict[str, Preset] = {
    "llama_tiny": Preset(
        "llama",
        {
            "hidden_size": 128,
            "intermediate_size": 384,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 2048,
            "tie_word_embeddings": True,
        },
        "0.8M parameters and the embedding: 200 steps take about a minute on two CPU cores",
    ),
    "llama_100m": Preset(
        "llama",
        {
            "hidden_size": 768,
            "intermediate_size": 2048,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
            "num_key_value_heads": 12,
            "max_position_embeddings": 4096,
            "tie_word_embeddings": True,
        },
        "85M parameters and the embedding: the size of the convergence runs",
    ),
    "llama32_1b": Preset(
        "llama",
        {
            "vocab_size": 128256,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 131072,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500000.0,
                "factor": 32.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
            "tie_word_embeddings": True,
        },
        "Llama 3.2 1B, 1.24B parameters",
    ),
    "llama3_8b": Preset(
        "llama",
        {
            "vocab_size": 128256,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 8192,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
            "tie_word_embeddings": False,
        },
        "Llama 3 8B, 8.03B parameters",
    ),
    "llama3_70b": Preset(
        "llama",
        {
            "vocab_size": 128256,
            "hidden_size": 8192,
            "intermediate_size": 28672,
            "num_hidden_layers": 80,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 8192,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
            "tie_word_embeddings": False,
        },
        "Llama 3 70B, 70.55B parameters",
    ),
    "llama3_405b": Preset(
        "llama",
        {
            "vocab_size": 128256,
            "hidden_size": 16384,
            "intermediate_size": 53248,
            "num_hidden_layers": 126,
            "num_attention_heads": 128,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 131072,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
            "tie_word_embeddings": False,
        },
        "Llama 3.1 405B, 405.85B parameters",
    ),
    "gpt2_tiny": Preset(
        "gpt2",
        {"n_embd": 128, "n_layer": 4, "n_head": 4, "n_positions": 1024},
        "GPT-2 at the size of llama_tiny: its layers are transformers' Conv1D",
    ),
    "gpt2": Preset(
        "gpt2",
        {"vocab_size": 50257, "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024},
        "GPT-2 small, 124M parameters",
    ),
}


def get_preset(name: str) -> Preset:
    """Return a preset.

    Raises:
        ValueError: there is no preset of that name.
    """
    if name not in PRESETS:
        raise ValueError(f"Unknown model preset {name!r}. Choose one of: {', '.join(PRESETS)}.")
    return PRESETS[name]
