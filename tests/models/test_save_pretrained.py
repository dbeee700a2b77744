"""``save_pretrained`` of a converted model: ``from_pretrained`` reads back what ``state_dict`` holds, unrounded."""

import copy

import pytest
import torch
from lightning.pytorch import Callback
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader
from transformers import LlamaForCausalLM

import nemo_lowprec
from nemo_lowprec.engine import Engine
from tests.faces import Task, batches, make_model, make_optimizer
from tests.support import CASES, clone, plugin, trainer


def read_back(folder):
    model = LlamaForCausalLM.from_pretrained(folder)
    return model.dtype, dict(model.state_dict())


def train(model, optimizer, steps=1):
    for batch in batches("llama", steps):
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("case", CASES)
def test_all_values_are_read_back_in_the_middle_of_a_run(case, tmp_path):
    saved = {}

    class Save(Callback):
        def on_train_batch_end(self, run, task, *_):
            task.model.save_pretrained(tmp_path)
            saved.update(clone(dict(task.model.state_dict())))

    task = Task("llama")
    cls = type(task.model)
    data = DataLoader(batches("llama", 1), batch_size=None)
    trainer(plugin(case), Save(), max_steps=1).fit(task, data)
    dtype, values = read_back(tmp_path)
    assert dtype == torch.float32 and values.keys() == saved.keys()
    assert all(torch.equal(value, saved[name].float()) for name, value in values.items())
    assert type(task.model) is cls and "save_pretrained" not in task.model.__dict__


@pytest.mark.parametrize("level", ["te_fp8", "bf16_with_fp8_mixed", "msamp_o2"])
def test_trained_parts_of_a_model_in_bf16_are_not_rounded(level, tmp_path):
    model = make_model("llama").bfloat16().train().requires_grad_(False)
    model.lm_head.requires_grad_(True)
    optimizer = torch.optim.AdamW(model.lm_head.parameters(), lr=1e-3)
    model, optimizer = nemo_lowprec.prepare(model, optimizer, level)
    train(model, optimizer)
    model.save_pretrained(tmp_path)
    _, values = read_back(tmp_path)
    assert all(torch.equal(values[name], value.float()) for name, value in model.state_dict().items())
    assert not torch.equal(values["lm_head.weight"], values["lm_head.weight"].bfloat16().float())


def test_a_base_in_bf16_stays_in_bf16(tmp_path):
    model = get_peft_model(make_model("llama").bfloat16().train(), LoraConfig(r=2, target_modules=["q_proj"]))
    base = model.get_base_model()
    model, optimizer = nemo_lowprec.prepare(model, make_optimizer(model), "bf16_with_fp8_mixed")
    train(model, optimizer)
    merged = model.merge_and_unload()
    merged.save_pretrained(tmp_path, state_dict={n: v.bfloat16() for n, v in merged.state_dict().items()})
    assert merged is base and read_back(tmp_path)[0] == torch.bfloat16


def test_a_copy_saves_its_own_values(tmp_path):
    model = make_model("llama").train()
    model, optimizer = nemo_lowprec.prepare(model, make_optimizer(model), "bf16_with_fp8_mixed")
    train(model, optimizer)
    average = copy.deepcopy(model)
    train(model, optimizer, 2)
    average.save_pretrained(tmp_path)
    _, values = read_back(tmp_path)
    assert all(torch.equal(values[name], value.float()) for name, value in average.state_dict().items())
    assert not torch.equal(values["lm_head.weight"], model.state_dict()["lm_head.weight"].float())


def test_a_reverted_model_saves_as_transformers_does(tmp_path):
    model = make_model("llama").train()
    model, optimizer = nemo_lowprec.prepare(model, make_optimizer(model), "msamp_o2")
    train(model, optimizer)
    Engine.of(model).revert()
    model.bfloat16().save_pretrained(tmp_path)
    assert read_back(tmp_path)[0] == torch.bfloat16
