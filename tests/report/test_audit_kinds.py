"""Audits of models with what torch keeps in FP32, with what is frozen, tied or of three dimensions."""

import pytest
import torch
from torch import nn

from nemo_lowprec.report import Audit
from tests.processes import on_processes
from tests.support import CASES, Net, level_of, loader, plugin, trainer

SOME = ["msamp_o3", "fp16_mixed", "bf16_with_fp8_mixed+fp8_params"]


class Kinds(Net):
    def __init__(self):
        super().__init__(optimizer=lambda params: torch.optim.AdamW([p for p in params if p.requires_grad]))
        torch.manual_seed(2)
        self.rnn = nn.GRU(128, 64, bidirectional=True)
        self.attention = nn.MultiheadAttention(128, 4)
        self.conv = nn.Conv1d(8, 8, 3, padding=1)
        self.experts = nn.Parameter(torch.randn(4, 128, 128) / 11)
        self.batch = nn.BatchNorm1d(128)
        self.frozen = nn.Linear(128, 128).requires_grad_(False)
        self.frozen_half = nn.Linear(128, 128).bfloat16().requires_grad_(False)
        self.tied = nn.Linear(128, 128, bias=False)
        self.tied.weight = self.mid.weight
        self.computed = nn.utils.parametrizations.weight_norm(nn.Linear(128, 128))

    def middle(self, x):
        x = self.rnn(super().middle(x))[0]
        x = self.batch(self.conv(self.attention(x, x, x)[0].view(-1, 8, 16)).flatten(1))
        x = torch.einsum("bi,eij->bj", x, self.experts)
        return self.computed(self.tied(self.frozen_half(self.frozen(x))))


def findings(case, **options):
    audit = Audit()
    trainer(plugin(case), audit, max_steps=2, **options).fit(Kinds(), loader())
    return [(f.column, f.part, f.declared, f.observed, f.bytes_per_param) for f in audit.report.findings]


def assert_declared(found, case):
    assert [f for f in found if f[2] != f[3]] == []
    level = level_of(case)
    sizes = {(column, part): size for column, part, _, _, size in found}
    assert any(part == "kept FP32" for _, part in sizes) == level.has_half_weights
    if level.has_half_weights:
        assert sizes["Weight", "kept FP32"] == 4 and sizes["Master weight", "kept FP32"] is None


@pytest.mark.parametrize("case", CASES)
def test_every_kind_is_found_as_it_is_declared(case):
    assert_declared(findings(case), case)


def on_two(rank):
    options = {"devices": 2, "use_distributed_sampler": False}
    return {(case, name): findings(case, strategy=name, **options) for case in SOME for name in STRATEGIES}


STRATEGIES = ["ddp", "lowprec_ddp", "lowprec_sharded"]


def test_on_two_processes(tmp_path):
    for ranks in on_processes(2, tmp_path, on_two):
        for (case, name), found in ranks.items():
            assert [f for f in found if f[2] != f[3]] == [], (case, name)
            comm = {part: size for column, part, _, _, size in found if column == "Comm"}
            if name != "lowprec_sharded" and not level_of(case).is_low_bit:
                width = {"fp32": 4, "fp16": 2}[level_of(case).comm]
                assert comm.pop("kept FP32", 4) == 4 and comm == {"all": pytest.approx(width, rel=0.01)}, (case, name)
            elif name != "lowprec_sharded":
                assert comm["vectors"] == 4 and comm["matrices"] < 1.2, (case, name)
