"""Private names of transformers' experts and checkpointed layers, and of PEFT's layers."""

from functools import partial
from importlib.metadata import version

import peft
import pytest
import torch
from packaging.version import Version
from torch import nn
from transformers import LlamaConfig, LlamaModel, MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from nemo_lowprec.compat import transformers


def experts():
    return MixtralExperts(MixtralConfig(hidden_size=16, intermediate_size=8, num_local_experts=2))


def test_gates_multiply_the_activation_of_one_half_with_the_other():
    x = torch.randn(3, 16)
    gate, up = x.chunk(2, -1)
    assert torch.equal(transformers.apply_gate(experts(), x), nn.functional.silu(gate) * up)


def test_experts_say_where_they_are():
    module = experts()
    if Version(version("transformers")) >= Version("5.18"):  # earlier ones have no parallel experts
        assert module.__dict__["_is_expert_parallel"] is False
    assert not transformers.is_expert_parallel(module)
    module._is_expert_parallel = True
    assert transformers.is_expert_parallel(module) and not transformers.is_expert_parallel(nn.Linear(2, 2))


@pytest.mark.parametrize("reentrant", [True, False])
def test_layers_that_are_recomputed_hold_torchs_checkpoint(reentrant):
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "vocab_size": 16}
    model = LlamaModel(LlamaConfig(num_hidden_layers=1, **sizes))
    (layer,) = model.layers
    assert not transformers.is_checkpointed(layer)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    assert transformers.is_checkpointed(layer) and not transformers.is_checkpointed(layer.mlp)
    function = layer.__dict__[transformers.CHECKPOINT]
    assert transformers.is_plain_checkpoint(function)
    assert not transformers.is_plain_checkpoint(partial(function, context_fn=None))


def test_adapters_take_their_input_in_their_dtype():
    config = peft.LoraConfig(r=4, target_modules=["0"])
    layer = peft.get_peft_model(nn.Sequential(nn.Linear(8, 8)), config).base_model.model[0]
    assert transformers.cast_to_adapter(layer, torch.ones(2, 8), torch.bfloat16).dtype == torch.bfloat16


def test_a_saved_model_names_the_widest_dtype_of_its_values(tmp_path):
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "vocab_size": 16}
    model = LlamaModel(LlamaConfig(num_hidden_layers=1, **sizes)).bfloat16()
    model.norm.float()
    plain = dict(model.__dict__)
    transformers.wrap_save_and_load(nn.Sequential(model))
    model.save_pretrained(tmp_path)
    assert LlamaConfig.from_pretrained(tmp_path).dtype == torch.float32
    model.save_pretrained(tmp_path, state_dict=model.half().state_dict())
    assert LlamaConfig.from_pretrained(tmp_path).dtype == torch.float16
    assert type(model) is LlamaModel
    transformers.unwrap_save_and_load(nn.Sequential(model))
    assert model.__dict__.keys() == plain.keys()


def test_an_adapter_is_loaded_into_its_parameters(tmp_path):
    model = peft.get_peft_model(nn.Sequential(nn.Linear(8, 8)), peft.LoraConfig(r=4, target_modules=["0"]))
    model.save_pretrained(tmp_path)
    model.bfloat16()
    own = list(model.parameters())
    transformers.wrap_save_and_load(model)
    model.load_adapter(tmp_path, "default")
    assert all(a is b for a, b in zip(own, model.parameters(), strict=True))
    model.load_adapter(tmp_path, "second")
    assert {p.dtype for name, p in model.named_parameters() if ".second." in name} == {torch.float32}
    transformers.unwrap_save_and_load(model)
    assert "load_adapter" not in model.__dict__
