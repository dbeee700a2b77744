"""Arguments of the levels: names, defaults and ranges of values, for every column.

The package stands on the ground floor beside the chart: a command line is checked with it before torch is imported, and
the columns read their own arguments from it. It imports the chart only.
"""

from nemo_lowprec.options.layers import LayerFilter
from nemo_lowprec.options.loss_scale import LossScaleConfig
from nemo_lowprec.options.low_bit import LowBitOptions
from nemo_lowprec.options.parse import ATTENTION, BACKEND_NAMES, Options, option_defaults, parse_options
from nemo_lowprec.options.recipe import Recipe

__all__ = [
    "ATTENTION",
    "BACKEND_NAMES",
    "LayerFilter",
    "LossScaleConfig",
    "LowBitOptions",
    "Options",
    "Recipe",
    "option_defaults",
    "parse_options",
]
