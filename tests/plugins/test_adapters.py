"""Adapters of PEFT under the Trainer: resumed, audited, validated and exported."""

import pytest
import torch
from adapted_models import TOKENS, Adapted, base_layers, loss_of
from lightning.pytorch.callbacks import BaseFinetuning
from peft import LoraConfig, get_peft_model
from support import assert_same, plugin, replay, save_at, trainer
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

from nemo_lowprec.cli import main
from nemo_lowprec.models import CausalLM
from nemo_lowprec.report import Audit
from nemo_lowprec.tensors import Fp8Weight

CASES = ["te_fp8", "msamp_o2", "msamp_o3", "bf16_mixed", "bf16_with_fp8_mixed"]


def fit(module, case, *callbacks, ckpt=None, steps=6, **options):
    run = trainer(plugin(case), *callbacks, max_steps=steps, max_epochs=-1, **options)
    run.fit(module, replay(TOKENS[:3]), ckpt_path=ckpt)
    return run


@pytest.mark.parametrize(("case", "dtype"), zip(CASES, [torch.float32, torch.bfloat16] * 3, strict=False))
def test_a_run_is_resumed_bit_for_bit(case, dtype, tmp_path):
    whole, first, second = (Adapted("dora", dtype) for _ in range(3))
    fit(whole, case)
    fit(first, case, save_at(tmp_path, 3), steps=3)  # an epoch
    fit(second, case, ckpt=tmp_path / "step=3.ckpt")
    assert second.losses == whole.losses[3:] and len(whole.losses) == 6
    assert_same(second.state_dict(), whole.state_dict())


@pytest.mark.parametrize("case", CASES)
def test_the_audit_shows_weights_without_masters_gradients_and_states(case):
    audit = Audit()
    fit(Adapted(dtype=torch.bfloat16), case, audit, steps=3)
    found = {(f.part, f.column): f for f in audit.report.findings}
    assert audit.report.agrees
    parts = {"frozen", "frozen in FP8"} if case != "bf16_mixed" else {"frozen"}
    assert {part for part, _ in found if part.startswith("frozen")} == parts
    for part in parts:
        size = found[part, "Weight"].bytes_per_param
        assert size == pytest.approx(1, abs=0.01) if part == "frozen in FP8" else 2 <= size < 2.1
        for column in ("Master weight", "Weight gradient", "Optimizer states"):
            assert found[part, column].observed == "–" and found[part, column].bytes_per_param is None


class Validated(Adapted):
    def validation_step(self, batch, index):
        self.log("loss", loss_of(self.model, batch))


def test_an_evaluation_leaves_every_bit(capsys):
    module = Validated(dtype=torch.bfloat16)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    trainer(plugin("bf16_with_fp8_mixed")).validate(module, replay(TOKENS), verbose=False)
    assert_same(dict(module.state_dict()), before)
    fit(module, "bf16_with_fp8_mixed", steps=2)
    said = " ".join(capsys.readouterr().out.split())
    assert "an adapter of PEFT" in said and "parameters in FP8, 1 byte each" in said


class Unfreeze(BaseFinetuning):
    """Trains the first base layer from the second epoch on."""

    def freeze_before_training(self, pl_module):
        self.layer = next(iter(base_layers(pl_module).values()))
        self.before = self.layer.weight.detach().clone()

    def finetune_function(self, pl_module, epoch, optimizer):
        if epoch == 1:
            assert isinstance(self.layer.weight, Fp8Weight) == (self.in_fp8)
            self.unfreeze_and_add_param_group(self.layer, optimizer, lr=1e-2, initial_denom_lr=1.0)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore:.*stored in FP8 while frozen")
def test_a_base_layer_is_unfrozen_by_lightnings_callback(case):
    unfreeze, module = Unfreeze(), Adapted()
    unfreeze.in_fp8 = case != "bf16_mixed"
    run = trainer(plugin(case), unfreeze, max_epochs=3)
    run.fit(module, replay(TOKENS[:2]))
    weight = unfreeze.layer.weight
    assert type(weight) is torch.nn.Parameter and weight.dtype == torch.float32
    assert (weight - unfreeze.before).abs().max() > 0.02  # four steps of 0.01
    assert len(module.losses) == 6 and module.losses[-1] < module.losses[0]


class Merged(CausalLM):
    """LoRA on a language model, merged when training ends."""

    def configure_model(self):
        if self.model is None:
            super().configure_model()
            self.model = get_peft_model(self.model, LoraConfig(r=8, target_modules="all-linear"))

    def on_train_end(self):
        self.model = self.model.merge_and_unload()


def test_a_merged_model_is_exported(tmp_path):
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    module = Merged("llama_tiny", config={**sizes, "num_key_value_heads": 1}, vocab_size=128, warmup_steps=1)
    ids = torch.randint(0, 128, (3, 2, 16), generator=torch.Generator().manual_seed(1))
    run = trainer(plugin("bf16_with_fp8_mixed"), max_steps=3)
    run.fit(module, DataLoader([{"input_ids": i, "labels": i.roll(-1, 1)} for i in ids], batch_size=None))
    run.save_checkpoint(tmp_path / "merged.ckpt")
    main(["export", str(tmp_path / "merged.ckpt"), str(tmp_path / "out")])
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16)
    for name, value in module.model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value.bfloat16()), name
