"""``kernels/native.c``, compiled at first use by Triton, which compiles its own launchers in the same way."""

from __future__ import annotations

import ctypes
import logging
from functools import lru_cache
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).parents[1] / "kernels" / "native.c"
NAME = "nemo_lowprec_native"


@lru_cache(maxsize=1)
def native() -> Any:
    """The compiled module; None without Triton or a C compiler, where torch and Triton launch at more host time."""
    try:
        from triton.runtime.build import compile_module_from_src

        return compile_module_from_src(SOURCE.read_text(), NAME)
    except Exception as error:  # a cause of any kind must not end the run
        logging.getLogger(__name__).info("Kernels take more host time: %s was not compiled (%s).", SOURCE.name, error)
        return None


def address(function: Any) -> int:
    """The address of a function of ``ctypes``."""
    return ctypes.cast(function, ctypes.c_void_p).value or 0


@lru_cache(maxsize=1)
def launch_address() -> int:
    """The address of ``cuLaunchKernel``."""
    return address(ctypes.CDLL("libcuda.so.1").cuLaunchKernel)
