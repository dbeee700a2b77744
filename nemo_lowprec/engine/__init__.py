"""The engine: trains one model by the columns of one row, in any training loop."""

from nemo_lowprec.engine.build import (
    DTYPES,
    Sharding,
    build,
    check_row,
    mixed_precision_policy,
    new_amaxes,
    state_formats,
)
from nemo_lowprec.engine.columns import Columns
from nemo_lowprec.engine.engine import Engine
from nemo_lowprec.engine.step import Step

__all__ = [
    "DTYPES", "Columns", "Engine", "Sharding", "Step", "build", "check_row", "mixed_precision_policy", "new_amaxes",
    "state_formats",
]  # fmt: skip
