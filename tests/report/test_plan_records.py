"""Plans against the peaks of memory that are recorded in ``benchmarks/results``: nothing here is typed in.

A peak is what torch's allocator has given out. Beside it a plan counts what peers write to, which another allocator
gives out; workspaces of cuBLAS, about 0.1 GiB, are in a peak and in no plan.
"""

import json
import re
from functools import cache
from pathlib import Path

import pytest
import torch

from benchmarks.llama import BATCH, SEQUENCE, VOCAB, Llama, new_model
from benchmarks.megatron_model import MODEL
from benchmarks.megatron_model import plugin as level_of
from nemo_lowprec import CHART
from nemo_lowprec.compute import convert, patterns
from nemo_lowprec.compute.patterns.activations import Activations
from nemo_lowprec.compute.patterns.gated_mlp import GatedMLPs
from nemo_lowprec.models import CausalLM, MegatronGPT
from nemo_lowprec.plugins import LEVELS
from nemo_lowprec.report import plan_training

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
GIB = 2**30
PLAIN = ["fp16_amp", "te_fp8", "msamp_o1", "msamp_o2", "msamp_o3", "fp16_mixed", "bf16_mixed", "bf16_with_fp8_mixed",
         "bf16_with_fp8_mixed, fp8_params", "bf16_with_fp8_subchannel_scaling_mixed"]  # fmt: skip
SHARDED = ["fp16_amp", "te_fp8", "msamp_o2", "msamp_o3", "fp16_mixed", "bf16_mixed", "bf16_with_fp8_mixed"]


@pytest.fixture
def as_recorded(monkeypatch):
    """When these peaks were recorded, activations and gated MLPs kept what autograd keeps, and losses read FP32."""
    monkeypatch.setattr(convert, "give_logits", lambda *_: None)
    own = (Activations, GatedMLPs)
    monkeypatch.setattr(patterns, "PATTERNS", [p for p in patterns.PATTERNS if not isinstance(p, own)])


@cache
def recorded(name):
    lines = [json.loads(line) for line in (RESULTS / f"{name}_h200.jsonl").read_text().splitlines()]
    return [line for line in lines if "peak_gib" in line]


def peak_of(file, **wanted):
    (found,) = [line for line in recorded(file) if wanted.items() <= line.items()]
    return found["peak_gib"]


class Shape(Llama):
    """The model of ``train_step`` without memory."""

    def __init__(self):
        super(Llama, self).__init__()
        self.model = new_model(torch.float32, device="meta")


def as_measured(name, **options):
    """A level that quantizes its weights in each forward pass, as all did when these peaks were recorded."""
    return LEVELS[name](**options, **({"weight_cache": False} if CHART[name].has_fp8 else {}))


def planned(precision, gpus=1, strategy=None):
    batch = torch.zeros(BATCH, SEQUENCE + 1, dtype=torch.int64, device="meta")
    return plan_training(Shape(), precision, 1, gpus, strategy, batch=batch).total / GIB


@pytest.mark.parametrize("level", PLAIN)
def test_steps_on_one_gpu(level):
    name, _, option = level.partition(", ")
    precision = LEVELS[name](**({option: True} if option else {}))
    assert 0.99 <= planned(precision) / peak_of("train_step", name=f"nemo_lowprec {level}") <= 1.01


@pytest.mark.usefixtures("as_recorded")
@pytest.mark.parametrize("strategy", ["ddp", "lowprec_ddp"])
@pytest.mark.parametrize("level", ["fp16_amp", "msamp_o2", "fp16_mixed"])
def test_steps_of_whole_models_on_four_gpus(level, strategy):
    measured = peak_of("parallel_step", name=f"{level}, {strategy}")
    assert 0.99 <= planned(as_measured(level), 4, strategy) / measured <= 1.06


@pytest.mark.usefixtures("as_recorded")
@pytest.mark.parametrize("level", SHARDED)
def test_steps_of_shards_on_four_gpus(level):
    """A bound: gathered weights, whole gradients and buffers are not at their largest at one time."""
    measured = peak_of("parallel_step", name=f"{level}, lowprec_sharded")
    assert 1.0 <= planned(as_measured(level), 4, "lowprec_sharded") / measured <= 1.13


@pytest.mark.parametrize("level", ["msamp_o2", "msamp_o3", "bf16_mixed"])
def test_llama_3_8b_with_recomputation(level):
    with torch.device("meta"):
        model = CausalLM("llama3_8b", activation_checkpointing=True)
        model.configure_model()
    lines = [json.loads(line) for line in (RESULTS / "llama_8b_h200.jsonl").read_text().splitlines()]
    (line,) = [line for line in lines if line.get("level") == level]
    got = plan_training(model, LEVELS[level](), micro_batch_size=1, seq_length=line["sequence"])
    assert got.parameters == line.get("parameters", got.parameters)
    if "error" in line:  # it did not fit
        (capacity,) = re.findall(r"total capacity of ([\d.]+) GiB", line["error"])
        assert got.total / GIB > float(capacity)
    else:
        assert 0.99 <= got.total / GIB / line["peak_gib"] <= 1.01


MEGATRON = [(line["level"], line["gpus"]) for line in recorded("megatron_step") if line["path"] == "MegatronStrategy"]


@pytest.mark.usefixtures("as_recorded")
@pytest.mark.parametrize(("level", "gpus"), MEGATRON)
def test_steps_on_megatron_core(level, gpus):
    sample = {"micro_batch_size": BATCH, "seq_length": SEQUENCE}
    got = plan_training(MegatronGPT(**MODEL), level_of(level), 1, gpus, **sample)
    assert MODEL["vocab_size"] == VOCAB
    measured = peak_of("megatron_step", level=level, gpus=gpus, path="MegatronStrategy")
    assert 0.99 <= got.total / GIB / measured <= 1.03
