"""The one place where this package imports Megatron-core."""

import importlib
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def quiet_megatron() -> Iterator[None]:
    """Hides Megatron's warnings about what reading data has no use for."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*(Transformer Engine|Apex)")
        # From its logger (0.19), wherever torch.distributed is not initialized.
        warnings.filterwarnings("ignore", message="Could not determine (rank|world size)")
        yield


def import_megatron(name: str) -> Any:
    """Imports `megatron.core.<name>`, quietly.

    Args:
        name: Dotted name below `megatron.core`, such as `datasets.indexed_dataset`.

    Raises:
        ImportError: Megatron-core is not installed, or something that its release imports (0.19: Triton).
    """
    with quiet_megatron():
        try:
            return importlib.import_module(f"megatron.core.{name}")
        except ModuleNotFoundError as error:
            missing = "megatron-core" if error.name in ("megatron", "megatron.core") else error.name
            raise ImportError(
                "Megatron's .bin/.idx data files need Megatron-core, which does not import without "
                f"{missing} here: pip install {missing}."
            ) from error
