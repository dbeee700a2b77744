"""A Llama-family GPTModel's architecture and weights, from transformers' and back, without a GPU.

The layout is tested by a forward in plain torch that reads Megatron-core's names only, from the parts that
tensor-parallel ranks hold, against transformers' logits.
"""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save
from transformers import AutoConfig, AutoModelForCausalLM

from nemo_lowprec.models import PRESETS
from nemo_lowprec.models.megatron_llama import build_gpt, gpt_architecture
from nemo_lowprec.models.megatron_weights import from_transformers, of_stage, part_of, to_transformers

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:megatron")  # of what is not installed

LLAMAS = [name for name, preset in PRESETS.items() if preset.model_type == "llama"]
LLAMA3_ROPE = {**PRESETS["llama32_1b"].config["rope_parameters"], "rope_theta": 100.0}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 100.0, "factor": 4.0}
MODELS = {
    "llama": ("llama", {}),
    "llama_tied": ("llama", {"tie_word_embeddings": True}),
    "llama_rope_llama3": ("llama", {"rope_parameters": LLAMA3_ROPE, "max_position_embeddings": 16384}),
    "llama_rope_linear": ("llama", {"rope_parameters": LINEAR_ROPE}),
    "mistral": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
}


def config_of(name, **fields):
    """4 heads in 2 query groups, of a size that is not hidden_size / heads, and weights that make heads attend."""
    kind, own = MODELS[name]
    small = {
        "vocab_size": 96,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "initializer_range": 0.2,
        "attn_implementation": "eager",
    }
    return AutoConfig.for_model(kind, **{**small, **own, **fields})


def model_of(config, dtype=torch.float64):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    with torch.no_grad():
        for param in model.parameters():
            if param.dim() == 1:  # norms and biases, which start alike
                param.uniform_(0.5, 1.5)
    return model


def megatron_logits(shards, architecture, ids):
    """Logits [batch, sequence, vocabulary] of what each tensor-parallel rank holds, by Megatron-core's names."""
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    config, ranks = architecture.transformer, len(shards)
    rope = {k: v for k, v in architecture.gpt.items() if k.startswith(("rotary", "rope_", "seq_len"))}
    frequencies = RotaryEmbedding(config["kv_channels"], rotary_percent=1.0, use_cpu_initialization=True, **rope)
    angles = torch.cat(2 * [frequencies.get_freqs_non_repeated(ids.shape[1])], dim=-1)
    groups, head = config["num_query_groups"] // ranks, config["kv_channels"]
    queries = config["num_attention_heads"] // config["num_query_groups"]

    def norm(x, weight):
        return x * (x.square().mean(-1, keepdim=True) + config["layernorm_epsilon"]).rsqrt() * weight

    def rotated(x):
        first, second = x.chunk(2, dim=-1)
        return x * angles.cos().to(x.dtype) + torch.cat((-second, first), -1) * angles.sin().to(x.dtype)

    def attention(x, state, layer):
        qkv = F.linear(x, state[f"{layer}.linear_qkv.weight"], state.get(f"{layer}.linear_qkv.bias"))
        qkv = qkv.unflatten(-1, (groups, queries + 2, head)).permute(2, 3, 0, 1, 4)  # group, head, batch, sequence
        q, k, v = qkv[:, :queries], qkv[:, queries : queries + 1], qkv[:, queries + 1 :]
        if f"{layer}.q_layernorm.weight" in state:
            q, k = (norm(t, state[f"{layer}.{n}_layernorm.weight"]) for n, t in (("q", q), ("k", k)))
        scores = rotated(q) @ rotated(k).mT / head**0.5
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        out = scores.masked_fill(later, float("-inf")).softmax(-1) @ v
        return F.linear(out.permute(2, 3, 0, 1, 4).flatten(2), state[f"{layer}.linear_proj.weight"])

    def mlp(x, state, layer):
        gate, up = F.linear(x, state[f"{layer}.linear_fc1.weight"]).chunk(2, dim=-1)
        return F.linear(F.silu(gate) * up, state[f"{layer}.linear_fc2.weight"])

    whole = shards[0]
    embedding = torch.cat([state["embedding.word_embeddings.weight"] for state in shards])
    x = embedding[ids]
    for i in range(config["num_layers"]):
        layer = f"decoder.layers.{i}.self_attention"
        normed = norm(x, whole[f"{layer}.linear_qkv.layer_norm_weight"])
        x = x + sum(attention(normed, state, layer) for state in shards)
        layer = f"decoder.layers.{i}.mlp"
        normed = norm(x, whole[f"{layer}.linear_fc1.layer_norm_weight"])
        x = x + sum(mlp(normed, state, layer) for state in shards)
    x = norm(x, whole["decoder.final_layernorm.weight"])
    if architecture.gpt["share_embeddings_and_output_weights"]:
        return F.linear(x, embedding)
    return torch.cat([F.linear(x, state["output_layer.weight"]) for state in shards], dim=-1)


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


# ------------------------------------------------------------------ weights


@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_the_layout_computes_the_logits_of_transformers(name, tp_size):
    config = config_of(name)
    model, architecture = model_of(config), gpt_architecture(config)
    full = from_transformers(model.state_dict(), architecture)
    shards = [{n: part_of(n, t, rank, tp_size) for n, t in full.items()} for rank in range(tp_size)]
    ids = torch.randint(0, config.vocab_size, (2, 24))
    expected = model(input_ids=ids).logits
    torch.testing.assert_close(megatron_logits(shards, architecture, ids), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MODELS)
def test_there_and_back_is_exact(name, dtype):
    config = config_of(name)
    state, architecture = model_of(config, dtype).state_dict(), gpt_architecture(config)
    back = to_transformers(from_transformers(state, architecture), architecture)
    assert_same(back, state)
    tied = back["lm_head.weight"] is back["model.embed_tokens.weight"]
    assert tied == config.tie_word_embeddings
    if not tied:
        save(back)  # safetensors refuses tensors that share memory


def test_what_files_and_stages_may_leave_out_or_have_besides():
    config = config_of("llama_tied")
    state, architecture = model_of(config).state_dict(), gpt_architecture(config)
    full = from_transformers({n: t for n, t in state.items() if n != "lm_head.weight"}, architecture)
    assert_same(full, from_transformers(state, architecture))
    of_old = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    assert_same(full, from_transformers({**state, **of_old}, architecture))
    assert "output_layer.weight" not in full
    last_stage_has = {"output_layer.weight": full["embedding.word_embeddings.weight"].clone()}
    assert_same(to_transformers({**full, **last_stage_has}, architecture), state)


def with_rows(architecture, rows):
    """The architecture with another vocabulary."""
    return replace(architecture, gpt={**architecture.gpt, "vocab_size": rows})


def test_a_padded_vocabulary_has_rows_of_zeros():
    config = config_of("llama")
    state = model_of(config).state_dict()
    architecture = with_rows(gpt_architecture(config), 128)
    full = from_transformers(state, architecture)
    for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        assert full[name].shape == (128, 32)
        assert not full[name][96:].any()
    back = to_transformers(full, architecture)
    assert back["lm_head.weight"].shape == (128, 32)
    assert_same({name: back[name][: len(tensor)] for name, tensor in state.items()}, state)


def joined(name, parts):
    """The parameter whose tensor-parallel parts are ``parts``, by Megatron-core's layout."""
    if name.endswith(("layer_norm_weight", "layernorm.weight")):  # whole on every rank
        assert all(torch.equal(part, parts[0]) for part in parts)
        return parts[0]
    if name.endswith("linear_fc1.weight"):  # the gate's rows, then the other factor's, on each rank
        halves = [part.chunk(2) for part in parts]
        return torch.cat([half[i] for i in range(2) for half in halves])
    return torch.cat(parts, 1 if name.endswith(("linear_proj.weight", "linear_fc2.weight")) else 0)


@pytest.mark.parametrize("tp_size", [1, 2, 4])
@pytest.mark.parametrize("name", ["llama_tied", "qwen2", "qwen3"])
def test_tensor_parallel_parts_are_joined_again(name, tp_size):
    config = config_of(name)
    architecture = gpt_architecture(config)
    full = from_transformers(model_of(config).state_dict(), architecture)
    for key, tensor in full.items():
        parts = [part_of(key, tensor, rank, tp_size) for rank in range(tp_size)]
        assert all(part.is_contiguous() for part in parts)
        split = tensor.numel() // (tp_size if tensor.dim() > 1 or key.endswith("qkv.bias") else 1)
        assert [part.numel() for part in parts] == [split] * tp_size, key
        assert torch.equal(joined(key, parts), tensor), key


def test_stages_number_their_layers_from_zero():
    config = config_of("llama_tied", num_hidden_layers=3)
    state, architecture = model_of(config).state_dict(), gpt_architecture(config)
    full = from_transformers(state, architecture)
    in_layer = {n.removeprefix("decoder.layers.0.") for n in full if n.startswith("decoder.layers.0.")}
    first = ["embedding.word_embeddings.weight", *(f"decoder.layers.{i}.{n}" for i in range(2) for n in in_layer)]
    last = [*(f"decoder.layers.0.{n}" for n in in_layer), "decoder.final_layernorm.weight", "output_layer.weight"]
    stages = [of_stage(full, first, 0), of_stage(full, last, 2)]
    assert [list(stage) for stage in stages] == [first, last]
    proj = "decoder.layers.{}.self_attention.linear_proj.weight"
    assert stages[1][proj.format(0)] is full[proj.format(2)]
    whole = {**stages[0], **{n.replace("layers.0.", "layers.2."): tensor for n, tensor in stages[1].items()}}
    assert_same(to_transformers(whole, architecture), state)
    with pytest.raises(ValueError, match=r"lacks decoder\.layers\.3\.self_attention\.linear_proj\.weight"):
        of_stage(full, [proj.format(1)], 2)


def test_what_does_not_fit_is_refused_by_name():
    config = config_of("llama_tied")
    state, architecture = model_of(config).state_dict(), gpt_architecture(config)
    full = from_transformers(state, architecture)
    one, other = "model.layers.1.mlp.up_proj.weight", "decoder.layers.1.mlp.linear_fc1.weight"

    def without(name, states):
        return {n: t for n, t in states.items() if n != name}

    for name, states, convert in ((one, state, from_transformers), (other, full, to_transformers)):
        with pytest.raises(ValueError, match=f"lacks {name}"):
            convert(without(name, states), architecture)
        with pytest.raises(ValueError, match="has extra, which the architecture does not"):
            convert({**states, "extra": torch.zeros(1)}, architecture)
        with pytest.raises(ValueError, match=rf"{name} is \(3, 32\), and \(\d+, 32\)"):
            convert({**states, name: torch.zeros(3, 32)}, architecture)
    with pytest.raises(ValueError, match=r"lacks model\.embed_tokens\.weight"):
        from_transformers(without("model.embed_tokens.weight", state), architecture)
    with pytest.raises(ValueError, match=r"lm_head\.weight is not equal to model\.embed_tokens\.weight"):
        from_transformers({**state, "lm_head.weight": state["lm_head.weight"] + 1}, architecture)
    with pytest.raises(ValueError, match=r"output_layer\.weight is not equal to embedding\.word"):
        to_transformers({**full, "output_layer.weight": torch.zeros(96, 32)}, architecture)
    with pytest.raises(ValueError, match=r"embed_tokens\.weight has 96 rows, more than the vocabulary of 64"):
        from_transformers(state, with_rows(architecture, 64))
    with pytest.raises(ValueError, match="biases_of_mine is no parameter"):
        part_of("biases_of_mine", torch.zeros(4), 0, 2)
    with pytest.raises(ValueError, match=r"output_layer\.weight of shape \(97, 32\) does not split over 2"):
        part_of("output_layer.weight", torch.zeros(97, 32), 0, 2)


# ------------------------------------------------------------------ architecture


@pytest.mark.parametrize("name", LLAMAS)
def test_every_llama_preset_is_an_architecture_of_megatron(name):
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
    from megatron.core.transformer import TransformerConfig

    config = AutoConfig.for_model("llama", **{"vocab_size": 4096, **PRESETS[name].config})
    architecture = gpt_architecture(config)
    built = TransformerConfig(**architecture.transformer, tensor_model_parallel_size=2)
    assert (built.num_layers, built.hidden_size) == (config.num_hidden_layers, config.hidden_size)
    assert (built.num_query_groups, built.kv_channels) == (config.num_key_value_heads, config.head_dim)
    gpt = dict(architecture.gpt)
    assert gpt.pop("vocab_size") == config.vocab_size
    assert gpt.pop("max_sequence_length") == config.max_position_embeddings
    assert gpt.pop("share_embeddings_and_output_weights") == config.tie_word_embeddings
    assert gpt.pop("position_embedding_type") == "rope"
    # What is left is RoPE's: the frequencies are those of transformers.
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config).model
    expected = type(model.rotary_emb)(config).inv_freq
    found = RotaryEmbedding(config.head_dim, rotary_percent=1.0, use_cpu_initialization=True, **gpt)
    torch.testing.assert_close(found.get_freqs_non_repeated(2)[1], expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"mlp_bias": True}, "mlp_bias=True"),
        ({"rope_parameters": {**LLAMA3_ROPE, "low_freq_factor": 2.0}}, "low_freq_factor=2.0.*fixed at 1"),
        ({"rope_parameters": {**LLAMA3_ROPE, "high_freq_factor": 8.0}}, "high_freq_factor=8.0.*fixed at 4"),
        (
            {"rope_parameters": {**LLAMA3_ROPE, "original_max_position_embeddings": 4096}},
            "original_max_position_embeddings=4096.*fixed at 8192",
        ),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}}, "'yarn'.*default, linear"),
        ({"rope_parameters": {**LINEAR_ROPE, "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
    ],
)
def test_what_megatron_cannot_express_is_refused(fields, message):
    config = config_of("llama", **{"max_position_embeddings": 16384, **fields})
    with pytest.raises(ValueError, match=message):
        gpt_architecture(config)


def test_a_sliding_window_is_refused():
    with pytest.raises(ValueError, match=r"sliding_window=4096.*set None"):
        gpt_architecture(config_of("mistral", sliding_window=4096))


def test_another_model_type_is_refused_by_name():
    with pytest.raises(ValueError, match=r"'gpt2': llama, mistral, qwen2, qwen3 work"):
        gpt_architecture(AutoConfig.for_model("gpt2"))


def test_build_gpt_refuses_fields_that_the_architecture_decides_and_a_vocabulary_that_does_not_split():
    architecture = gpt_architecture(config_of("llama"))
    with pytest.raises(TypeError, match="hidden_size"):
        build_gpt(architecture, {"hidden_size": 32})
    with pytest.raises(ValueError, match="97 does not split over 2 tensor-parallel ranks"):
        # RoPE's fusion needs Transformer Engine.
        build_gpt(with_rows(architecture, 97), {"tensor_model_parallel_size": 2, "apply_rope_fusion": False})
