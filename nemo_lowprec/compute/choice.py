"""What ``convert="auto"`` has decided about the layers of a model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

CHOICE = "speed"  # in a saved state
UNTIMED = "a patch embedding (convert=None converts it)"  # where nobody knows times


@dataclass
class Choice:
    """The outcome of ``convert="auto"``, which is saved with a run.

    Attributes:
        left: layers that stay in half precision, by name, with the reason.
        expected: the time of the converted ones, for the start-up table.
        problem: a warning where most FLOP are left; None for none.
    """

    left: dict[str, str] = field(default_factory=dict)
    expected: str = ""
    problem: str | None = None

    def state_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {"left": dict(self.left), "expected": self.expected, "problem": self.problem}

    def among(self, names: list[str]) -> dict[str, str]:
        """``left`` of the layers ``names``."""
        return {name: self.left[name] for name in names if name in self.left}
