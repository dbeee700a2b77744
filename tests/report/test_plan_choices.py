"""Several plans in one table: their order, what fits, what is refused."""

import io
from dataclasses import replace

import pytest
from rich.console import Console

from nemo_lowprec.models import CausalLM
from nemo_lowprec.plugins import LowPrecision
from nemo_lowprec.report import memory_of, plan_choices, plan_training
from nemo_lowprec.report.plan.gpu_memory import GIB, GPUS

SIZES = {"micro_batch_size": 1, "seq_length": 32}


@pytest.fixture(scope="module")
def model():
    module = CausalLM("llama_tiny", vocab_size=512)
    module.configure_model()
    return module


def choices_of(model, fits=None, levels=("bf16_mixed", "msamp_o2"), **more):
    return plan_choices(model, [LowPrecision(level) for level in levels], fits=fits, **SIZES, **more)


def test_each_plan_is_that_of_plan_training(model):
    found = choices_of(model, gpus=[1, 2], strategies=["lowprec_ddp", "lowprec_sharded"])
    assert len(found.choices) == 8 and not found.refused
    for choice in found.choices:
        layout = choice.plan.layout
        alone = plan_training(model, LowPrecision(choice.name), layout.nodes, layout.gpus, layout.strategy, **SIZES)
        assert alone.other_choice is not None and replace(alone, other_choice=None) == choice.plan
    (both,) = choices_of(model, levels=["msamp_o2"], both_choices=True).choices
    assert both.plan == plan_training(model, LowPrecision("msamp_o2"), **SIZES)


def test_what_fits_comes_first_with_the_fewest_gpus(model):
    sizes = {c.plan.total for c in choices_of(model, gpus=[1, 2, 4]).choices}
    between = sorted(sizes)[len(sizes) // 2] / GIB
    found = choices_of(model, between, gpus=[1, 2, 4], nodes=[1, 2])
    fitting = [c for c in found.choices if c.fits]
    lacking = found.choices[len(fitting) :]
    assert fitting and lacking and not any(c.fits for c in lacking)
    costs = [(c.plan.layout.world, c.plan.sent, c.plan.total) for c in fitting]
    assert costs == sorted(costs) and found.best is fitting[0]
    assert [c.left for c in lacking] == sorted((c.left for c in lacking), reverse=True)
    assert all(c.left == round(between * GIB) - c.plan.total for c in found.choices)


def test_the_answer_names_the_number_of_gpus(model):
    one = choices_of(model, 1.0, gpus=[1, 2])
    assert one.answer() == "The cheapest that fits into 1.00 GiB: msamp_o2 on 1 GPU, single_device."
    none = choices_of(model, 1e-3, gpus=[1, 2])
    assert none.best is None and none.answer().startswith("Nothing fits into 1.02 MiB. Nearest is msamp_o2 on 1 GPU")


def test_without_a_gpu_nothing_is_said_about_fitting(model, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    found = choices_of(model)
    assert found.answer() == "" and all(c.left is None and c.fits for c in found.choices)
    assert "Left" not in " ".join(found.notes()) and len(found.table().columns) == 5


def test_choices_that_are_refused_are_told_with_their_sentence(model):
    found = choices_of(model, 1.0, gpus=[1, 2], strategies=["single_device", "lowprec_ddp"])
    assert len(found.choices) == 6 and len(found.refused) == 2
    notes = " ".join(" ".join(found.notes()).split())
    assert "Refused: bf16_mixed 1 × 2 single_device; msamp_o2 1 × 2 single_device. single_device is one" in notes


def test_an_argument_that_everything_refuses_is_an_error(model):
    with pytest.raises(ValueError, match="nodes=0 must be"):
        choices_of(model, 1.0, nodes=[0])
    with pytest.raises(TypeError, match="has no option 'shard_sizes'"):
        choices_of(model, 1.0, gpus=[2], shard_sizes=2)


def test_the_table_is_80_columns_wide_at_every_level(model):
    console = Console(width=80, file=io.StringIO())
    levels = ["bf16_with_fp8_subchannel_scaling_mixed", "msamp_o2"]
    found = choices_of(model, "h200", levels, gpus=[1, 8], strategies=["lowprec_sharded"])
    console.print(found.table())
    text = console.file.getvalue()
    assert "…" not in text and "subchannel_scaling" in text and max(map(len, text.splitlines())) <= 80
    assert max(map(len, found.notes())) <= 80


def test_the_memory_of_a_gpu():
    assert memory_of(80) == 80 * GIB and memory_of("h100") == round(GPUS["H100"] * GIB)
    for wrong in (0, -1, float("nan"), float("inf"), True, "A9", "80", None):
        with pytest.raises(ValueError, match="is no memory of a GPU: give GiB, such as 80, or one of: H100, H200"):
            memory_of(wrong)
