"""What passes have learned of a model is saved as plain values, and restored into another instance of the model."""

import json

import pytest
import torch
from torch import nn

import nemo_lowprec
from nemo_lowprec.compute import ReferenceBackend
from nemo_lowprec.compute.learned import learned, restore
from nemo_lowprec.engine import Engine
from tests.faces import batches, make_model, make_optimizer


def prepared(task="llama", level="bf16_with_fp8_mixed"):
    model = make_model(task)
    return nemo_lowprec.prepare(model, make_optimizer(model), level=level, backend="reference")


def step(model, optimizer, batch):
    optimizer.zero_grad()
    model(**batch).loss.backward()
    optimizer.step()


@pytest.mark.parametrize("task", ["vit", "llama"])
def test_readers_of_activations_are_saved_by_name_and_known_after_loading(task):
    model, optimizer = prepared(task)
    assert "readers" not in learned(model)
    for batch in batches(task)[:2]:
        step(model, optimizer, batch)
    facts = learned(model)
    last = {"vit": "fc2.weight", "llama": "down_proj.weight"}[task]
    assert len(facts["readers"]) == 2 and all(state["layer"].endswith(last) for state in facts["readers"].values())
    assert json.loads(json.dumps(facts)) == facts

    again, other = prepared(task)
    other.load_state_dict(optimizer.state_dict())
    assert learned(again) == facts and Engine.of(again).columns.computation.state_dict()["learned"] == facts


@pytest.mark.parametrize("loads", [False, True])
def test_the_first_pass_after_loading_hands_quantized_results_over(loads, monkeypatch):
    model, optimizer = prepared()
    for batch in batches("llama")[:2]:
        step(model, optimizer, batch)
    state = optimizer.state_dict()
    if not loads:
        del state["fp8_learned"]
    again, other = prepared()
    other.load_state_dict(state)
    activated, activate = [], ReferenceBackend.activate
    monkeypatch.setattr(
        ReferenceBackend, "activate", lambda self, *args, **how: activated.append(1) or activate(self, *args, **how)
    )
    step(again, other, batches("llama")[2])
    assert len(activated) == (2 if loads else 0)  # one gated MLP in each layer
    step(again, other, batches("llama")[3])
    assert len(activated) == (4 if loads else 2)


def test_names_that_a_model_has_not_are_left_out():
    model, _ = prepared()
    reader = {"layers": ["gone.weight"], "layer": "gone.weight", "columnwise": [[True, True]], "record": True,
              "ambiguous": False}  # fmt: skip
    restore(model, {"branches": {"gone.weight": []}, "readers": {"model.layers.0.mlp": reader, "gone": reader}})
    assert learned(model) == {}


def test_a_branch_is_restored_without_a_norm_where_no_kernel_computes_both():
    model, optimizer = prepared()
    facts = {"branches": {"model.layers.0.mlp.down_proj.weight": ["model.layers.1.input_layernorm", "bfloat16"]}}
    restore(model, facts)
    assert learned(model) == {"branches": {"model.layers.0.mlp.down_proj.weight": []}}
    step(model, optimizer, batches("llama")[0])
    assert isinstance(model, nn.Module) and torch.isfinite(model.lm_head.weight).all()
