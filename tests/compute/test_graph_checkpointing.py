"""Layers of transformers whose checkpoint a graph takes over."""

import copy
import pickle
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM

from nemo_lowprec.compat.transformers import CHECKPOINT, is_checkpointed
from nemo_lowprec.compute.graphs.checkpointing import resume, suspend, suspended_checkpoint
from nemo_lowprec.compute.graphs.guard import obstacle


@pytest.fixture
def model():
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "vocab_size": 64}
    made = LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, use_cache=False, **sizes)).train()
    made.gradient_checkpointing_enable({"use_reentrant": False})
    return made


def calls_of(layer, model):
    """How often a step computes what is in the layer."""
    calls = []
    layer.mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    model(input_ids=torch.arange(8)[None]).logits.sum().backward()
    return len(calls)


def test_a_suspended_layer_is_computed_once(model):
    first, second = model.model.layers
    assert suspend(first) and suspend(first)
    assert calls_of(first, model) == 1 and calls_of(second, model) == 2


def test_its_checkpoint_is_the_one_from_before(model):
    layer = model.model.layers[0]
    before = layer.__dict__[CHECKPOINT]
    assert suspended_checkpoint(layer) is None
    suspend(layer)
    assert suspended_checkpoint(layer) is before
    assert copy.deepcopy(layer).__dict__[CHECKPOINT].func is checkpoint
    assert pickle.loads(pickle.dumps(layer)).__dict__[CHECKPOINT].func is checkpoint
    model.gradient_checkpointing_disable()
    assert suspended_checkpoint(layer) is None and not suspend(layer)
    model.gradient_checkpointing_enable()
    resume(layer)
    assert layer.__dict__[CHECKPOINT].func is checkpoint


@pytest.mark.parametrize("function", [lambda f, *args: f(*args), partial(checkpoint, use_reentrant=False, debug=True)])
def test_another_checkpoint_stays(model, function):
    layer = model.model.layers[0]
    layer.__dict__[CHECKPOINT] = function
    assert not suspend(layer) and layer.__dict__[CHECKPOINT] is function


def test_what_is_around_recomputed_layers_is_no_graph(model):
    layer = model.model.layers[0]
    assert obstacle(model.model.layers) == "0 is recomputed in backward"
    assert is_checkpointed(layer) and obstacle(layer) is None and not suspend(nn.Linear(2, 2))
