"""Launches a compiled Triton kernel again, at less host time than ``kernel[grid](...)`` takes."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch

from nemo_lowprec.compat.triton import current_device, launch_of


class Launcher:
    """The compiled forms of one kernel, by keys that the caller makes.

    ``kernel[grid](...)`` looks at every argument to find the compiled form, which takes the host 17 µs and more; to
    launch a compiled form takes 5.

    Args:
        kernel: a function of ``triton.jit``.
        options: as ``num_warps``.

    Attributes:
        forms: the compiled forms by (device, key): functions of the grid's size and the kernel's arguments, for calls
            while that device is the current one.
    """

    def __init__(self, kernel: Any, **options: Any) -> None:
        self._kernel, self._options = kernel, options
        self.forms: dict[Hashable, Callable[..., None]] = {}

    def __call__(
        self, device: int, key: Hashable, programs: int, args: tuple[Any, ...], constants: Callable[[], dict[str, Any]]
    ) -> None:
        """Launch on the current stream of ``device``.

        Args:
            key: equal only for calls that Triton would compile alike: the dtypes of tensors, which addresses and
                integers are multiples of 16, which integers are 1, and all constants. None where the caller does not
                know.
            programs: size of the grid.
            args: the kernel's arguments before its constants.
            constants: makes all ``tl.constexpr`` arguments, in the kernel's order.
        """
        if device != current_device():  # type: ignore[misc]
            with torch.cuda.device(device):
                return self(device, key, programs, args, constants)
        form = self.forms.get((device, key)) if key is not None else None
        if form is not None:
            form(programs, *args)
            return
        values = constants()
        compiled = self._kernel[(programs,)](*args, **values, **self._options)
        if key is not None:
            self.forms[device, key] = launch_of(compiled, tuple(values.values()))
