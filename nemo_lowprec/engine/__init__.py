"""The engine: the columns of one row at work on one model, for any training loop."""

from nemo_lowprec.engine.engine import DTYPES, Engine, Sharding, needs_closure

__all__ = ["DTYPES", "Engine", "Sharding", "needs_closure"]
