"""Launches a compiled Triton kernel again, at less host time than ``kernel[grid](...)`` takes."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch


class Launcher:
    """The compiled forms of one kernel, by keys that the caller makes.

    ``kernel[grid](...)`` looks at every argument to find the compiled form, which takes the host 17 µs and more; to
    launch a compiled form takes 7.

    Args:
        kernel: a function of ``triton.jit``.
    """

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._compiled: dict[Hashable, Any] = {}

    def __call__(
        self, key: Hashable, programs: int, args: tuple[Any, ...], constants: dict[str, Any], **options: Any
    ) -> None:
        """Launch on the device of the first argument, a tensor.

        Args:
            key: equal only for calls that Triton would compile alike: the dtypes of tensors, which addresses and
                integers are multiples of 16, which integers are 1, all constants and options. None where the caller
                does not know.
            programs: size of the grid.
            args: the kernel's arguments before its constants.
            constants: all ``tl.constexpr`` arguments, in the kernel's order.
            options: as ``num_warps``.
        """
        device = args[0].device.index
        if device != torch.cuda.current_device():
            with torch.cuda.device(device):
                return self(key, programs, args, constants, **options)
        key = None if key is None else (device, key)
        compiled = self._compiled.get(key)
        if compiled is not None:
            compiled[programs, 1, 1](*args, *constants.values())
            return
        compiled = self._kernel[(programs,)](*args, **constants, **options)
        if key is not None:
            self._compiled[key] = compiled
