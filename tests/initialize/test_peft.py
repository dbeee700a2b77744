"""Adapters of PEFT in loops without Lightning: ``prepare``, ``initialize``, Accelerate and transformers' Trainer."""

import accelerate
import pytest
import torch
from adapted_models import TOKENS, adapted, base_layers, llama, loss_of
from peft import PeftModel
from transformers import Trainer, TrainingArguments

import nemo_lowprec
from nemo_lowprec.tensors import Fp8Weight

LEVELS = ["te_fp8", "bf16_with_fp8_mixed", "msamp_o2"]


def prepared(level, method="lora"):
    model = adapted(method, torch.bfloat16)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    return nemo_lowprec.prepare(model, optimizer, level)


def assert_stored(model):
    assert all(isinstance(layer.weight, Fp8Weight) and layer.weight.is_frozen for layer in base_layers(model).values())


@pytest.mark.parametrize(("level", "method"), zip(LEVELS, ["lora", "dora", "lora"], strict=True))
def test_a_loop_of_ones_own(level, method):
    model, optimizer = prepared(level, method)
    losses = []
    for tokens in TOKENS:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=level == "msamp_o2"):
            loss = loss_of(model, tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.5
    assert_stored(model)


def test_msamps_initialize_with_all_parameters():
    model = adapted()
    model, optimizer = nemo_lowprec.initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-2), opt_level="O2")
    first = loss_of(model, TOKENS[0])
    first.backward()
    optimizer.step()
    assert_stored(model)
    assert {p.requires_grad for p in optimizer.state} == {True}
    assert loss_of(model, TOKENS[0]) < first


@pytest.mark.parametrize("level", LEVELS)
def test_accelerate(level):
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
    try:
        model, optimizer = accelerator.prepare(*prepared(level))
        losses = []
        for tokens in TOKENS:
            loss = loss_of(model, tokens)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        assert losses[-1] < losses[0] - 0.5
        assert_stored(accelerator.unwrap_model(model))
    finally:
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.parametrize("level", LEVELS)
def test_the_trainer_of_transformers(level, tmp_path):
    model, optimizer = prepared(level)
    data = [{"input_ids": ids, "labels": ids} for ids in TOKENS.flatten(0, 1)]
    arguments = TrainingArguments(
        str(tmp_path), per_device_train_batch_size=4, max_steps=8, save_steps=8, report_to=[], use_cpu=True,
        bf16=level == "msamp_o2", logging_steps=1, disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=data, optimizers=(optimizer, None))
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0] - 0.2
    assert_stored(model)
    saved = tmp_path / "checkpoint-8"
    assert {p.suffix for p in saved.glob("adapter_model*")} == {".safetensors"} and not list(saved.glob("model*"))
    again = PeftModel.from_pretrained(llama(torch.bfloat16), saved).state_dict()
    trained = model.state_dict()
    assert all(torch.equal(again[name].float(), trained[name].float()) for name in again if "lora_" in name)


@pytest.mark.parametrize("level", [*LEVELS, "bf16_mixed"])
def test_an_adapter_is_loaded_back_exactly_and_trains_on(level, tmp_path):
    model, optimizer = prepared(level)

    def step(tokens):
        loss_of(model, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
        return {name: value.clone() for name, value in model.state_dict().items() if "lora_" in name}

    saved = step(TOKENS[0])
    model.save_pretrained(tmp_path)
    step(TOKENS[1])
    model.load_adapter(tmp_path, "default", is_trainable=True)
    loaded = {name: value for name, value in model.state_dict().items() if name in saved}
    assert all(torch.equal(loaded[name], value) for name, value in saved.items())
    assert {p for p in model.parameters() if p.requires_grad} == {
        p for g in optimizer.param_groups for p in g["params"]
    }
    after = step(TOKENS[2])
    assert not any(torch.equal(after[name], value) for name, value in saved.items())
