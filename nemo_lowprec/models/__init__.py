"""LightningModules that the recipes train.

presets      architectures as data: published sizes, and tiny ones for a machine without a GPU
causal_lm    CausalLM, any causal language model of transformers built from a config
megatron_gpt MegatronGPT, Megatron-core's GPTModel of a Llama-family architecture
megatron_llama, megatron_weights  the config of MegatronGPT, and its weights under transformers' names
loss         next-token cross entropy in FP32, a slice of the tokens at a time
optimizer    parameter groups of the weight decay, linear warm-up, then cosine decay
throughput   tokens per second between two log steps
export       a checkpoint's weights as safetensors that transformers loads
saved_weights, cast  read and round the weights for export
"""

from nemo_lowprec.lazy import lazily

_HOME = {
    "CausalLM": "causal_lm",
    "MegatronGPT": "megatron_gpt",
    "PRESETS": "presets",
    "Preset": "presets",
    "get_preset": "presets",
    "ExportResult": "export",
    "export_checkpoint": "export",
    "muon_groups": "optimizer",
}
__all__ = list(_HOME)

# Lazy, because Lightning and transformers take seconds to import.
__getattr__, __dir__ = lazily(__name__, _HOME)
