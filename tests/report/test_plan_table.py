"""The table of a plan in a terminal of 80 columns: at every level with every strategy."""

import io

import pytest
import torch
from rich.console import Console

from nemo_lowprec import CHART
from nemo_lowprec.models import CausalLM, MegatronGPT
from nemo_lowprec.plugins import LEVELS
from nemo_lowprec.report import STRATEGIES, plan_training

SAMPLE = {"micro_batch_size": 2, "seq_length": 32}
MEGATRON = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "context_parallel_size": 2,
            "sequence_parallel": True, "micro_batches": 4}  # fmt: skip


@pytest.fixture(scope="module")
def model():
    found = CausalLM("llama_tiny", config={"num_hidden_layers": 2}, vocab_size=512, activation_checkpointing=True)
    with torch.device("meta"):
        found.configure_model()
    return found


def lines_of(plan):
    console = Console(width=80, file=io.StringIO())
    console.print(plan.table())
    return console.file.getvalue().splitlines()


def cells_of(lines):
    return [[cell.strip() for cell in line.strip("│┃").replace("┃", "│").split("│")] for line in lines if "│" in line]


def assert_whole(plan):
    lines = lines_of(plan)
    assert "…" not in "".join(lines) and max(map(len, lines)) <= 80
    rows = cells_of(lines)
    assert {len(row) for row in rows} == {4}
    names = [row[0] for row in rows]
    of_chart = ("Weight", "Master weight", "Weight gradient", "Optimizer states")
    for column in plan.columns:
        assert names.count(column.name) == (1 if column.bytes or column.name in of_chart else 0)
    for one in plan.traffic:
        assert [f"Sent: {one.kind}", "a step", one.format.upper()] in [row[:3] for row in rows]
    shown = {c.formats.upper() for c in plan.columns} | {"", "Format"} | {t.format.upper() for t in plan.traffic}
    assert {row[2] for row in rows} <= shown
    title = " ".join(" ".join(lines[:6]).split())
    assert f"Plan of {plan.model} at {plan.level.name}" in title and plan.layout.strategy in title
    assert str(plan.layout) in title
    assert any(line.startswith(f"All: {rows[names.index('All')][3]} of each process.") for line in lines)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("level", LEVELS)
def test_every_word_is_whole(level, strategy, model):
    if strategy == "lowprec_megatron":
        if CHART[level].scaling == "rowwise":
            with pytest.raises(ValueError, match="Transformer Engine, whose layers"):
                plan_training(MegatronGPT("llama3_8b"), LEVELS[level](), 8, 8, strategy, **MEGATRON, **SAMPLE)
            return
        half = {"half": "fp16"} if level.startswith("msamp") else {}
        plan = plan_training(MegatronGPT("llama3_8b"), LEVELS[level](**half), 8, 8, strategy, **MEGATRON, **SAMPLE)
    else:
        world = 1 if strategy == "single_device" else 8
        plan = plan_training(model, LEVELS[level](), 1, world, strategy, micro_batches=2, **SAMPLE)
    assert_whole(plan)


def test_the_title_and_the_last_lines(model):
    plan = plan_training(model, LEVELS["msamp_o3"](), 2, 4, shard_size=4, **SAMPLE)
    lines = [line.strip() for line in lines_of(plan)]
    assert lines[0] == "Plan of llama_tiny at msamp_o3"
    assert " ".join(lines[1:4]).startswith(
        "0.46 M parameters, 2 × 4 processes, lowprec_sharded, ZeRO-3, 2 copies of 4 shards "
        "micro-batches: 2 × 32 tokens, with recomputation"
    )
    last = " ".join(lines[-5:])
    assert "Without recomputation activations would be" in last
    assert "Not planned: CUDA graphs, workspaces of libraries" in last
