"""Lightning strategies for several processes; importing the package registers their names."""

from lightning.pytorch.strategies import StrategyRegistry

from nemo_lowprec.strategies.ddp import LowPrecisionDDPStrategy

__all__ = ["LowPrecisionDDPStrategy"]

for _strategy in (LowPrecisionDDPStrategy,):
    _strategy.register_strategies(StrategyRegistry)
