"""``nemo_lowprec.msamp`` under the name of MS-AMP's package, for programs that import ``msamp``.

Attributes and submodules are those of ``nemo_lowprec.msamp``, imported when they are asked for: ``msamp.optim`` is the
module ``nemo_lowprec.msamp.optim`` itself, and not a second copy.
"""

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, spec_from_loader
from types import ModuleType
from typing import Any

__path__: list[str] = []  # Python looks for submodules of a package only


class _Submodules(MetaPathFinder, Loader):
    """Finds ``msamp.NAME`` where there is a ``nemo_lowprec.msamp.NAME``."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if not name.startswith(f"{__name__}.") or not hasattr(import_module("nemo_lowprec.msamp"), "__path__"):
            return None
        return None if find_spec(f"nemo_lowprec.{name}") is None else spec_from_loader(name, self)

    def exec_module(self, module: ModuleType) -> None:
        sys.modules[module.__name__] = import_module(f"nemo_lowprec.{module.__name__}")


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return getattr(import_module("nemo_lowprec.msamp"), name)


def __dir__() -> list[str]:
    return dir(import_module("nemo_lowprec.msamp"))


sys.meta_path.append(_Submodules())
