"""Experts on two processes, averaged and sharded, against one process; three experts, so that shards are uneven."""

import functools

import pytest
from torch import nn
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

from nemo_lowprec.report import Audit
from tests.processes import on_processes
from tests.strategies.test_sharded import run
from tests.support import Net, is_low_bit

LEVELS = ["te_fp8", "msamp_o2", "msamp_o3", "bf16_with_fp8_mixed", "bf16_with_fp8_mixed+fp8_params"]
LEVELS += ["bf16_with_fp8_subchannel_scaling_mixed", "fp16_mixed"]


class Mixture(Net):
    """Every token passes two of three experts."""

    def __init__(self, **options):
        super().__init__(**options)
        config = MixtralConfig(hidden_size=128, intermediate_size=48, num_local_experts=3, num_experts_per_tok=2)
        config._experts_implementation = "eager"
        self.block = MixtralSparseMoeBlock(config)
        for param in self.block.parameters():
            nn.init.normal_(param, std=0.1)

    def middle(self, x):
        return super().middle(x) + self.block(x[None])[0]


def of_rank(rank):
    watch = {case: Audit() for case in LEVELS}
    return {
        case: {
            "sharded": run(case, rank, Mixture, callbacks=[watch[case]]),
            "agrees": watch[case].report.agrees,
            "found": [(f.column, f.part, f.declared, f.observed) for f in watch[case].report.findings],
        }
        for case in LEVELS
    }


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return on_processes(2, tmp_path_factory.mktemp("experts"), of_rank)


@functools.cache
def alone(case):
    return run(case, net=Mixture)


@pytest.mark.parametrize("case", LEVELS)
def test_sharded_experts_train_as_whole_ones(ranks, case):
    got, want = ranks[0][case]["sharded"], alone(case)
    bound = 0.2 if is_low_bit(case) else 0.02
    for name, value in want["grads"][0].items():
        assert (got["grads"][0][name] - value).norm() <= bound * value.norm() + 1e-9, name
    for name, value in want["weights"].items():
        assert (got["weights"][name] - value).norm() <= bound * value.norm() + 1e-6, name
    assert ranks[0][case]["agrees"], ranks[0][case]["found"]
