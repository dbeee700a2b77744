"""Models of transformers, built from a configuration: Llama (tied and untied) and GPT-2 with its Conv1D."""

import copy

import pytest
import torch
from numerics import sqnr
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
from transformers.pytorch_utils import Conv1D

from nemo_lowprec.chart.groups import LayerFilter
from nemo_lowprec.chart.recipe import Recipe
from nemo_lowprec.compute import LowPrecisionConv1D, LowPrecisionLinear, ReferenceBackend, convert_layers, revert_layers
from nemo_lowprec.compute.operands import new_histories

HALF = torch.bfloat16
TOKENS = torch.arange(64).view(2, 32)


def llama(tied=False):
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4,
            num_key_value_heads=2, tie_word_embeddings=tied,
        )
    )  # fmt: skip


def gpt2():
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=128, n_positions=64, n_embd=64, n_layer=2, n_head=4)
    config.attn_pdrop = config.resid_pdrop = config.embd_pdrop = 0.0
    return GPT2LMHeadModel(config)


def convert(model, scaling="current", half_backend=None, **layers):
    recipe = Recipe(scaling, fp8="e4m3")
    return convert_layers(
        model, HALF, recipe, ReferenceBackend(), half_backend, LayerFilter(**layers), new_histories(recipe)
    )  # fmt: skip


def loss(model):
    with torch.autocast("cpu", HALF):
        return model(input_ids=TOKENS, labels=TOKENS).loss


@pytest.mark.parametrize("tied", [False, True])
def test_llama_converts_all_but_its_head_and_trains_alike(tied):
    model = llama(tied)
    plain = copy.deepcopy(model)
    result = convert(model)
    assert len(result.low) == 3 * 7 and len(result.norms) == 3 * 2 + 1
    assert result.kept == {"lm_head": "the head (head='fp8' converts it)"}
    assert (model.lm_head.weight is model.model.embed_tokens.weight) is tied
    want, got = loss(plain), loss(model)
    want.backward()
    got.backward()
    assert abs(got.item() - want.item()) < 0.02
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert sqnr(p.grad, q.grad) > 10, name


@pytest.mark.parametrize("tied", [False, True])
def test_llamas_head_is_converted_by_naming_it_and_stays_tied(tied):
    model = llama(tied)
    result = convert(model, convert=["lm_head", "model.layers"])
    assert "lm_head" in result.low and "model.norm" not in result.norms
    assert isinstance(model.lm_head, LowPrecisionLinear)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) is tied
    loss(model).backward()


def test_first_and_last_llama_layers_stay_in_half():
    low = convert(llama(), num_layers_at_start_in_half=1, num_layers_at_end_in_half=1).low
    assert {name.split(".")[2] for name in low} == {"1"} and len(low) == 7


def test_gpt2_converts_its_conv1d_layers_and_trains_alike():
    model = gpt2()
    plain = copy.deepcopy(model)
    result = convert(model)
    assert len(result.low) == 2 * 4 and len(result.norms) == 2 * 2 + 1 and list(result.kept) == ["lm_head"]
    layer = model.transformer.h[0].mlp.c_fc
    assert type(layer) is LowPrecisionConv1D and isinstance(layer, nn.Linear)
    assert (layer.in_features, layer.out_features) == (64, 256) and layer.weight.shape == (64, 256)
    want, got = loss(plain), loss(model)
    want.backward()
    got.backward()
    assert abs(got.item() - want.item()) < 0.02
    for (name, p), q in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        if "wpe" not in name:
            assert sqnr(p.grad, q[1].grad) > 8, name


def test_revert_gives_gpt2_its_conv1d_back():
    model = gpt2()
    want = model(TOKENS).logits
    convert(model, "delayed", half_backend=ReferenceBackend())
    revert_layers(model)
    assert type(model.transformer.h[0].mlp.c_fc) is Conv1D
    assert torch.equal(model(TOKENS).logits, want)


@pytest.mark.parametrize("scaling", ["delayed", "current", "rowwise", "blockwise", "mxfp8"])
def test_conv1d_computes_what_the_transposed_linear_computes(scaling):
    torch.manual_seed(0)
    conv, linear = Conv1D(256, 128), nn.Linear(128, 256)
    with torch.no_grad():
        conv.bias.normal_()
        linear.weight.copy_(conv.weight.t())
        linear.bias.copy_(conv.bias)
    convert(nn.ModuleDict({"x": conv}), scaling)
    convert(nn.ModuleDict({"x": linear}), scaling)
    x = torch.randn(3, 32, 128)
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    out, want = conv(a), linear(b)
    dy = torch.randn(3, 32, 256)
    out.backward(dy)
    want.backward(dy)
    assert torch.equal(out, want) and torch.equal(a.grad, b.grad)
    assert torch.equal(conv.weight.grad, linear.weight.grad.t()) and torch.equal(conv.bias.grad, linear.bias.grad)


def test_a_half_conv1d_weight_gets_its_fp32_gradient_unrounded():
    conv = Conv1D(64, 32).to(HALF)
    conv.weight.grad_dtype = torch.float32
    convert(nn.ModuleDict({"x": conv}), "current")
    conv(torch.randn(48, 32, dtype=HALF)).backward(torch.randn(48, 64).to(HALF))
    grad = conv.weight.grad
    assert grad.dtype == torch.float32 and not torch.equal(grad, grad.to(HALF).float())


def test_a_conv1d_that_is_left_in_half_computes_in_half():
    conv = Conv1D(40, 32)
    result = convert(nn.ModuleDict({"x": conv}), half_backend=ReferenceBackend())
    assert result.half == ["x"] and "side of 40" in result.kept["x"]
    x = torch.randn(8, 32)
    with torch.autocast("cpu", HALF):
        out = conv(x)
    assert out.dtype == HALF and sqnr(out - conv.bias.detach(), x @ conv.weight.detach()) > 40
