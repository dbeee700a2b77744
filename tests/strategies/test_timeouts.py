"""The ``timeout`` of a strategy holds for the groups of its mesh, too."""

from datetime import timedelta

import torch
from lightning.pytorch.callbacks import Callback

from nemo_lowprec.compat.distributed import timeout_of
from nemo_lowprec.data.loader import ResumableLoader
from nemo_lowprec.strategies import LowPrecisionShardedStrategy
from nemo_lowprec.tensors.dtensor import is_sharded
from tests.processes import SECONDS, on_processes
from tests.support import Net, Samples, plugin, trainer


class Timeouts(Callback):
    def on_train_start(self, trainer, module):
        mesh = next(p.device_mesh for p in module.parameters() if is_sharded(p))
        self.found = [timeout_of(group, torch.device("cpu")).total_seconds() for group in mesh.get_all_groups()]


def timeouts(rank):
    seen, strategy = Timeouts(), LowPrecisionShardedStrategy(shard_size=1, timeout=timedelta(seconds=77))
    run = trainer(plugin("bf16_mixed"), seen, devices=2, strategy=strategy, use_distributed_sampler=False, max_steps=1)
    run.fit(Net(), ResumableLoader(Samples(), 8, 3, rank, 2))
    return seen.found


def test_groups_of_hybrid_sharding_wait_as_long_as_the_strategy_says(tmp_path):
    for copies, shards in on_processes(2, tmp_path, timeouts):
        assert shards == 77
        assert copies == SECONDS  # in the default group, which was there before the strategy
