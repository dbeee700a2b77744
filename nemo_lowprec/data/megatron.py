"""The one place where this package imports Megatron-core."""

import importlib
import warnings
from typing import Any


def import_megatron(name: str) -> Any:
    """Imports `megatron.core.<name>` without its warnings about what it can do without.

    Args:
        name: Dotted name below `megatron.core`, such as `datasets.indexed_dataset`.

    Raises:
        ImportError: Megatron-core is not installed.
    """
    with warnings.catch_warnings():
        # Transformer Engine and Apex play no part in reading data.
        warnings.filterwarnings("ignore", message=".*(Transformer Engine|Apex)")
        try:
            return importlib.import_module(f"megatron.core.{name}")
        except ModuleNotFoundError as error:
            if error.name not in ("megatron", "megatron.core"):
                raise
            raise ImportError(
                "Megatron's .bin/.idx data files need Megatron-core: pip install megatron-core."
            ) from error
