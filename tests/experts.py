"""Tiny modules of experts as transformers builds them, and what they compute, for tests on CPUs and GPUs."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts

from nemo_lowprec import prepare
from nemo_lowprec.chart.groups import LayerFilter
from nemo_lowprec.chart.recipe import Recipe
from nemo_lowprec.compute import convert_layers
from nemo_lowprec.engine.build import new_amaxes

KINDS = ("mixtral", "gpt_oss", "nemotron_h")
TOKENS, HIDDEN, INNER, EXPERTS, TOP_K = 96, 64, 48, 5, 2


def experts_of(kind, tokens=TOKENS, hidden=HIDDEN, inner=INNER, experts=EXPERTS, top_k=TOP_K, device="cpu"):
    """A module of experts in a parent, and its inputs: tokens, index, scores. The last expert has no token."""
    torch.manual_seed(0)
    config = AutoConfig.for_model("mixtral", hidden_size=hidden, intermediate_size=inner, num_local_experts=experts)
    if kind == "gpt_oss":
        config.swiglu_alpha, config.swiglu_limit = 1.702, 7.0
        module = GptOssExperts(config)
    elif kind == "nemotron_h":
        sizes = {"n_routed_experts": experts, "hidden_size": hidden, "moe_intermediate_size": inner}
        config = SimpleNamespace(**sizes, moe_latent_size=None, mlp_hidden_act="relu2", _experts_implementation="eager")
        module = NemotronHExperts(config)
    else:
        module = MixtralExperts(config)
    config._experts_implementation = "eager"
    for param in module.parameters():
        nn.init.normal_(param, std=0.05)
    scores = torch.rand(tokens, top_k) + 0.1
    index = torch.stack([torch.randperm(experts - 1)[:top_k] for _ in range(tokens)])
    parent = nn.Sequential()
    parent.experts = module
    x = torch.randn(tokens, hidden)
    return parent.to(device), x.to(device), index.to(device), scores.to(device)


def convert(parent, backend, recipe=None, half=torch.bfloat16):
    """Convert ``parent``; returns the amaxes of its operands."""
    recipe = Recipe("delayed") if recipe is None else recipe
    amaxes = new_amaxes(recipe)
    done = convert_layers(
        parent, half, recipe, backend, None, LayerFilter(), amaxes.histories, weights=amaxes.weights
    )  # fmt: skip
    assert len(done.low) == 2, done.kept
    amaxes.settle(next(parent.parameters()).device)
    return amaxes


def passes(parent, x, index, scores, half=torch.bfloat16):
    """One forward and backward pass: the output, and the gradients by name."""
    x, scores = x.clone().requires_grad_(), scores.clone().requires_grad_()
    parent.zero_grad()
    with torch.autocast(x.device.type, half):
        out = parent.experts(x, index, scores)
    weight = torch.linspace(-1, 1, out.numel(), device=x.device).view_as(out)
    (out.float() * weight).sum().backward()
    grads = {name: param.grad.clone() for name, param in parent.experts.named_parameters()}
    return out.detach(), {**grads, "tokens": x.grad, "scores": scores.grad}


def distance(found, expected):
    """The norm of the difference, as a part of the norm of what is expected."""
    return ((found.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-30)).item()


def is_of_experts(name, module):
    """A filter that converts experts, and no linear layer."""
    return not isinstance(module, nn.Linear)


def trained(level, device="cpu", convert=None, steps=16, **options):  # graphs come at the 13th step at the latest
    """A tiny Qwen3-MoE after a few steps on one batch, and its losses; ``level`` None: in FP32.

    At twice this learning rate any rounding grows in the steps 4 to 7, on every backend: the losses of BF16 autocast
    stray from the losses of FP32 by 0.04, the losses of FP8 by 0.1.
    """
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "qwen3_moe", vocab_size=512, hidden_size=128, intermediate_size=128, moe_intermediate_size=128,
        num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=32, num_experts=8,
        num_experts_per_tok=2, use_cache=False,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if level is not None:
        prepare(model, optimizer, level, convert=convert, **options)
    tokens = torch.randint(512, (4, 65), device=device, generator=torch.Generator(device).manual_seed(1))
    return model, train_on(tokens, model, optimizer, steps, level is not None)


def train_on(tokens, model, optimizer, steps, autocast=True):
    """The losses of a language model's steps on one batch [rows, length + 1]."""
    losses = []
    for _ in range(steps):
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=autocast):
            logits = model(input_ids=tokens[:, :-1]).logits
        loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses).tolist()
