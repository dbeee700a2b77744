"""GPTModel with Transformer Engine's layers on a GPU, one rank: logits, gradients and weights are transformers'."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForCausalLM

from nemo_lowprec.models import PRESETS
from nemo_lowprec.models.megatron_llama import build_gpt, gpt_architecture
from nemo_lowprec.models.megatron_weights import from_transformers, part_of, to_transformers

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

# It cannot be imported once something else has loaded cuDNN.
pytest.importorskip("transformer_engine.pytorch")

LLAMA3_ROPE = {**PRESETS["llama32_1b"].config["rope_parameters"], "rope_theta": 100.0}
MODELS = {
    "llama": ("llama", {}),
    "llama_tied": ("llama", {"tie_word_embeddings": True}),
    "llama_rope_llama3": ("llama", {"rope_parameters": LLAMA3_ROPE, "max_position_embeddings": 16384}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
}


@pytest.fixture
def megatron(monkeypatch):
    """Megatron-core's process groups, of this process only, and its random states."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    for name in ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN"):
        monkeypatch.setenv(name, "1")  # as GPTModel sets them, so that they are unset again
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        parallel_state.initialize_model_parallel()
        model_parallel_cuda_manual_seed(1234)
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def transformers_model(name):
    kind, own = MODELS[name]
    config = AutoConfig.for_model(
        kind,
        **{
            "vocab_size": 500,
            "hidden_size": 256,
            "intermediate_size": 512,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "initializer_range": 0.06,  # so that heads attend to some tokens more than to others
            **own,
        },
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    with torch.no_grad():
        for param in model.parameters():
            if param.dim() == 1:  # norms and biases, which start alike
                param.uniform_(0.5, 1.5)
    return model.to("cuda").eval()


def gpt_model(reference, dtype, **fields):
    """The GPTModel with the weights of a transformers model, and its architecture."""
    architecture = gpt_architecture(reference.config)
    architecture = replace(architecture, gpt={**architecture.gpt, "vocab_size": 512})
    model = build_gpt(architecture, {"params_dtype": dtype, "bf16": dtype == torch.bfloat16, **fields})
    full = from_transformers(reference.state_dict(), architecture)
    params = dict(model.named_parameters())
    assert params.keys() == full.keys()
    with torch.no_grad():
        for name, param in params.items():
            assert (param.dtype, param.shape) == (dtype, full[name].shape)
            param.copy_(part_of(name, full[name], 0, 1))
    return model, architecture


def error(actual, expected):
    return ((actual.double() - expected.double()).norm() / expected.double().norm()).item()


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_logits_and_gradients_in_fp32(megatron, name, fused):
    reference = transformers_model(name)
    switches = ("bias_activation_fusion", "bias_dropout_fusion", "apply_rope_fusion")
    model, architecture = gpt_model(reference, torch.float32, **({} if fused else dict.fromkeys(switches, False)))
    assert all(getattr(model.config, switch) == fused for switch in switches)
    ids = torch.randint(0, 500, (2, 96), device="cuda")
    labels = torch.randint(0, 500, (2, 96), device="cuda")
    positions = torch.arange(96, device="cuda").expand(2, -1)
    expected = reference(input_ids=ids).logits
    logits = model(ids, positions, None)
    assert logits.shape == (2, 96, 512)
    # Transformer Engine's FP32 GEMMs are TF32, whatever torch is set to: 10 bits of mantissa.
    assert error(logits[..., :500], expected) < 5e-3
    assert not logits[..., 500:].any()
    for out in (expected, logits[..., :500]):
        F.cross_entropy(out.flatten(0, 1), labels.flatten()).backward()
    full = {n: p.grad for n, p in model.named_parameters()}
    grads = to_transformers(full, architecture)
    of_reference = {n: p.grad for n, p in reference.named_parameters()}
    for param, grad in of_reference.items():
        assert error(grads[param][: len(grad)], grad) < 2e-2, param


@pytest.mark.parametrize("name", ["llama", "llama_tied"])
@torch.no_grad()
def test_logits_in_bf16(megatron, name):
    reference = transformers_model(name)
    for param in reference.parameters():
        param.copy_(param.bfloat16())
    model, _ = gpt_model(reference, torch.bfloat16)
    ids = torch.randint(0, 500, (2, 128), device="cuda")
    logits = model(ids, torch.arange(128, device="cuda").expand(2, -1), None)
    assert logits.dtype == torch.bfloat16
    assert error(logits[..., :500], reference(input_ids=ids).logits) < 3e-2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MODELS)
def test_weights_come_out_as_they_went_in(megatron, name, dtype):
    reference = transformers_model(name)
    model, architecture = gpt_model(reference, dtype)
    out = to_transformers({n: p.detach() for n, p in model.named_parameters()}, architecture)
    expected = reference.state_dict()
    assert out.keys() == expected.keys()
    for param, tensor in expected.items():
        assert out[param].dtype == dtype and torch.equal(out[param][: len(tensor)], tensor.to(dtype)), param


def test_the_first_weights_are_megatrons_own(megatron):
    architecture = gpt_architecture(transformers_model("llama").config)
    model = build_gpt(architecture, {"params_dtype": torch.float32})
    layer = model.decoder.layers[0]
    for weight, std in (
        (model.embedding.word_embeddings.weight, 0.06),
        (layer.self_attention.linear_qkv.weight, 0.06),
        (layer.mlp.linear_fc2.weight, 0.06 / 2),  # of two layers: divided by the root of 2 * layers
    ):
        assert weight.std().item() == pytest.approx(std, rel=0.05)
    assert (layer.mlp.linear_fc1.layer_norm_weight == 1).all()
