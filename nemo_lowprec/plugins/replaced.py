"""Sets attributes of callbacks, modules and parts of the Trainer for the duration of one run."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any


def replace_attribute(undo: ExitStack, owner: Any, name: str, value: Any) -> None:
    """Set an attribute of ``owner``; closing ``undo`` restores the attribute that the instance had, or deletes it."""
    held = vars(owner)
    if name in held:
        undo.callback(held.__setitem__, name, held[name])
    else:
        undo.callback(held.pop, name, None)
    held[name] = value
