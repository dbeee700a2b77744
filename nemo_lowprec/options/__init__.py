"""Arguments of the levels: names, defaults and ranges of values, for every column.

The package imports the chart and ``arguments.py`` only. So a command line is checked before torch is imported, and
every column can read its arguments from this package.
"""

from nemo_lowprec.options.groups import LayerFilter, LossScaleConfig, LowBitOptions
from nemo_lowprec.options.parse import ATTENTION, BACKEND_NAMES, Options, check_option, option_defaults, parse_options
from nemo_lowprec.options.recipe import Recipe

__all__ = [
    "ATTENTION",
    "BACKEND_NAMES",
    "LayerFilter",
    "LossScaleConfig",
    "LowBitOptions",
    "Options",
    "Recipe",
    "check_option",
    "option_defaults",
    "parse_options",
]
