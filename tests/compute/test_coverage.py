"""Every matrix of a model is in the start-up table, with its share; and where hardly any is converted is said so."""

import math

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, MixtralConfig, MixtralForCausalLM

from nemo_lowprec.compute import ReferenceBackend, as_text, convert_layers
from nemo_lowprec.compute.coverage import as_patterns, groups_of, too_little
from nemo_lowprec.compute.layers_table import layers_table
from nemo_lowprec.options import LayerFilter, Recipe


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
        {("half", "ParametrizedLinear has a forward of its own", ""): 32 * 16 + 16},
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
            ("half", "a parameter of LowPrecisionMultiheadAttention", "bias_k"): 32,
            ("half", "a parameter of LowPrecisionMultiheadAttention", "bias_v"): 32,
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


def test_experts_of_transformers_are_named_with_their_share():
    model = mixtral()
    found = groups(model)
    experts, attention, head = 4 * 3 * 64 * 96 * 2, (64 * 64 * 2 + 64 * 32 * 2) * 2, 128 * 64
    layers, attend = "model.layers.*", ("q_proj", "k_proj", "v_proj", "o_proj")
    assert sizes(found) == {
        ("low", "", *(f"{layers}.self_attn.{part}" for part in attend)): attention,
        ("half", "a parameter of MixtralExperts", f"{layers}.mlp.experts.gate_up_proj"): experts * 2 // 3,
        ("half", "a parameter of MixtralExperts", f"{layers}.mlp.experts.down_proj"): experts // 3,
        ("half", "the head (name it in convert to convert it)", "lm_head"): head,
        ("half", "a parameter of MixtralTopKRouter", f"{layers}.mlp.gate.weight"): 4 * 64 * 2,
        ("embedding", "an embedding", "model.embed_tokens.weight"): head,
    }
    total = experts + attention + head + 512
    assert too_little(found) == (
        f"only {attention / total:.0%} of the elements of the matrices that this model multiplies with are in a "
        f"converted layer. Others are: {experts * 2 / 3 / total:.0%} {layers}.mlp.experts.gate_up_proj, a parameter "
        f"of MixtralExperts; {experts / 3 / total:.0%} {layers}.mlp.experts.down_proj, a parameter of MixtralExperts; "
        f"{head / total:.0%} lm_head, the head (name it in convert to convert it); and 1 more groups."
    )


def test_the_table_has_all_of_it_in_80_columns():
    model = mixtral()
    found = groups(model)
    lines = as_text(layers_table(found, "FP8 (current, reference)")).splitlines()
    assert max(map(len, lines)) <= 80 and len(lines) < 40
    which = next(line.index("Which") for line in lines if "Which" in line)
    names = "".join(line[which:].rstrip() for line in lines)  # folded
    for pattern in ("experts.gate_up_proj", "experts.down_proj", "lm_head", "mlp.gate.weight", "embed_tokens.weight"):
        assert pattern in names
    shares = [float(line.split("%")[0].split()[-1]) for line in lines if "%" in line]
    assert math.isclose(sum(shares), 100, abs_tol=0.5)
    by_name = {name: line.split()[1] for line in lines for name in ("experts.gate", "experts.down") if name in line}
    share = 100 * 4 * 64 * 96 * 2 / elements_of(model)
    assert float(by_name["experts.gate"]) == round(2 * share, 1)
    assert float(by_name["experts.down"]) == round(share, 1)


def test_an_embedding_that_is_the_head_is_the_head():
    config = GPT2Config(vocab_size=96, n_positions=8, n_embd=32, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
    model = GPT2LMHeadModel(config)
    found = sizes(groups(model))
    assert found["half", "the head (name it in convert to convert it)", "lm_head"] == 96 * 32
    assert found["embedding", "an embedding", "transformer.wpe.weight"] == 8 * 32
    assert sum(found.values()) == elements_of(model)


def stack(other):
    """A converted layer of 1024 elements beside another module."""
    return nn.ModuleDict({"up": nn.Linear(32, 32), "other": other})


@pytest.mark.parametrize(
    ("other", "arguments", "says"),
    [
        (nn.Conv2d(32, 32, 1), {}, None),  # just half
        (nn.Conv2d(33, 32, 1), {}, "only 49% of the elements"),
        (nn.Linear(33, 32), {}, "only 49% of the elements"),
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
