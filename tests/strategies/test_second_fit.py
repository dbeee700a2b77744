"""Fit after fit on one sharded model, with the optimizer that the first fit has used: over two processes."""

import pytest
import torch
from lightning.pytorch.callbacks import Callback

from nemo_lowprec.data.loader import ResumableLoader
from nemo_lowprec.optim import LowBitStates
from nemo_lowprec.strategies import LowPrecisionShardedStrategy
from nemo_lowprec.tensors import QuantizedTensor
from nemo_lowprec.tensors.dtensor import local_shard
from tests.processes import on_processes
from tests.strategies.test_sharded import Blocks
from tests.support import Samples, is_low_bit, linear_optimizer, plugin, trainer

CASES = ["te_fp8", "msamp_o1", "msamp_o2", "msamp_o3", "bf16_mixed", "bf16_with_fp8_mixed+fp8_params"]


class Cached(Blocks):
    """Builds its optimizer once."""

    made = None

    def configure_optimizers(self):
        if self.made is None:
            self.made = super().configure_optimizers()
        return self.made


class Kinds(Callback):
    """What steps, and in which formats its states are, while a fit goes on."""

    def on_train_batch_end(self, trainer, module, outputs, batch, index):
        self.low_bit = isinstance(module.made, LowBitStates)
        self.stored = stored(module.made)


def stored(optimizer):
    states = [local_shard(value) for state in optimizer.state.values() for value in state.values()]
    return any(isinstance(state, QuantizedTensor) for state in states)


def fits(rank, case):
    model, level, found = Cached(optimizer=linear_optimizer(case, 0.01)), plugin(case), []
    for _ in range(2):
        kinds, before = Kinds(), [local_shard(p).detach().clone() for p in model.parameters()]
        options = {"devices": 2, "strategy": LowPrecisionShardedStrategy(), "use_distributed_sampler": False}
        data = ResumableLoader(Samples(32), 4, 3, rank, 2)
        trainer(level, kinds, max_steps=2, **options).fit(model, data)
        moved = any(
            a.shape != b.shape or not torch.equal(a, local_shard(b).detach())
            for a, b in zip(before, model.parameters(), strict=True)
        )
        found.append(
            {
                "low bit": kinds.low_bit,
                "stored": kinds.stored,
                "left": (isinstance(model.made, LowBitStates), stored(model.made)),
                "plain": not any(isinstance(local_shard(p), QuantizedTensor) for p in model.parameters()),
                "moved": moved,
            }
        )
    return found


def every_case(rank):
    return {case: fits(rank, case) for case in CASES}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return on_processes(2, tmp_path_factory.mktemp("ranks"), every_case)


@pytest.mark.parametrize("case", CASES)
def test_a_second_fit_steps_with_the_levels_own_states(case, ranks):
    for found in ranks:
        first, second = found[case]
        assert first == second
        assert second["low bit"] == is_low_bit(case) and second["moved"]
        assert second["stored"] == (case in ("msamp_o2", "msamp_o3"))


@pytest.mark.parametrize("case", CASES)
def test_the_optimizer_and_the_shards_are_plain_after_each_fit(case, ranks):
    for found in ranks:
        for fit in found[case]:
            assert fit["left"] == (False, False) and fit["plain"]
