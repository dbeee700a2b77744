"""What a level declares is what a run is found to do."""

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from nemo_lowprec import CHART
from nemo_lowprec.compute import LowPrecisionLinear
from nemo_lowprec.plugins import LEVELS
from nemo_lowprec.report import Audit

CASES = [(name, {}) for name in LEVELS] + [(name, {"fp8_params": True}) for name in LEVELS if CHART[name].fp8_params]
CASES += [(name, {"half": "fp16", "loss_scale": 256.0}) for name in LEVELS if CHART[name].half]


def case_id(case):
    return "+".join([case[0], *(k if v is True else v for k, v in case[1].items() if not isinstance(v, float))])


class TinyLlama(pl.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=64,
                hidden_size=64,
                intermediate_size=96,
                num_hidden_layers=2,
                num_attention_heads=2,
                num_key_value_heads=1,
                max_position_embeddings=32,
                use_cache=False,
                tie_word_embeddings=True,
            )
        )

    def training_step(self, batch, index):
        logits = self.model(input_ids=batch[:, :-1]).logits
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def audit(name, module=None, **options):
    if CHART[name].scaling in ("mxfp8", "nvfp4"):
        options["backend"] = "reference"
    callback = Audit()
    trainer = pl.Trainer(
        accelerator="cpu", max_steps=3, plugins=LEVELS[name](**options), callbacks=[callback], logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    tokens = torch.randint(64, (8, 17), generator=torch.Generator().manual_seed(1))
    trainer.fit(module or TinyLlama(), torch.utils.data.DataLoader(tokens, batch_size=2))
    return callback.report


@pytest.mark.parametrize(("name", "options"), CASES, ids=map(case_id, CASES))
def test_a_run_is_found_to_do_what_the_chart_declares(name, options):
    report = audit(name, **options)
    assert {f.column for f in report.findings} == {
        "Computation (GEMM)", "Weight", "Master weight", "Weight gradient", "Optimizer states",
    }  # fmt: skip
    row = CHART[name]
    parts = {"converted", "rest"} | ({"vectors"} if row.vectors else set())
    assert {f.part for f in report.findings} == parts
    differing = [f for f in report.findings if not f.agrees]
    assert not differing and report.agrees
    sizes = {(f.column, f.part): f.bytes_per_param for f in report.findings}
    width = {"fp32": 4, "fp16": 2, "bf16": 2, "fp8": 1, None: None}
    if row.is_low_bit:  # test_bytes_a_parameter_of_the_msamp_levels has them
        return
    weight = "fp8" if options else row.weight
    assert sizes["Weight", "converted"] == pytest.approx(width[weight], rel=0.01)
    assert sizes["Weight", "rest"] == width[row.rest]
    assert sizes["Master weight", "rest"] == width[row.master_weight]
    assert sizes["Weight gradient", "converted"] == width[row.weight_grad]


class Wide(TinyLlama):
    """All matrices have rows that are a multiple of 128 long, as large models have."""

    def __init__(self):
        super().__init__()
        sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1, "num_attention_heads": 2}
        self.model = LlamaForCausalLM(LlamaConfig(vocab_size=64, max_position_embeddings=32, use_cache=False, **sizes))


@pytest.mark.parametrize("options", [{}, {"half": "fp16", "loss_scale": 256.0}], ids=["bf16", "fp16"])
@pytest.mark.parametrize("name", [n for n in LEVELS if CHART[n].is_low_bit])
def test_bytes_a_parameter_of_the_msamp_levels(name, options):
    report = audit(name, Wide(), **options)
    assert report.agrees
    sizes = {(f.column, f.part): f.bytes_per_param for f in report.findings if f.column != "Optimizer states"}
    o3 = name == "msamp_o3"
    for part in ("converted", "rest"):
        in_fp8 = o3 and part == "converted"
        weight, master = sizes["Weight", part], sizes["Master weight", part]
        assert weight == pytest.approx(1, abs=0.001) if in_fp8 else weight == 2
        assert master == 2 + 1 / 128 if in_fp8 else master is None
        assert 1 < sizes["Weight gradient", part] <= 1.05
        states = [f.bytes_per_param for f in report.findings if (f.column, f.part) == ("Optimizer states", part)]
        assert len(states) == 2
        assert sum(states) == 8 if name == "msamp_o1" else 3 < sum(states) <= 3.1
    for column in ("Weight", "Weight gradient"):
        assert sizes[column, "vectors"] == 4
    vectors = [f.bytes_per_param for f in report.findings if (f.column, f.part) == ("Optimizer states", "vectors")]
    assert sizes["Master weight", "vectors"] is None and vectors == [4, 4]


def test_an_fp32_gradient_at_an_msamp_level_is_found():
    class Cheat(TinyLlama):
        def on_train_start(self):  # a hook behind the plugin's own
            self.model.lm_head.weight.register_post_accumulate_grad_hook(self.undo)

        def undo(self, param):
            param.grad = param.grad.dequantize()

    report = audit("msamp_o2", Cheat())
    (gradient,) = [f for f in report.findings if f.column == "Weight gradient" and f.part == "rest"]
    assert gradient.observed == "fp32" and not report.agrees


@pytest.mark.parametrize("options", [{}, {"fp8_params": True}], ids=["half", "fp8_params"])
def test_gpt2_s_conv1d_layers_are_converted_and_stored_as_declared(options):
    class TinyGPT2(TinyLlama):
        def __init__(self):
            super().__init__()
            config = GPT2Config(vocab_size=64, n_embd=64, n_layer=2, n_head=2, n_positions=32, use_cache=False)
            self.model = GPT2LMHeadModel(config)

    report = audit("bf16_with_fp8_mixed", TinyGPT2(), **options)
    assert report.agrees
    (weight,) = [f for f in report.findings if f.column == "Weight" and f.part == "converted"]
    assert weight.bytes_per_param == pytest.approx(1 if options else 2, rel=0.01)


def test_a_weight_of_another_format_is_found():
    class Cheat(TinyLlama):
        def on_train_batch_end(self, outputs, batch, index):
            # Before the audit looks: callbacks' hooks run first, so change the step after which it looks beforehand.
            if index == 0:
                param = self.model.model.layers[0].mlp.up_proj.weight
                del param.master_weight
                param.data = param.data.float()
                param.grad = None
                param.grad_dtype = torch.float32

    report = audit("bf16_mixed", Cheat())
    (weight,) = [f for f in report.findings if f.column == "Weight" and f.part == "converted"]
    assert weight.observed == "bf16+fp32" and not report.agrees


def test_an_overridden_gemm_is_found_in_half_precision():
    report = audit("bf16_with_fp8_mixed", override_linear_precision=(False, False, True))
    (gemm,) = [f for f in report.findings if f.column == "Computation (GEMM)"]
    assert gemm.observed == gemm.declared == "bf16+fp8"


def test_a_level_that_converted_nothing_does_not_pass():
    report = audit("bf16_with_fp8_mixed", skip=["model.*"])
    (gemm,) = [f for f in report.findings if f.column == "Computation (GEMM)"]
    assert gemm.observed == "–" and not report.agrees


def test_the_audit_leaves_the_layers_as_they_were():
    class AtTheEnd(TinyLlama):
        def on_train_end(self):
            layers = [m for m in self.modules() if isinstance(m, LowPrecisionLinear) and m.gemm_plan.recipe is not None]
            self.backends = [type(m.gemm_plan.backend).__name__ for m in layers]

    module = AtTheEnd()
    audit("bf16_with_fp8_mixed", module)
    assert module.backends == ["ReferenceBackend"] * 14


def test_the_audit_needs_one_of_our_levels():
    trainer = pl.Trainer(
        accelerator="cpu", max_steps=1, callbacks=[Audit()], logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    with pytest.raises(ValueError, match="Audit needs a Trainer with a level of nemo_lowprec"):
        trainer.fit(TinyLlama(), torch.utils.data.DataLoader(torch.randint(64, (4, 17)), batch_size=2))
