"""Lightning precision plugins: one engine behind Lightning's hooks, one function a level."""

import nemo_lowprec.strategies  # noqa: F401  (registers their names with Lightning)
from nemo_lowprec.plugins.levels import LEVELS
from nemo_lowprec.plugins.precision import LowPrecision

__all__ = ["LEVELS", "LowPrecision"]
