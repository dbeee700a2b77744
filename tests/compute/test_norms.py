"""Converted norms: half in, half out, FP32 statistics; and which classes of other libraries are norms at all."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from nemo_lowprec.chart.groups import LayerFilter
from nemo_lowprec.chart.recipe import Recipe
from nemo_lowprec.compute import ReferenceBackend, convert_layers, revert_layers
from nemo_lowprec.compute.patterns.norms import LowPrecisionLayerNorm, LowPrecisionRMSNorm

HALF = torch.bfloat16


def convert(module):
    model = nn.ModuleDict({"norm": module})
    return convert_layers(model, HALF, Recipe("current"), ReferenceBackend(), None, LayerFilter(), None)


def spread(module):
    """Give a norm weights that are far from their initial ones."""
    g = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(torch.rand(p.shape, generator=g) + 0.5)
    return module


NORMS = {
    "layer": lambda: nn.LayerNorm(48),
    "layer, no bias": lambda: nn.LayerNorm(48, bias=False),
    "layer, no affine": lambda: nn.LayerNorm(48, elementwise_affine=False),
    "layer, two dimensions": lambda: nn.LayerNorm((3, 48), eps=1e-3),
    "rms": lambda: nn.RMSNorm(48),
    "rms, eps": lambda: nn.RMSNorm(48, eps=1e-2),
    "rms, no affine": lambda: nn.RMSNorm(48, elementwise_affine=False),
}


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("weights", [torch.float32, HALF])
@pytest.mark.parametrize("inputs", [torch.float32, HALF])
def test_a_converted_norm_is_the_fp32_norm_rounded_to_half(norm, weights, inputs):
    module = spread(NORMS[norm]()).to(weights)
    x = (5 * torch.randn(4, 3, 48) + 3).to(inputs)
    with torch.no_grad():
        want = module.float()(x.float())
    module.to(weights)
    assert convert(module).norms == ["norm"]
    with torch.autocast("cpu", HALF):
        out = module(x)
    assert out.dtype == HALF
    torch.testing.assert_close(out.float(), want, rtol=2**-7, atol=2**-7)
    assert module(x).dtype == inputs


@pytest.mark.parametrize("norm", NORMS)
def test_gradients_of_a_converted_norm_are_the_fp32_norms(norm):
    module = spread(NORMS[norm]())
    x = torch.randn(4, 3, 48, requires_grad=True)
    dy = torch.randn(4, 3, 48).bfloat16()
    want = torch.autograd.grad(module(x), [x, *module.parameters()], dy.float())
    convert(module)
    with torch.autocast("cpu", HALF):
        got = torch.autograd.grad(module(x), [x, *module.parameters()], dy)
    for a, b in zip(got, want, strict=True):
        assert a.dtype == torch.float32
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_large_and_tiny_half_inputs_do_not_overflow_the_statistics():
    for norm in ("layer", "rms"):
        module = NORMS[norm]()
        convert(module)
        for size in (1e-4, 1e4):
            x = (torch.randn(2, 3, 48) * size).half()
            out = module.half()(x).float()
            assert out.isfinite().all() and (size < 1 or abs(out.std().item() - 1) < 0.1)


def test_a_float64_norm_is_left():
    result = convert(nn.LayerNorm(48).double())
    assert result.norms == [] and result.kept == {"norm": "its weight is float64"}


# The classes of other libraries


class OwnLayerNorm(nn.LayerNorm):
    """As timm writes it; tests/gpu/test_triton_norm.py converts timm's own, which needs torchvision."""

    fast = False

    def forward(self, x):
        return super().forward(x) if self.fast else F.layer_norm(x, self.normalized_shape, self.weight, self.bias, 1e-3)


def norms_of_libraries():
    """How each is made, and whether it is a LayerNorm, an RMSNorm or a zero-centered RMSNorm."""
    from transformers.models.cohere.modeling_cohere import CohereLayerNorm
    from transformers.models.convnext.modeling_convnext import ConvNextLayerNorm
    from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
    from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
    from transformers.models.llama.modeling_llama import LlamaRMSNorm
    from transformers.models.mistral.modeling_mistral import MistralRMSNorm
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm
    from transformers.models.t5.modeling_t5 import T5LayerNorm

    return {
        "llama": (lambda: LlamaRMSNorm(48, eps=1e-3), "rms"),
        "mistral": (lambda: MistralRMSNorm(48), "rms"),
        "qwen3": (lambda: Qwen3RMSNorm(48), "rms"),
        "t5": (lambda: T5LayerNorm(48), "rms"),
        "gemma": (lambda: GemmaRMSNorm(48), "zero-centered"),
        "gemma3": (lambda: Gemma3RMSNorm(48, eps=1e-3), "zero-centered"),
        "cohere": (lambda: CohereLayerNorm(48), "layer"),
        "convnext": (lambda: ConvNextLayerNorm(48, eps=1e-3, data_format="channels_last"), "layer"),
        "a subclass": (lambda: OwnLayerNorm(48, eps=1e-3), "layer"),
    }


@pytest.mark.parametrize("name", norms_of_libraries())
@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_norms_of_libraries_are_recognised_by_what_they_compute(name, trained, dtype):
    build, formula = norms_of_libraries()[name]
    module = build()
    module = (spread(module) if trained else module).to(dtype)
    before, kind, x = set(module.__dict__), type(module), torch.randn(4, 3, 48)
    with torch.no_grad():
        want = module.float()(x)
        module.to(dtype)
        assert convert(module).norms == ["norm"]
        assert type(module) is (LowPrecisionLayerNorm if formula == "layer" else LowPrecisionRMSNorm)
        assert formula == "layer" or module.zero_centered is (formula == "zero-centered")
        with torch.autocast("cpu", HALF):
            out = module(x)
    assert out.dtype == HALF and type(module).__name__ in repr(module)
    torch.testing.assert_close(out.float(), want, rtol=2**-6, atol=2**-6)
    revert_layers(module)
    assert type(module) is kind and torch.equal(module.float()(x), want)
    assert set(module.__dict__) == before


def test_a_norm_over_another_dimension_is_left():
    """Of as many channels as the probe's input has rows, so that no size is wrong."""
    from transformers.models.convnext.modeling_convnext import ConvNextLayerNorm

    module = ConvNextLayerNorm(3, data_format="channels_first")
    result = convert(module)
    assert result.norms == [] and "computes neither a plain LayerNorm nor a plain RMSNorm" in result.kept["norm"]
    assert module(torch.randn(2, 3, 4, 4)).shape == (2, 3, 4, 4)


# A class of transformers' that only has the name, as the next model's author may write it.
class ImpostorRMSNorm(nn.Module):
    __module__ = "transformers.models.impostor.modeling_impostor"

    def __init__(self, kind):
        super().__init__()
        self.weight, self.eps, self.kind = nn.Parameter(torch.ones(48)), 1e-6, kind

    def forward(self, x):
        if self.kind == "mean":
            return self.weight * x / (x.abs().mean(-1, keepdim=True) + self.eps)
        if self.kind == "tuple":
            return self.weight * x, None
        if self.kind == "raises":
            raise NotImplementedError
        normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * normed * (2 if self.kind == "doubled" else 1)


@pytest.mark.parametrize("kind", ["mean", "tuple", "raises", "doubled"])
def test_an_impostor_with_the_name_is_left_with_its_reason(kind):
    module = ImpostorRMSNorm(kind)
    result = convert(module)
    assert type(module) is ImpostorRMSNorm and result.norms == []
    assert result.kept == {"norm": "ImpostorRMSNorm computes neither a plain LayerNorm nor a plain RMSNorm"}


def test_an_unknown_class_that_does_compute_it_is_converted():
    assert convert(ImpostorRMSNorm("plain")).norms == ["norm"]


def test_a_norm_with_more_than_a_weight_is_left():
    module = ImpostorRMSNorm("plain")
    module.bias = nn.Parameter(torch.zeros(48))
    assert "computes neither a plain LayerNorm" in convert(module).kept["norm"]
