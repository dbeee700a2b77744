"""Check the settings of trainings that run in processes of their own, before the first one begins.

This file does not import torch, so that a mistake is answered at once.
"""

from __future__ import annotations

from dataclasses import replace

from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from nemo_lowprec.conf.check import check_values
from nemo_lowprec.conf.choices import CONF_DIR, register_levels
from nemo_lowprec.conf.command_line import CommandLine
from nemo_lowprec.conf.overrides import explain


def check_composed(line: CommandLine, *own: str) -> None:
    """Compose the config of a training, and check its values.

    Args:
        line: the command line of all trainings.
        own: further overrides, of one training.

    Raises:
        ValueError: an unknown choice of a group, or a bad value.
        TypeError: an unknown setting.
    """
    whole = replace(line, overrides=(*line.overrides, *own))
    search = f"hydra.searchpath=[{', '.join(f'file://{folder.absolute()}' for folder in line.folders or ())}]"
    register_levels()
    try:
        with initialize_config_dir(str(CONF_DIR), version_base="1.3"):
            check_values(compose("config", overrides=[search, *whole.overrides]))
    except (HydraException, OmegaConfBaseException) as error:
        raise explain(error, whole) from error
