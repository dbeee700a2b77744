"""Where the time of a step goes at each level, by ``nemo-lowprec profile``, beside the same model in BF16.

    python -m benchmarks.profile_levels

Llama 100M at 1 x 512 tokens, where the host is the limit, and at 8 x 2048, and Llama 3.2 1B at 2 x 2048. ``--settings``
are passed to the command. Of ``bf16`` and of ``low``, which is the level, ``parts`` are ms of a step.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any, NamedTuple

from benchmarks.record import Record, arguments
from nemo_lowprec.report.profile.step_profile import StepProfile

__all__ = ["CASES", "Case", "measure"]

LEVELS = ("bf16_with_fp8_mixed", "msamp_o2")
_STATED = 300  # characters of a failure, from its end


class Case(NamedTuple):
    """A model and its micro-batch.

    Attributes:
        preset: of the model.
        batch: sequences.
        sequence: tokens of each.
    """

    preset: str
    batch: int
    sequence: int


CASES = {
    "llama_100m_1x512": Case("llama_100m", 1, 512),
    "llama_100m_8x2048": Case("llama_100m", 8, 2048),
    "llama32_1b_2x2048": Case("llama32_1b", 2, 2048),
    "llama_tiny_2x64": Case("llama_tiny", 2, 64),  # without a GPU
}
DEFAULT = ["llama_100m_1x512", "llama_100m_8x2048", "llama32_1b_2x2048"]


def measure(case: Case, level: str, settings: list[str]) -> dict[str, Any]:
    """The figures of a profile, or its error."""
    command = [
        sys.executable, "-m", "nemo_lowprec.cli", "profile", f"precision={level}", f"model={case.preset}",
        f"data.micro_batch_size={case.batch}", f"data.seq_length={case.sequence}",
        "trainer.accumulate_grad_batches=1", *settings, "--json",
    ]  # fmt: skip
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        return {"error": done.stderr.strip()[-_STATED:]}
    found = json.loads(done.stdout.splitlines()[-1])
    return {
        "bf16": _figures(StepProfile(**found["bf16"])),
        "low": _figures(StepProfile(**found["level"])),
        "better_in_bf16": len(found["better_in_bf16"]),
        "summary": found["summary"],
        "verdict": found["verdict"],
    }


def _figures(profile: StepProfile) -> dict[str, Any]:
    return {
        "ms": round(profile.ms, 3),
        "parts": {part: round(ms, 3) for part, ms in profile.parts().items()},
        "launches": round(sum(profile.launches.values())),
        "matched": profile.matched,
        "layers_in_fp8": len(profile.low),
    }


def main() -> None:
    parser = arguments(__doc__.split("\n")[0], "profile_h200.jsonl")
    parser.add_argument("--cases", nargs="*", default=DEFAULT, choices=list(CASES))
    parser.add_argument("--levels", nargs="*", default=LEVELS)
    parser.add_argument("--settings", nargs="*", default=[], help="further settings of nemo-lowprec profile")
    args = parser.parse_args()
    record = Record(args.out)
    for name in args.cases:
        case = CASES[name]
        for level in args.levels:
            record.add(benchmark="profile", **case._asdict(), level=level, **measure(case, level, args.settings))


if __name__ == "__main__":
    main()
