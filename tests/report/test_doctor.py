"""``examine`` on a machine without a GPU, and what is printed of times that a GPU has measured."""

import json
from dataclasses import replace

import pytest
import torch
from rich.console import Console
from torch import nn

from nemo_lowprec import CHART
from nemo_lowprec.models import CausalLM
from nemo_lowprec.plugins import LEVELS
from nemo_lowprec.report import examine
from nemo_lowprec.report.doctor.doctor import DoctorReport
from nemo_lowprec.report.doctor.gemms import GemmReport, GemmTime
from nemo_lowprec.report.doctor.levels import ENGINES
from nemo_lowprec.report.doctor.machine import look_at_machine

WITHOUT_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="tells of a machine without a GPU")


def printed(report):
    console = Console(width=80, color_system=None)
    with console.capture() as captured:
        console.print(report.table())
    text = captured.get()
    assert max(map(len, text.splitlines())) <= 80
    return " ".join(text.split())


def tiny():
    """A Llama of 2 layers, whose head and embedding are no FP8 layers."""
    config = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = CausalLM(preset="llama_tiny", config={**config, "num_key_value_heads": 1}, vocab_size=256)
    with torch.device("meta"):
        model.configure_model()
    return model


@WITHOUT_GPU
def test_every_level_here():
    report = examine()
    assert [one.level for one in report.levels] == list(CHART) and report.gemms is None
    for one in report.levels:
        scaling = CHART[one.level].scaling
        backend = {None: "torch", "mxfp8": None, "nvfp4": None}.get(scaling, "reference")
        assert one.backend == backend
        here, sharded, megatron = (one.engines[name] for name in ENGINES)
        assert bool(here) == bool(sharded) == (backend is None)
        assert "needs an NVIDIA GPU" in megatron
        assert ("numerics and not for speed" in one.note) == (backend == "reference")
    text = printed(report)
    assert "none that torch finds" in text and "mxfp8 GEMMs need a Blackwell GPU" in text
    assert json.loads(json.dumps(report.to_json()))["levels"][0]["backend"] == "torch"


def test_versions_and_what_to_install(monkeypatch):
    from importlib import metadata

    found = look_at_machine()
    assert found.packages["torch"] == torch.__version__ and found.packages["lightning"]
    assert found.missing.keys() == {name for name, version in found.packages.items() if version is None}

    def none_of_peft(name, known=metadata.version):
        if name == "peft":
            raise metadata.PackageNotFoundError(name)
        return known(name)

    monkeypatch.setattr("nemo_lowprec.report.doctor.machine.version", none_of_peft)
    without = look_at_machine()
    assert without.packages["peft"] is None
    assert "peft not installed. For adapters: pip install peft" in printed(DoctorReport(without, ()))
    missing = replace(without, packages={"transformer-engine": None}, missing={"transformer-engine": "FP8: x[te]"})
    assert "FP8: x[te]" in printed(DoctorReport(missing, ()))  # which is no markup


@WITHOUT_GPU
def test_shapes_of_a_model_without_a_gpu():
    report = examine(tiny(), LEVELS["bf16_with_fp8_mixed"](), micro_batch_size=2, seq_length=32)
    found = {(t.rows, t.ins, t.outs): t.layers for t in report.gemms.times}
    assert found == {(64, 64, 64): 4, (64, 64, 32): 4, (64, 64, 96): 4, (64, 96, 64): 2}
    assert report.gemms.ratio is None and report.gemms.backend is None
    assert "No GEMM was measured: torch finds no NVIDIA GPU on this machine." in printed(report)


def test_shapes_of_a_module_with_an_example():
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
    report = examine(model, LEVELS["te_fp8"](convert=None), batch=torch.zeros(48, 32))
    assert {(t.rows, t.ins, t.outs): t.layers for t in report.gemms.times} == {(48, 32, 64): 1, (48, 64, 32): 1}


def test_times_say_whether_fp8_pays():
    times = (GemmTime(10, 4096, 1024, 4096, fp8=60.0, half=100.0), GemmTime(1, 64, 64, 64, fp8=30.0, half=20.0))
    gemms = GemmReport("bf16_with_fp8_mixed", "bf16", "2 × 2,048 tokens", "torch", "", times)
    assert gemms.ratio == pytest.approx(630 / 1020) and [t.ratio for t in times] == [0.6, 1.5]
    report = DoctorReport(look_at_machine(), (), gemms)
    text = printed(report)
    assert "60.0 0.60 pays" in text and "30.0 1.50 does not pay" in text
    assert "FP8 pays: with quantization these GEMMs take 0.62 × BF16's time (backend torch)." in text
    found = report.to_json()["gemms"]
    assert found["ratio"] == gemms.ratio and found["times"][1]["ratio"] == 1.5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"precision": LEVELS["bf16_mixed"]()}, "bf16_mixed has no FP8 GEMMs to be measured"),
        ({"precision": None}, "model and precision go together"),
        ({"micro_batch_size": None}, "micro_batch_size and seq_length go together"),
        ({"micro_batch_size": None, "seq_length": None}, "The shapes of the GEMMs are not known: give plan_training"),
        ({"seq_length": 10**6}, "longer than the model's"),
    ],
)
def test_bad_input_is_one_sentence(arguments, message):
    good = {"precision": LEVELS["bf16_with_fp8_mixed"](), "micro_batch_size": 2, "seq_length": 32}
    with pytest.raises(ValueError, match=message) as error:
        examine(tiny(), **(good | arguments))
    assert "\n" not in str(error.value)
