"""Packages that not every user needs, and the extra of ``pip install 'nemo-lowprec[EXTRA]'`` that brings each.

``pip install nemo-lowprec`` brings torch, Lightning and the packages that every level imports. A module imports another
package where it uses the package, and the absence of the package is one sentence.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

# the extra of each top-level module
EXTRAS = {
    **dict.fromkeys(
        (
            *("fiddle", "hydra", "leptonai", "nemo_run", "omegaconf", "safetensors", "tensorboard", "tokenizers"),
            *("transformers", "typer"),
        ),
        "recipes",
    ),
    **dict.fromkeys(("megatron", "psutil"), "megatron"),
    **dict.fromkeys(("jinja2", "vl_convert"), "report"),
    "libcst": "migrate",
}


class MissingPackageError(ImportError):
    """A package of an extra is not installed; the message is one sentence that says how to install it."""

    exit_status = 2  # of the command line


@contextmanager
def needs_extras(user: str) -> Iterator[None]:
    """A context in which the absence of a package of an extra is one sentence.

    Args:
        user: the subject of the sentence, such as ``"nemo_lowprec.recipes"``.

    Raises:
        MissingPackageError: the code in the context has imported a package of an extra that is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in EXTRAS:
            raise
        raise MissingPackageError(
            f"{user} needs {package}: pip install 'nemo-lowprec[{EXTRAS[package]}]'", name=package
        ) from error
