"""Every matrix of a model is in the start-up table, with its share; and where hardly any is converted is said so."""

import math
from fnmatch import fnmatchcase

import pytest
import torch
from torch import nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    SwinConfig,
    SwinForImageClassification,
    ViTConfig,
    ViTForImageClassification,
)

from nemo_lowprec.chart.groups import LayerFilter
from nemo_lowprec.chart.recipe import Recipe
from nemo_lowprec.compute import ReferenceBackend, convert_layers
from nemo_lowprec.compute.coverage import as_globs, as_patterns, groups_of, too_little
from nemo_lowprec.compute.layers_table import layers_table


def groups(model, **layers):
    recipe = Recipe("current")
    arguments = (torch.bfloat16, recipe, ReferenceBackend(), ReferenceBackend(), LayerFilter(**layers), None)
    return groups_of(model, convert_layers(model, *arguments))


def sizes(found):
    """Elements by (kind, reason) and patterns."""
    return {(g.fate.kind, g.fate.reason, *as_patterns(g.names)): g.elements for g in found if g.elements}


def elements_of(model):
    """Of all matrices, each once."""
    return sum(p.numel() for p in model.parameters() if p.dim() > 1)


def mixtral():
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    return MixtralForCausalLM(
        MixtralConfig(vocab_size=128, num_key_value_heads=2, num_local_experts=4, tie_word_embeddings=False, **sizes)
    )


class Own(nn.Module):
    """A matrix in three dimensions, and what is none."""

    def __init__(self):
        super().__init__()
        self.experts = nn.Parameter(torch.zeros(4, 32, 32))
        self.scale = nn.Parameter(torch.ones(32))


ODD = {
    "experts": (Own, {("half", "a parameter of Own", "experts"): 4096}),
    "lstm": (
        lambda: nn.LSTM(16, 32, num_layers=2),
        {
            ("half", "a parameter of LSTM", f"{part}_l{i}"): 128 * (16 if (part, i) == ("weight_ih", 0) else 32)
            for part in ("weight_ih", "weight_hh") for i in (0, 1)
        },
    ),
    "gru cell": (
        lambda: nn.GRUCell(16, 32),
        {("half", "a parameter of GRUCell", "weight_ih"): 1536, ("half", "a parameter of GRUCell", "weight_hh"): 3072},
    ),
    "convolution": (lambda: nn.Conv2d(3, 16, 5), {("half", "a parameter of Conv2d", "weight"): 1200}),
    "bilinear": (lambda: nn.Bilinear(4, 8, 16), {("half", "a parameter of Bilinear", "weight"): 512}),
    "embedding": (lambda: nn.Embedding(10, 16), {("embedding", "an embedding", "weight"): 160}),
    "bag": (lambda: nn.EmbeddingBag(10, 16), {("embedding", "an embedding", "weight"): 160}),
    "norm": (lambda: nn.LayerNorm((4, 8)), {("norm", "", ""): 64}),
    "weight norm": (
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(32, 16)),
        {("half", "its weight is computed (weight_norm or another parametrization)", ""): 32 * 16 + 16},
    ),
    "parametrized convolution": (
        lambda: nn.utils.parametrizations.orthogonal(nn.Conv1d(8, 8, 1)),
        {("half", "computed by a parametrization", "parametrizations.weight.original"): 64},
    ),
    "old weight norm": (
        lambda: nn.utils.weight_norm(nn.Linear(32, 16)),
        {("half", "its weight is computed (weight_norm or another parametrization)", ""): 32 * 16 + 16},
    ),
    "attention of other sizes": (
        lambda: nn.MultiheadAttention(32, 4, kdim=30, vdim=16),
        {
            ("low", "", "q_proj_weight", "v_proj_weight", "out_proj"): 1024 + 512 + 1024,
            ("half", "a side of 30 is no multiple of 16", "k_proj_weight"): 960,
        },
    ),
    "attention with more keys": (
        lambda: nn.MultiheadAttention(32, 4, add_bias_kv=True),
        {
            ("low", "", "in_proj_weight", "out_proj"): 4096,
            ("half", "a parameter of MultiheadAttention", "bias_k"): 32,
            ("half", "a parameter of MultiheadAttention", "bias_v"): 32,
        },
    ),
    "parameters in a list": (
        lambda: nn.ParameterList([torch.zeros(2, 3), torch.zeros(2, 3)]),
        {("half", "a parameter of ParameterList", "*"): 12},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ODD)
def test_every_kind_of_matrix_is_there_once(name):
    make, want = ODD[name]
    model = make()
    found = groups(model)
    assert sizes(found) == want and sum(want.values()) == sum(g.elements for g in found) == elements_of(model)


def test_what_the_first_batch_will_give_its_shape_is_there_without_elements():
    assert [(g.names, g.elements) for g in groups(nn.LazyConv2d(3, 3, bias=False))] == [(["weight"], 0)]


def test_experts_of_transformers_are_converted_and_counted_by_what_a_token_passes():
    model = mixtral()
    found = groups(model)
    experts, attention, head = 4 * 3 * 64 * 96 * 2, (64 * 64 * 2 + 64 * 32 * 2) * 2, 128 * 64
    layers, attend = "model.layers.*", ("q_proj", "k_proj", "v_proj", "o_proj")
    low = [f"{layers}.self_attn.{part}" for part in attend]
    low += [f"{layers}.mlp.experts.{part}" for part in ("gate_up_proj", "down_proj")]
    assert sizes(found) == {
        ("low", "", *low): attention + experts,
        ("half", "the head (head='fp8' converts it)", "lm_head"): head,
        ("router", "routers", f"{layers}.mlp.gate"): 4 * 64 * 2,
        ("embedding", "an embedding", "model.embed_tokens.weight"): head,
    }
    products = {group.fate.kind: group.products for group in found if group.products}
    assert products == {"low": attention + experts / 2, "half": head, "router": 512}  # two of four experts


def test_experts_that_stay_are_named_with_their_share_of_the_flop():
    experts, attention, head = 4 * 3 * 64 * 96 * 2, (64 * 64 * 2 + 64 * 32 * 2) * 2, 128 * 64
    model = mixtral()
    for layer in model.model.layers:
        layer.mlp.experts.has_post_expert_norm = True
    counted = attention + experts / 2 + head + 512
    said = "MixtralExperts normalizes what each expert returns"
    assert too_little(groups(model)) == (
        f"only {attention / counted:.0%} of the FLOP of the matrices that this model multiplies with are in a "
        f"converted layer. Others are: {experts / 2 / counted:.0%} model.layers.*.mlp.experts.gate_up_proj, "
        f"model.layers.*.mlp.experts.down_proj, {said}; {head / counted:.0%} lm_head, the head (head='fp8' converts "
        f"it); {512 / counted:.0%} model.layers.*.mlp.gate, routers."
    )


def test_the_table_has_all_of_it():
    model = mixtral()
    lines = layers_table(groups(model), "FP8 (current, reference)").splitlines()
    assert lines[0].split() == ["Layers", "Weights", "FLOP", "Are"]
    names = {name.rstrip(",") for line in lines[2:] if "*" in line for name in line.split()}
    assert names == {
        *(f"*.self_attn.{part}_proj" for part in "qkvo"), "*.experts.gate_up_proj", "*.experts.down_proj",
        "lm_head", "*.mlp.gate", "*.embed_tokens.weight", "*.input_layernorm", "*.post_attention_layernorm",
        "*.norm", "*.self_attn",
    } - {"lm_head"}  # fmt: skip
    assert lines[lines.index(next(line for line in lines if "the head" in line)) + 1].split() == ["lm_head"]
    for place in range(2):  # weights, FLOP
        shares = [line.split("%")[place].split()[-1] for line in lines if line.count("%") > place]
        assert math.isclose(sum(map(float, shares)), 100, abs_tol=0.5)
    experts, attention, head = 4 * 3 * 64 * 96 * 2, (64 * 64 * 2 + 64 * 32 * 2) * 2, 128 * 64
    weights, flop = (float(part.split()[-1]) for part in lines[2].split("%")[:2])
    assert weights == round(100 * (experts + attention) / elements_of(model), 1)
    assert flop == round(100 * (experts / 2 + attention) / (experts / 2 + attention + head + 512), 1)


def llama(**fields):
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=128, **sizes, **fields))


def gpt2():
    config = GPT2Config(vocab_size=96, n_positions=8, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    return GPT2LMHeadModel(config)


def from_timm(name):
    return pytest.importorskip("timm", exc_type=ImportError).create_model(name, img_size=64, num_classes=32)


def adapted():
    """LoRA in a wrapper of a wrapper: the longest names that there are."""
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(llama(), peft.LoraConfig(r=16, target_modules=["q_proj", "down_proj"]))
    return nn.ModuleDict({"teacher_and_student": nn.ModuleDict({"student_to_be_distilled": model})})


class Wrapped(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model


MODELS = {
    "llama": llama,
    "wrapped llama": lambda: Wrapped(llama()),
    "mixtral": mixtral,
    "gpt2": gpt2,
    "vit": lambda: ViTForImageClassification(
        ViTConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, image_size=32)
    ),
    "swin": lambda: SwinForImageClassification(
        SwinConfig(image_size=32, embed_dim=16, depths=[1, 2], num_heads=[1, 2], window_size=4)
    ),
    "vit of timm": lambda: from_timm("vit_tiny_patch16_224"),
    "swin of timm": lambda: from_timm("swin_tiny_patch4_window7_224"),
    "transformer": lambda: nn.Transformer(32, 4, 2, 2, 64),
    "attention": lambda: nn.MultiheadAttention(32, 4),
    "lora": adapted,
}


@pytest.mark.parametrize("options", [{}, {"num_layers_at_end_in_half": 1}])
@pytest.mark.parametrize("name", MODELS)
def test_no_line_is_over_80_columns_and_no_name_is_broken_but_behind_a_dot(name, options):
    model = MODELS[name]()
    found = groups(model, **options)
    every = [n for group in found for n in group.names]
    lines = layers_table(found, "FP8 (delayed, reference)").splitlines()
    assert max(map(len, lines)) <= 80 and "…" not in "".join(lines)
    shown = iter([line.strip() for line in lines if line.startswith(" " * 28)])
    for group in found:
        text = next(shown)
        while text.endswith((",", ".")):
            text += next(shown) if text.endswith(".") else " " + next(shown)
        for glob in text.split(", "):
            matched = {n for n in every if fnmatchcase(n, glob)} or {glob}
            assert matched & set(group.names) or group.names == [""]
            if not options:  # else one that stays in half precision has the same name but for a number
                assert matched <= set(group.names) or group.names == [""]
        named = {n for n in group.names for glob in text.split(", ") if fnmatchcase(n, glob)}
        left = [n for n in group.names if n and n not in named]
        if left:  # the rest is counted
            assert (
                next(shown) == f"and {len(as_globs(group.names, [n for n in every if n not in group.names])) - 8} more"
            )
    assert next(shown, None) is None


def test_globs_are_short_and_tell_groups_apart():
    layers = [f"model.layers.{i}.{part}" for i in range(3) for part in ("attn.q_proj", "attn.k_proj", "norm")]
    assert as_globs(layers, ["model.lm_head"]) == ["*.attn.q_proj", "*.attn.k_proj", "*.norm"]
    assert as_globs(["encoder.attn.q_proj"], ["decoder.attn.q_proj"]) == ["encoder.attn.q_proj"]
    assert as_globs(["model.encoder.attn.q_proj"], ["model.decoder.attn.q_proj"]) == ["*.encoder.attn.q_proj"]
    assert as_globs(["encoder.attn.q_proj", "decoder.attn.q_proj"], []) == ["*.attn.q_proj"]
    assert as_globs(["model.layers.2.attn.q_proj"], layers[:6]) == ["*.2.attn.q_proj"]
    assert as_globs(["blocks.0", "blocks.1", "head"], []) == ["blocks.*", "head"]
    # All but the last layer: no glob is without it.
    assert as_globs(layers[:6:3], ["model.layers.2.attn.q_proj"]) == ["*.attn.q_proj"]


def test_a_glob_of_the_table_is_what_convert_and_skip_take():
    low = groups(Wrapped(llama()))[0]
    globs = as_globs(low.names, ["model.lm_head"])
    again = groups(Wrapped(llama()), convert=globs)[0]
    assert again.fate.kind == "low" and again.names == low.names
    kept = next(group for group in groups(Wrapped(llama()), skip=globs[:1]) if group.fate.reason == "in skip")
    assert kept.names == [f"model.model.layers.{i}.self_attn.q_proj" for i in range(3)]


def test_an_embedding_that_is_the_head_is_the_head():
    model = gpt2()
    found = sizes(groups(model))
    assert found["half", "the head (head='fp8' converts it)", "lm_head"] == 96 * 32
    assert found["embedding", "an embedding", "transformer.wpe.weight"] == 8 * 32
    assert sum(found.values()) == elements_of(model)


def stack(other):
    """A converted layer of 1024 elements beside another module."""
    return nn.ModuleDict({"up": nn.Linear(32, 32), "other": other})


@pytest.mark.parametrize(
    ("other", "arguments", "says"),
    [
        (nn.Conv2d(32, 32, 1), {}, None),  # just half
        (nn.Conv2d(33, 32, 1), {}, "only 49% of the FLOP"),
        (nn.Linear(33, 32), {}, "only 49% of the FLOP"),
        (nn.Embedding(999, 32), {}, None),
        (nn.Linear(32, 999), {"skip": ["other"]}, None),
        (nn.Linear(32, 96), {"convert": ["up"]}, None),
        (nn.Linear(32, 96), {"convert": lambda name, module: name == "up"}, None),
        (nn.Linear(32, 96), {"num_layers_at_end_in_half": 1}, None),
        (nn.Linear(32, 32), {"convert": []}, "no matrix that this model multiplies with is in a converted layer."),
        (nn.ModuleDict({"head": nn.Linear(32, 96)}), {}, "75% other.head, the head"),
        (nn.ModuleDict({"head": nn.Linear(32, 96)}), {"convert": ["*"]}, None),
    ],
)
def test_what_is_counted(other, arguments, says):
    """Not what is looked up, nor what the user leaves out."""
    problem = too_little(groups(stack(other), **arguments))
    assert problem is None if says is None else says in problem


def test_nothing_at_all_is_said_so():
    assert too_little(groups(nn.LayerNorm(8))) == ("no matrix that this model multiplies with is in a converted layer.")
