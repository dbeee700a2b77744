"""``advise`` on a GPU: every operand is looked at, times are measured, and nothing stays behind."""

import gc

import pytest
import torch

from benchmarks.llama_8b import VOCAB as BENCHMARK_VOCAB
from benchmarks.llama_8b import RandomTokens, measure
from nemo_lowprec import advise
from nemo_lowprec.models import CausalLM
from nemo_lowprec.plugins import LowPrecision
from nemo_lowprec.report import memory_here
from nemo_lowprec.report.advice.operands import SCALINGS, way_of
from nemo_lowprec.report.advice.passes import half_copy, look

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

VOCAB = 8192
LEVELS = ["bf16_mixed", "bf16_with_fp8_mixed", "bf16_with_fp8_current_scaling_mixed", "msamp_o2"]


def llama(device, recomputes=False):
    model = CausalLM("llama_100m", vocab_size=VOCAB, activation_checkpointing=recomputes)
    with torch.device(device):
        model.configure_model()
    return model


def batch_of(rows=4, tokens=1024):
    ids = torch.randint(VOCAB, (rows, tokens + 1), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids[:, :-1], "labels": ids[:, 1:]}


@pytest.mark.usefixtures("measured_times")
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_nothing_of_the_model_and_of_the_gpu_changes(device):
    model, batch = llama(device), batch_of()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    gc.collect()
    rng, held = torch.cuda.get_rng_state(), torch.cuda.memory_allocated()
    found = advise(model, batch, LEVELS)
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()  # cuBLAS keeps one for each stream that has called it
    assert torch.cuda.memory_allocated() - held < 2**20
    assert torch.equal(torch.cuda.get_rng_state(), rng)
    after = model.state_dict()
    assert all(
        torch.equal(after[name], tensor) and after[name].device.type == device for name, tensor in before.items()
    )
    assert all(p.grad is None for p in model.parameters())
    assert [level.choice.memory for level in found.levels] == [memory_here()] * len(LEVELS)
    assert all(level.ms is not None and level.ms > 0 for level in found.levels), found.notes
    assert found.best is not None and found.best.ms == min(level.ms for level in found.levels)


@pytest.mark.parametrize("recomputes", [False, True])
def test_every_operand_is_looked_at_once(recomputes):
    levels = ["bf16_with_fp8_mixed", "bf16_with_fp8_current_scaling_mixed", "bf16_with_fp8_rowwise_mixed",
              "bf16_with_fp8_subchannel_scaling_mixed"]  # fmt: skip
    recipes = [LowPrecision(level).parsed.recipe for level in levels]
    ways = {way_of(recipe): recipe for recipe in recipes}
    model, device = llama("cpu", recomputes), torch.device("cuda")
    copy = half_copy(model, device)
    batch = {name: ids.to(device) for name, ids in batch_of().items()}
    found = look(copy, batch, ways)
    kinds = ("input", "weight", "grad_output")
    assert {(key.layer, key.kind, key.scaling) for key in found.errors} == {
        (layer, kind, way) for layer in found.layers for kind in kinds for way in SCALINGS
    }
    rows = batch["input_ids"].numel()
    for key, errors in found.errors.items():
        outs, ins = model.get_submodule(key.layer).weight.shape
        if key.scaling == "current":
            assert errors.count == {"input": rows * ins, "weight": outs * ins, "grad_output": rows * outs}[key.kind]
        assert errors.nonfinite == 0 and errors.sqnr is not None and errors.sqnr > 15
    calls = [call for group, _ in found.calls.groups.elements() for call in group]
    assert len(calls) == (1 + recomputes) * len(found.layers)
    assert sum(call.wgrad for call in calls) == len(found.layers)


@pytest.mark.usefixtures("measured_times")
@pytest.mark.parametrize("level", ["bf16_with_fp8_mixed", "msamp_o2"])
def test_bytes_are_those_of_a_training_with_its_cuda_graphs(level):
    real = measure(level, "llama_100m", {}, 1024, 1, batch=4)["peak_gib"] * 2**30
    model = CausalLM("llama_100m", vocab_size=BENCHMARK_VOCAB, activation_checkpointing=True)
    model.configure_model()
    found = advise(model, next(iter(RandomTokens(1024, 4))), [level]).level(level).choice
    assert found.beyond > 0
    assert abs(found.total - real) < 0.05 * real
