"""Rows of one's own: each column is an independent decision, trained as the row declares or refused."""

from dataclasses import replace

import pytest
import torch

from nemo_lowprec import CHART, LowPrecision
from nemo_lowprec.data.loader import ResumableLoader
from nemo_lowprec.report import Audit
from tests.processes import on_processes
from tests.support import Net, Samples, loader, trainer


def row(base, **columns):
    return replace(CHART[base], name=f"{base} with {', '.join(columns)}", **columns)


STATES = {"optimizer_states": ("fp8", "fp16")}
TRAINED = [
    row("bf16_mixed", **STATES, comm="bf16"),
    row("bf16_mixed", comm="fp16"),
    row("bf16_mixed", weight_grad="bf16", comm="bf16"),
    row("fp16_mixed", comm="fp32", optimizer_states=("bf16", "fp16")),
    row("bf16_with_fp8_mixed", weight="fp8"),
    row("bf16_with_fp8_current_scaling_mixed", **STATES),
    row("te_fp8", **STATES, comm="bf16"),
    row("fp16_amp", optimizer_states=("bf16", "bf16"), comm="fp16"),
    row("msamp_o1", optimizer_states=("bf16", "fp8")),
    row("msamp_o3", optimizer_states=("fp32", "fp32")),
]
REFUSED = [
    (row("bf16_mixed", comm="fp8"), "Comm FP8 with Weight gradient FP32"),
    (row("msamp_o2", comm="fp32"), "Comm FP32 with Weight gradient FP8"),
    (row("bf16_mixed", weight_grad="fp8", comm="fp8"), "Weight gradient FP8 with Weight BF16 and Master weight FP32"),
    (row("msamp_o2", weight_grad="fp32", comm="fp32"), "Weight gradient FP32 with Weight FP16 and Master weight NONE"),
    (row("fp16_amp", weight_grad="fp16"), "Weight gradient FP16 with Weight FP32"),
    (row("bf16_mixed", master_weight=None), "Weight BF16 with no Master weight"),
    (row("bf16_mixed", master_weight="fp16"), "Weight BF16 with FP16 Master weight"),
    (row("te_fp8", weight="bf16"), "Weight BF16 with no Master weight"),
    (row("bf16_mixed", autocast="fp16"), "Computation .GEMM. in BF16 with autocast to FP16"),
    (row("bf16_with_fp8_mixed", scaling=None), "scaling=None"),
    (row("bf16_mixed", rest="fp32"), "other parameters FP32"),
]
IDS = [one.name for one in TRAINED]
NOT_SHARDED = ["bf16_mixed with optimizer_states, comm"]
STRATEGIES = ["ddp", "lowprec_ddp", "lowprec_sharded"]


def plugin(level):
    return LowPrecision(level, **({"backend": "reference"} if level.has_fp8 else {}))


def audited(level, data, **options):
    audit = Audit()
    model = Net(optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3))
    trainer(plugin(level), audit, max_steps=2, **options).fit(model, data)
    return {
        "agrees": audit.report.agrees,
        "differs": [str(f) for f in audit.report.findings if not f.agrees],
        "comm": {f.observed for f in audit.report.findings if f.column == "Comm"},
        "states": {f.observed for f in audit.report.findings if f.column == "Optimizer states"},
    }


@pytest.mark.parametrize("level", TRAINED, ids=IDS)
def test_a_row_of_ones_own_trains_as_it_declares(level):
    found = audited(level, loader(8))
    assert found["agrees"], found["differs"]
    assert set(level.optimizer_states) <= found["states"]


def every_row(rank):
    found = {}
    for level in TRAINED:
        for strategy in STRATEGIES:
            data = ResumableLoader(Samples(32), 8, 3, rank, 2)
            options = {"devices": 2, "strategy": strategy, "use_distributed_sampler": False}
            try:
                found[level.name, strategy] = audited(level, data, **options)
            except ValueError as error:
                found[level.name, strategy] = str(error)
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return on_processes(2, tmp_path_factory.mktemp("ranks"), every_row)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("level", TRAINED, ids=IDS)
def test_over_processes_the_wire_has_the_declared_format_too(level, strategy, ranks):
    for found in ranks:
        one = found[level.name, strategy]
        if strategy == "lowprec_sharded" and level.name in NOT_SHARDED:
            assert "Comm BF16 with Weight gradient FP32 has no implementation on shards" in one
            continue
        assert one["agrees"], one["differs"]
        assert level.comm in one["comm"]


@pytest.mark.parametrize(("level", "message"), REFUSED, ids=[one.name for one, _ in REFUSED])
def test_a_row_without_an_implementation_is_refused_by_its_columns(level, message):
    with pytest.raises(ValueError, match=message):
        plugin(level)
