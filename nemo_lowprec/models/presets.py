"""Architectures as data: fields of a transformers config by preset name.

The published sizes are copied from the models' own config.json. ``vocab_size`` is missing where the data decide it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Preset:
    """One architecture.

    Attributes:
        model_type: transformers' name of the architecture, as ``AutoConfig.for_model`` takes it.
        config: fields of the architecture's config class that differ from the defaults.
        summary: one line for people.
    """

    model_type: str
    config: dict[str, Any]
    summary: str


def _llama(
    summary: str, hidden: int, ffn: int, layers: int, heads: int, groups: int, positions: int, tied: bool, **more: Any
) -> Preset:
    """A Llama; ``ffn`` is the intermediate size, ``groups`` counts key-value heads, ``more`` are other fields."""
    config = {
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "max_position_embeddings": positions,
        "tie_word_embeddings": tied,
    }
    return Preset("llama", {**config, **more}, summary)


def _scaled_rope(factor: float) -> dict[str, Any]:
    """The rotary embedding of Llama 3.1 and 3.2, for 128k positions."""
    return {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


_LLAMA3 = {"vocab_size": 128256, "rms_norm_eps": 1e-5}
_ROPE = {"rope_type": "default", "rope_theta": 500000.0}

# fmt: off
PRESETS: dict[str, Preset] = {
    "llama_tiny": _llama(
        "0.8M parameters and the embedding: 200 steps take about a minute on two CPU cores",
        hidden=128, ffn=384, layers=4, heads=4, groups=2, positions=2048, tied=True,
    ),
    "llama_100m": _llama(
        "85M parameters and the embedding: the size of the convergence runs",
        hidden=768, ffn=2048, layers=12, heads=12, groups=12, positions=4096, tied=True,
    ),
    "llama32_1b": _llama(
        "Llama 3.2 1B, 1.24B parameters",
        hidden=2048, ffn=8192, layers=16, heads=32, groups=8, positions=131072, tied=True,
        head_dim=64, rope_parameters=_scaled_rope(32.0), **_LLAMA3,
    ),
    "llama3_8b": _llama(
        "Llama 3 8B, 8.03B parameters",
        hidden=4096, ffn=14336, layers=32, heads=32, groups=8, positions=8192, tied=False,
        rope_parameters=dict(_ROPE), **_LLAMA3,
    ),
    "llama3_70b": _llama(
        "Llama 3 70B, 70.55B parameters",
        hidden=8192, ffn=28672, layers=80, heads=64, groups=8, positions=8192, tied=False,
        rope_parameters=dict(_ROPE), **_LLAMA3,
    ),
    "llama3_405b": _llama(
        "Llama 3.1 405B, 405.85B parameters",
        hidden=16384, ffn=53248, layers=126, heads=128, groups=8, positions=131072, tied=False,
        rope_parameters=_scaled_rope(8.0), **_LLAMA3,
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
# fmt: on


def get_preset(name: str) -> Preset:
    """Return a preset.

    Raises:
        ValueError: no preset has the name.
    """
    if name not in PRESETS:
        raise ValueError(f"Unknown model preset {name!r}. Choose one of: {', '.join(PRESETS)}.")
    return PRESETS[name]
