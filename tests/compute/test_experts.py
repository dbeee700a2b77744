"""Experts in 3-D parameters are converted: what transformers computes, in FP8, with routers in FP32."""

import copy
from itertools import pairwise

import peft
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from nemo_lowprec import prepare
from nemo_lowprec.chart import CHART
from nemo_lowprec.chart.groups import LayerFilter
from nemo_lowprec.chart.recipe import Recipe
from nemo_lowprec.compute import ReferenceBackend, convert_layers, revert_layers
from nemo_lowprec.compute.experts.blocks import blocks_of
from nemo_lowprec.compute.experts.reading import Fp32Router
from nemo_lowprec.compute.experts.routing import route
from nemo_lowprec.compute.graphs.guard import obstacle
from nemo_lowprec.observers import Observer, Observers
from nemo_lowprec.plugins import LowPrecision
from nemo_lowprec.report import plan_training
from nemo_lowprec.tensors import Fp8Weight
from tests.experts import (
    EXPERTS,
    INNER,
    KINDS,
    TOKENS,
    TOP_K,
    convert,
    distance,
    experts_of,
    is_of_experts,
    passes,
    trained,
)  # fmt: skip

RECIPES = {
    "half": Recipe("delayed", override_linear_precision=(True, True, True)),
    "delayed": Recipe("delayed"),
    "current": Recipe("current"),
    "blockwise": Recipe("blockwise", fp8="e4m3"),
    "wgrad in half": Recipe("delayed", override_linear_precision=(False, False, True)),
}
MODELS = {
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 48, "head_dim": 16},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16},
    "deepseek_v3": {
        "n_routed_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 48, "first_k_dense_replace": 1,
        "n_group": 2, "topk_group": 1, "q_lora_rank": 32, "kv_lora_rank": 16, "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 16, "v_head_dim": 16, "num_key_value_heads": 4,
    },
}  # fmt: skip
LOW = [name for name, row in CHART.items() if row.scaling in ("delayed", "current", "blockwise")]


def model_of(kind):
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    }  # fmt: skip
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **(sizes | MODELS[kind])))


def losses(model, steps=6, level=None, **options):
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    if level is not None:
        prepare(model, optimizer, level, **options)
    tokens = torch.randint(128, (4, 32), generator=torch.Generator().manual_seed(1))
    found = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", KINDS)
def test_experts_compute_what_transformers_does(kind, recipe):
    parent, *inputs = experts_of(kind)
    expected, wanted = passes(parent, *inputs)
    amaxes = convert(parent, ReferenceBackend(), RECIPES[recipe])
    out, grads = passes(parent, *inputs)
    bound = 1e-2 if recipe == "half" else 0.12
    assert out.dtype == expected.dtype and distance(out, expected) < bound
    for name, grad in wanted.items():
        assert grads[name].dtype == grad.dtype and distance(grads[name], grad) < bound, name
    if recipe == "half":
        return
    assert distance(out, expected) > 1e-2  # it was in FP8
    amaxes.after_step(False)
    again, _ = passes(parent, *inputs)
    assert distance(again, expected) < bound


def test_an_expert_without_tokens_changes_nothing():
    parent, *inputs = experts_of("gpt_oss")
    amaxes = convert(parent, ReferenceBackend())
    out, grads = passes(parent, *inputs)
    for name in ("gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias"):
        assert not grads[name][-1].any() and grads[name][0].any()
    other, *_ = experts_of("gpt_oss")
    with torch.no_grad():
        for name, param in other.experts.named_parameters():
            param[-1] = 1e-3 if "proj_bias" in name else param[0]
    convert(other, ReferenceBackend())
    assert torch.equal(passes(other, *inputs)[0], out)
    assert amaxes.histories is not None


def test_one_token_and_no_token():
    parent, x, index, scores = experts_of("mixtral")
    convert(parent, ReferenceBackend())
    with torch.autocast("cpu", torch.bfloat16):
        one = parent.experts(x[:1], index[:1], scores[:1])
        assert one.shape == (1, x.shape[1]) and one.any()
        assert parent.experts(x[:0], index[:0], scores[:0]).shape == (0, x.shape[1])


def test_rows_of_experts_that_do_not_exist_add_nothing():
    parent, x, index, scores = experts_of("mixtral")
    convert(parent, ReferenceBackend(), RECIPES["half"])
    few = index.clone()
    few[:, 1] = EXPERTS
    with torch.autocast("cpu", torch.bfloat16):
        found = parent.experts(x, few, scores)
        alone = parent.experts(x, index[:, :1], scores[:, :1])
    torch.testing.assert_close(found, alone)


def test_routing_is_an_order_by_expert():
    index = torch.randint(EXPERTS + 1, (TOKENS, TOP_K), generator=torch.Generator().manual_seed(0))
    routing = route(index, EXPERTS)
    sizes = routing.sizes()
    assert sizes == torch.bincount(index.flatten(), minlength=EXPERTS + 1)[:-1].tolist()
    expert = index.flatten()[routing.order]
    assert torch.equal(expert, expert.sort().values) and torch.equal(routing.experts, expert)
    assert all(a < b for a, b in pairwise(routing.order[: sizes[0]].tolist()))  # stable
    assert torch.equal(routing.in_pairs(routing.in_rows(index)), index)


def test_tokens_are_quantized_once_and_announced():
    class Seen(Observer):
        def __init__(self):
            self.found = []

        def quantized(self, layer, kind, values, operand, backend):
            self.found.append((layer, kind))

    parent, *inputs = experts_of("mixtral")
    seen = Seen()
    observers = Observers()
    done = convert_layers(
        parent, torch.bfloat16, Recipe("current"), ReferenceBackend(), None, LayerFilter(), None, observers=observers
    )
    with observers.watched_by(seen):
        passes(parent, *inputs)
    assert done.low == ["experts.gate_up_proj", "experts.down_proj"] == done.weights
    for layer in done.low:
        assert {kind for name, kind in seen.found if name == layer} == {"input", "weight", "grad_output"}


@pytest.mark.parametrize("kind", MODELS)
def test_models_train_at_every_low_level(kind):
    expected = losses(model_of(kind))
    for level in LOW:
        found = losses(model_of(kind), level=level, convert=None)
        assert all(abs(a - b) < 0.05 for a, b in zip(found, expected, strict=True)), level


def test_weights_and_gradients_are_stored_as_the_level_says():
    model = model_of("mixtral")
    losses(model, 1, "msamp_o3", convert=None)
    weight = model.model.layers[0].mlp.experts.gate_up_proj
    assert type(weight).__name__ == "Fp8Weight" and weight.data_fp8.shape == weight.shape
    assert type(weight.grad).__name__ == "GradientTensor"


@pytest.mark.parametrize("level", ["bf16_with_fp8_mixed", "msamp_o3"])
def test_the_activations_of_experts_are_planned(level):
    tokens = torch.randint(128, (2, 32))
    batch = {"input_ids": tokens, "labels": tokens}
    plans = [plan_training(model_of(kind), LowPrecision(level), batch=batch) for kind in ("mixtral", "qwen3_moe")]
    assert all(plan.peak is not None and not plan.without for plan in plans)


def test_a_model_is_given_back_as_it_was():
    model = model_of("qwen3_moe")
    classes = {name: type(module) for name, module in model.named_modules()}
    arguments = (torch.bfloat16, Recipe("current"), ReferenceBackend(), None, LayerFilter(), None)
    convert_layers(model, *arguments)
    experts, gate = model.model.layers[0].mlp.experts, model.model.layers[0].mlp.gate
    assert isinstance(experts, classes["model.layers.0.mlp.experts"]) and isinstance(gate, Fp32Router)
    twin = copy.deepcopy(model)
    tokens = torch.randint(128, (2, 8))
    assert torch.equal(model(tokens).logits, twin(tokens).logits)
    revert_layers(model)
    assert {name: type(module) for name, module in model.named_modules()} == classes


@pytest.mark.parametrize("level", ["bf16_with_fp8_mixed", "msamp_o2"])
def test_routers_compute_in_fp32(level, monkeypatch):
    model = model_of("qwen3_moe")
    optimizer = torch.optim.AdamW(model.parameters())
    prepare(model, optimizer, level)
    seen = []

    def linear(x, weight, *args):
        if len(weight) == 16:
            seen.append((x.dtype, weight.dtype, torch.is_autocast_enabled("cpu")))
        return own(x, weight, *args)

    own = F.linear
    monkeypatch.setattr(F, "linear", linear)
    with torch.autocast("cpu", torch.bfloat16):
        model(torch.randint(128, (2, 8))).logits.sum().backward()
    assert seen == [(torch.float32, torch.float32, False)] * 2
    gate = model.model.layers[0].mlp.gate.weight
    assert gate.grad is not None or gate.master_weight.grad is not None


class Block(nn.Module):
    """Experts in a ModuleList."""

    def __init__(self):
        super().__init__()
        self.top_k = 2
        self.gate = nn.Linear(32, 16)
        self.experts = nn.ModuleList(nn.Linear(32, 32) for _ in range(16))
        self.shared = nn.Linear(32, 16)

    def forward(self, x):
        scores, index = self.gate(x).softmax(-1).topk(2)
        out = self.shared(x).repeat(1, 2)
        for expert, layer in enumerate(self.experts):
            token, place = torch.where(index == expert)
            out = out.index_add(0, token, (layer(x[token]) * scores[token, place, None]).to(out.dtype))
        return out


def test_experts_in_a_list_are_layers_and_their_router_is_in_fp32():
    model = Block()
    (block,) = blocks_of(model)
    assert block == ("experts", ("gate",), 2 / 16)
    done = convert_layers(
        model, torch.bfloat16, Recipe("current"), ReferenceBackend(), None, LayerFilter(head="half"), None
    )
    assert len(done.low) == 17 and "shared" in done.low and done.kept == {"gate": "a router (computed in FP32)"}
    x = torch.randn(24, 32, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        model(x).sum().backward()
    assert x.grad.isfinite().all() and all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize("kind", MODELS)
def test_blocks_know_their_routers_and_the_share_of_their_experts(kind):
    found = blocks_of(model_of(kind))
    share = 0.25 if kind in ("qwen3_moe", "deepseek_v3") else 0.5
    assert found and all(block.share == share and len(block.routers) == 1 for block in found)


def refusals():
    parallel, *_ = experts_of("mixtral")
    parallel.experts._is_expert_parallel = True
    normed, *_ = experts_of("mixtral")
    normed.experts.has_post_expert_norm = True
    more, *_ = experts_of("mixtral")
    more.experts.extra = nn.Parameter(torch.zeros(3))
    odd, *_ = experts_of("mixtral", inner=INNER - 1)
    return {
        "is spread over processes": parallel, "normalizes what each expert returns": normed,
        "has extra, which its interface does not name": more, "a side of 94 is no multiple of 16": odd,
    }  # fmt: skip


@pytest.mark.parametrize("reason", refusals())
def test_experts_that_stay_say_why(reason):
    parent = refusals()[reason]
    done = convert_layers(parent, torch.bfloat16, Recipe("current"), ReferenceBackend(), None, LayerFilter(), None)
    assert not done.low and set(done.kept) == {"experts.gate_up_proj", "experts.down_proj"}
    assert all(reason in found for found in done.kept.values())


def test_experts_are_chosen_by_name():
    parent, *_ = experts_of("mixtral")
    arguments = (torch.bfloat16, Recipe("current"), ReferenceBackend(), None)
    done = convert_layers(parent, *arguments, LayerFilter(skip=("experts",)), None)
    assert not done.low and done.asked == {"experts.gate_up_proj", "experts.down_proj"}


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm"])
@pytest.mark.parametrize("level", ["fp16_amp", "te_fp8", "bf16_mixed", "msamp_o2"])
def test_experts_that_stay_compute_in_half_precision(level, implementation):
    model = model_of("mixtral")
    model.set_experts_implementation(implementation)
    expected = losses(copy.deepcopy(model))
    found = losses(model, level=level, **({"skip": ["*.experts"]} if CHART[level].has_fp8 else {}))
    assert all(abs(a - b) < 0.05 for a, b in zip(found, expected, strict=True))
    experts = model.model.layers[0].mlp.experts
    x, index, scores = torch.randn(8, 64), torch.zeros(8, 2, dtype=torch.int64), torch.full((8, 2), 0.5)
    with torch.autocast("cpu", torch.float16 if level == "fp16_amp" else torch.bfloat16):
        half = experts(x, index, scores)
    assert half.dtype == torch.float32
    if CHART[level].weight == "fp32":
        assert 0 < distance(half, experts(x, index, scores)) < 1e-2


@pytest.mark.parametrize("level", ["bf16_with_fp8_mixed", "msamp_o2"])
def test_frozen_experts_beside_adapters_take_a_byte_a_parameter(level):
    model = model_of("qwen3_moe")
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    found = losses(model, level=level)
    experts = model.get_base_model().model.layers[0].mlp.experts
    for weight in (experts.gate_up_proj, experts.down_proj):
        assert isinstance(weight, Fp8Weight) and weight.shape[0] == 16 and weight.grad is None
    assert found[-1] < found[0]


def test_experts_that_the_host_waits_for_are_in_no_cuda_graph():
    parent, *_ = experts_of("mixtral")
    convert(parent, ReferenceBackend())
    assert obstacle(parent) == "experts computes expert by expert, for which the host waits"


IN_BF16 = [name for name in CHART if name == "te_fp8" or name.startswith(("msamp", "bf16_with_fp8"))]


@pytest.fixture(scope="module")
def in_fp32():
    return trained(None)[1]


@pytest.mark.parametrize("level", IN_BF16)
def test_experts_alone_learn_as_in_fp32(level, in_fp32):
    """Linear layers of a model this small stray by more in FP8, and would hide what experts do."""
    assert trained(level, convert=is_of_experts, backend="reference")[1] == pytest.approx(in_fp32, abs=0.025)
