"""Turns autocast off for a few operations."""

from __future__ import annotations

from typing import Any

import torch


class AutocastOff:
    """``torch.autocast(device, enabled=False)`` at half the host time, for code that is not compiled."""

    __slots__ = ("device", "was")

    def __init__(self, device: str) -> None:
        self.device = device

    def __enter__(self) -> None:
        self.was = torch.is_autocast_enabled(self.device)
        if self.was:
            torch.set_autocast_enabled(self.device, False)

    def __exit__(self, *_: Any) -> None:
        if self.was:
            torch.set_autocast_enabled(self.device, True)


def autocast_off(device: str) -> Any:
    """``AutocastOff``, or torch's own context in code that may be compiled."""
    return torch.autocast(device, enabled=False) if torch.compiler.is_compiling() else AutocastOff(device)
