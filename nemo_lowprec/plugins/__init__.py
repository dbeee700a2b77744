"""Lightning precision plugins: one engine behind Lightning's hooks, one function a level."""

from nemo_lowprec.plugins.levels import ALIASED, LEVELS
from nemo_lowprec.plugins.precision import LowPrecision

__all__ = ["ALIASED", "LEVELS", "LowPrecision"]
