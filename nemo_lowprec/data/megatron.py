"""Imports the parts of Megatron-core that read and write its data files."""

import importlib
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def quiet_megatron() -> Iterator[None]:
    """Hides Megatron-core's warnings about packages that reading data does not need."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*(Transformer Engine|Apex)")
        # Megatron-core's logger (0.19) warns where torch.distributed is not initialized.
        warnings.filterwarnings("ignore", message="Could not determine (rank|world size)")
        yield


def import_megatron(name: str) -> Any:
    """Imports `megatron.core.<name>`, quietly.

    Args:
        name: Dotted name below `megatron.core`, such as `datasets.indexed_dataset`.

    Raises:
        ImportError: Megatron-core, or a package that it imports (0.19: Triton), is not installed.
    """
    with quiet_megatron():
        try:
            return importlib.import_module(f"megatron.core.{name}")
        except ModuleNotFoundError as error:
            missing = "megatron-core" if error.name in ("megatron", "megatron.core") else error.name
            raise ImportError(
                f"Megatron's .bin/.idx data files need Megatron-core, which does not import without {missing} here: "
                f"pip install {missing}."
            ) from error
