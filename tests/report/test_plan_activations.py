"""Planned activations against what autograd keeps in real runs of a CPU, and the rules by which a GPU differs."""

from dataclasses import replace

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from nemo_lowprec.formats import floats, gemm_block_scaling
from nemo_lowprec.models import CausalLM
from nemo_lowprec.report import plan_training
from nemo_lowprec.report.plan import activations
from nemo_lowprec.report.plan.on_gpu import GpuRules
from nemo_lowprec.tensors import QuantizedTensor, gradient
from nemo_lowprec.weights import master_of
from tests.attention_models import Attention
from tests.support import plugin

LEVELS = [
    "fp16_amp", "te_fp8", "msamp_o1", "msamp_o2", "msamp_o3", "fp16_mixed", "bf16_mixed", "bf16_with_fp8_mixed",
    "bf16_with_fp8_mixed+fp8_params",
]  # fmt: skip
SAMPLE = {"micro_batch_size": 2, "seq_length": 32}


def language_model(recompute=False, layers=5):
    model = CausalLM(
        "llama_tiny", config={"num_hidden_layers": layers}, vocab_size=512, activation_checkpointing=recompute
    )  # fmt: skip
    model.configure_model()
    return model


def storages(tensor):
    parts = tensor.parts() if isinstance(tensor, QuantizedTensor) else (tensor,)
    return {part.untyped_storage()._cdata: part.untyped_storage().nbytes() for part in parts}


def kept(model, precision):
    """Bytes of the storages that a real forward pass hands to autograd, without those of parameters, of buffers and
    of the quantized weights that stay for the next pass."""
    engine = precision.engine
    engine.convert(model, torch.device("cpu"))
    engine.settle()
    known, saved, alive = set(), {}, []
    for tensor in [*model.parameters(), *model.buffers()]:
        known |= storages(tensor).keys()
        if (master := master_of(tensor)) is not None:
            known |= storages(master).keys()

    def pack(tensor):
        assert not isinstance(tensor, FakeTensor)  # nothing of a plan stays behind
        saved.update(storages(tensor))
        alive.append(tensor)
        return tensor

    tokens = torch.zeros(SAMPLE["micro_batch_size"], SAMPLE["seq_length"], dtype=torch.int64)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), engine.forward_context():
        model._loss_sum({"input_ids": tokens, "labels": tokens})
    for state in engine.amaxes.weights.states.values():
        if state._kept is None:  # the backward pass has its copies
            continue
        for part in (state._kept.rowwise, state._kept.columnwise):
            known |= storages(part.data).keys() | storages(part.scale_inv).keys() if part is not None else set()
    return sum(size for key, size in saved.items() if key not in known)


RUNS = [(case, False) for case in LEVELS] + [(case, True) for case in ("te_fp8", "msamp_o3", "bf16_with_fp8_mixed")]


@pytest.mark.parametrize(("case", "recompute"), RUNS)
def test_a_real_forward_pass_keeps_what_is_planned(case, recompute):
    for table in (
        floats._table,
        gemm_block_scaling._grid,
        gradient._one,
    ):  # as in a process that has trained nothing yet
        table.cache_clear()
    got = plan_training(language_model(recompute), plugin(case), accelerator="cpu", **SAMPLE)
    assert got.recomputes is recompute
    real = kept(language_model(recompute), plugin(case))
    assert got.column("Activations").bytes == pytest.approx(real, rel=0.01)


@pytest.mark.parametrize("choice", ["fp8", "recompute", "fp8+recompute"])
def test_what_is_kept_of_activations_is_planned(choice, case="bf16_with_fp8_mixed"):
    got = plan_training(language_model(), plugin(case, activations=choice), accelerator="cpu", **SAMPLE)
    real = kept(language_model(), plugin(case, activations=choice))
    assert got.column("Activations").bytes == pytest.approx(real, rel=0.01)
    plain = plan_training(language_model(), plugin(case, weight_cache=False), **SAMPLE).column("Activations").bytes
    on_gpu = plan_training(language_model(), plugin(case, activations=choice), **SAMPLE).column("Activations").bytes
    assert on_gpu < 0.85 * plain


@pytest.mark.parametrize("recompute", [False, True])
def test_the_other_choice_is_planned_too(recompute, case="msamp_o2"):
    got = plan_training(language_model(recompute), plugin(case), accelerator="cpu", **SAMPLE)
    other = plan_training(language_model(not recompute), plugin(case), accelerator="cpu", **SAMPLE)
    assert got.other_choice == (other.column("Activations").bytes, other.total)
    alone = plan_training(language_model(recompute), plugin(case), accelerator="cpu", both_choices=False, **SAMPLE)
    assert alone == replace(got, other_choice=None)


@pytest.mark.parametrize("case", ["bf16_mixed", "msamp_o3", "bf16_with_fp8_mixed"])
@pytest.mark.parametrize("layout", [{}, {"gpus": 4, "micro_batches": 2}])
def test_three_blocks_stand_for_all(case, layout, monkeypatch):
    few = plan_training(language_model(layers=6), plugin(case), **layout, **SAMPLE)
    monkeypatch.setattr(activations, "_TRACED", 99)
    every = plan_training(language_model(layers=6), plugin(case), **layout, **SAMPLE)
    assert few == every


def test_blocks_that_differ_are_all_traced():
    first = plugin("bf16_with_fp8_current_scaling_mixed", num_layers_at_start_in_half=2)
    none = plugin("bf16_with_fp8_current_scaling_mixed")
    # Sharded, so that no layer keeps a copy of its weight.
    plans = [plan_training(language_model(), p, 1, 2, **SAMPLE) for p in (first, none)]
    half, low = (plan.column("Activations").bytes for plan in plans)
    assert half > low  # half inputs in the place of FP8 ones


def test_recomputation_keeps_the_inputs_of_blocks():
    got = plan_training(language_model(True), plugin("bf16_mixed"), **SAMPLE)
    fewer = plan_training(language_model(True, 4), plugin("bf16_mixed"), **SAMPLE)
    rows = SAMPLE["micro_batch_size"] * SAMPLE["seq_length"]
    assert got.column("Activations").bytes - fewer.column("Activations").bytes == rows * 128 * 2


class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))

    def training_step(self, batch, index):
        loss = F.mse_loss(self.net(batch["x"]), batch["y"])
        self.log("loss", loss)
        return loss

    def forward(self, x):
        return self.net(x)


def test_any_other_module_takes_an_example():
    batch = {"x": torch.zeros(32, 64), "y": torch.zeros(32, 64)}
    got = plan_training(Module(), plugin("bf16_mixed"), batch=batch)
    # The input and the hidden layer in half, which ReLU keeps, too; the loss both of its sides in FP32.
    assert got.column("Activations").bytes == 32 * (64 * 2 + 256 * 2 + 2 * 64 * 4)
    assert got.recomputes is None and got.other_choice is None
    module = Module()
    module.example_input_array = torch.zeros(32, 64)
    assert plan_training(module, plugin("bf16_mixed")).column("Activations").bytes == 32 * (64 * 2 + 256 * 2)
    plain = plan_training(module.net, plugin("bf16_mixed"), batch=(torch.zeros(32, 64),))
    assert plain.column("Activations").bytes == 32 * (64 * 2 + 256 * 2)


def test_without_an_example_the_table_says_why():
    got = plan_training(Module(), plugin("bf16_mixed"))
    assert "Activations" not in [c.name for c in got.columns]
    assert "Activations are not planned: give plan_training micro_batch_size and seq_length" in got.caption()
    got = plan_training(Module(), plugin("bf16_mixed"), **SAMPLE)
    assert "Module is no language model of this package: give plan_training an example batch" in got.caption()


class Reads(Module):
    def training_step(self, batch, index):
        loss = super().training_step(batch, index)
        return loss if loss.item() > 0 else -loss


def test_a_forward_pass_that_reads_values_has_no_plan_of_activations():
    batch = {"x": torch.zeros(32, 64), "y": torch.zeros(32, 64)}
    got = plan_training(Reads(), plugin("bf16_mixed"), batch=batch)
    assert "this model's forward pass cannot be traced without values" in got.without
    assert got.total == plan_training(Module(), plugin("bf16_mixed")).total


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"micro_batch_size": 2}, "micro_batch_size and seq_length go together"),
        ({"micro_batch_size": 0, "seq_length": 8}, "micro_batch_size=0 must be an integer of at least 1"),
        ({"micro_batch_size": 2, "seq_length": 8, "batch": 1}, "Give an example batch, or micro_batch_size"),
        ({"micro_batch_size": 2, "seq_length": 4096}, "Samples of 4096 tokens are longer than the model's 2048"),
    ],
)
def test_bad_samples(arguments, message):
    with pytest.raises(ValueError, match=message):
        plan_training(language_model(), plugin("bf16_mixed"), **arguments)


def test_a_gpu_computes_these_in_fp32_under_autocast():
    x = torch.randn(4, 64, dtype=torch.bfloat16)
    q = torch.randn(2, 4, 16, 32)
    with torch.autocast("cpu", torch.bfloat16), GpuRules():
        assert F.layer_norm(x, (64,)).dtype == x.softmax(-1).dtype == F.softmax(x, -1).dtype == torch.float32
        assert x.sum().dtype == x.pow(2).dtype == torch.float32
        loss = F.cross_entropy(x, torch.zeros(4, dtype=torch.int64))
        torch.testing.assert_close(loss, F.cross_entropy(x.float(), torch.zeros(4, dtype=torch.int64)))
        assert (x @ x.t()).dtype == torch.bfloat16
    assert F.layer_norm(x, (64,)).dtype == torch.bfloat16
    meta = q.to("meta").requires_grad_()
    for arguments in ({"is_causal": True}, {"attn_mask": torch.ones(16, 16, dtype=torch.bool, device="meta")}):
        saved: list[torch.Tensor] = []
        with GpuRules(), torch.autograd.graph.saved_tensors_hooks(lambda t, saved=saved: saved.append(t) or t, id):
            half = meta.to(torch.bfloat16)
            assert F.scaled_dot_product_attention(half, half, half, **arguments).shape == q.shape
        assert max(t.numel() for t in saved if t.is_floating_point()) <= max(q.numel(), 2 * 4 * 16 * 16)
        assert sum(t.dtype == torch.float32 for t in saved) == 1  # the logarithms of the sums


def test_dropout_keeps_a_byte_an_element():
    x, saved = torch.randn(8, 8, requires_grad=True), []
    with GpuRules(), torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        assert F.dropout(x, 0.5).count_nonzero() < x.numel()
        assert F.dropout(x, 0.5, False) is x
    assert [t.dtype for t in saved] == [torch.bool]


def test_attention_that_splits_queries_keys_and_values_is_planned():
    model = nn.Sequential(nn.LayerNorm(48), Attention())
    got = plan_training(model, plugin("bf16_with_fp8_mixed", convert="*"), batch=(torch.zeros(2, 16, 48),))
    assert got.without == ""
    assert got.column("Activations").bytes > 0
