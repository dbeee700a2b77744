"""Names of a package whose modules are imported at the first use of a name.

torch and Lightning take seconds to import. A command that needs neither answers without them.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

from nemo_lowprec.extras import needs_extras


def lazily(package: str, homes: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """``__getattr__`` and ``__dir__`` of ``package``.

    Args:
        package: name of the package.
        homes: the module of the package, relative to it, in which each name is defined.

    ``__getattr__`` raises MissingPackageError where the module needs a package of an extra that is not installed.
    """

    def find(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        with needs_extras(f"{package}.{name}"):
            return getattr(importlib.import_module(f"{package}.{homes[name]}"), name)

    return find, lambda: sorted(homes)
