"""Lightning strategies for several processes; importing the package registers their names, and levels with Fabric."""

from lightning.pytorch.strategies import StrategyRegistry

from nemo_lowprec.strategies.ddp import LowPrecisionDDPStrategy
from nemo_lowprec.strategies.fabric import shard_blocks
from nemo_lowprec.strategies.megatron import MegatronStrategy
from nemo_lowprec.strategies.sharded import LowPrecisionShardedStrategy

__all__ = ["LowPrecisionDDPStrategy", "LowPrecisionShardedStrategy", "MegatronStrategy", "shard_blocks"]

for _strategy in (LowPrecisionDDPStrategy, LowPrecisionShardedStrategy, MegatronStrategy):
    _summary = (_strategy.__doc__ or "").partition("\n")[0]
    StrategyRegistry.register(_strategy.strategy_name, _strategy, description=_summary)
