"""The command line of ``nemo-lowprec profile``.

This file does not import torch, so that a mistake is answered at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from nemo_lowprec.conf.command_line import CommandLine
from nemo_lowprec.conf.composed import check_composed
from nemo_lowprec.conf.overrides import check_overrides, with_plus

HALF = "bf16_mixed"
_DEFAULT = "bf16_with_fp8_mixed"  # of conf/config.yaml
_TAKEN = {
    "trainer.max_steps": "profile takes the steps that it needs",
    "ckpt_path": "the time of a step does not depend on weights",
    "monitor": "a sampled step takes longer",
}


@dataclass(frozen=True)
class ProfileLine:
    """A command line, read.

    Attributes:
        level: that is profiled beside ``HALF``.
        low, half: overrides and flags of the run at the level, and of the one in BF16.
        out: folder of the profiles; None to keep none.
        is_json: whether the result is one line of JSON.
    """

    level: str
    low: CommandLine
    half: CommandLine
    out: Path | None = None
    is_json: bool = False

    @classmethod
    def of(cls, arguments: Sequence[str]) -> ProfileLine:
        """Read a command line.

        Raises:
            ValueError: several runs, a bad setting, an unknown level, or BF16 itself.
            TypeError: an unknown setting, or one that has no meaning here.
        """
        line = CommandLine.of([word for word in arguments if word != "--json"])
        if line.is_multirun or any(override.is_sweep_override() for override in line.parsed):
            raise ValueError(f"profile takes one level, which it compares with {HALF}: call it once for each.")
        check_overrides(replace(line, overrides=tuple(w for w in line.overrides if not w.startswith("out="))))
        level, out = _DEFAULT, None
        both: list[str] = []
        own: list[str] = []  # arguments of the level, which BF16 may not take
        for override, word in zip(line.parsed, line.overrides, strict=True):
            name = override.key_or_group
            if name in _TAKEN:
                raise TypeError(f"{name} is not read by profile: {_TAKEN[name]}.")
            if name == "out":
                out = Path(str(override.value()))
            elif name == "precision":
                level = str(override.value())
            else:
                (own if name.startswith("precision.") else both).append(word)
        if level == HALF:
            raise ValueError(f"profile compares a level with {HALF}: choose another one with precision=LEVEL.")
        low = with_plus(replace(line, overrides=(f"precision={level}", *both, *own)))
        half = with_plus(replace(line, overrides=(f"precision={HALF}", *both)))
        for one in (low, half):
            check_composed(one, "output_dir=.")
        return cls(level, low, half, out, "--json" in arguments)
