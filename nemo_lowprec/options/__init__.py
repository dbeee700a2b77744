"""Arguments of the levels: names, defaults and what each value may be. Nothing here imports torch."""

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
