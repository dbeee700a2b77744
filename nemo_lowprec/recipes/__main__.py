"""nemo_run's command line for the recipes: ``python -m nemo_lowprec.recipes --factory tiny trainer.max_steps=20``."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import nemo_run as run

import nemo_lowprec.recipes  # noqa: F401  registers the factories
from nemo_lowprec.recipes.entrypoint import DEFAULT_RECIPE
from nemo_lowprec.train import pretrain

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs ``pretrain`` by nemo_run's own command line (``--help`` lists its options; ``--yes`` asks nothing).

    The recipe is ``tiny`` where ``--factory`` names no other.

    Args:
        arguments: without the program's name; None: the process' own.
    """
    saved = sys.argv
    # Without --verbose nemo_run prints an error and returns as if all were well.
    sys.argv = ["nemo-lowprec run", "--verbose", *(sys.argv[1:] if arguments is None else arguments)]
    try:
        run.cli.main(pretrain, default_factory=DEFAULT_RECIPE)
    finally:
        sys.argv = saved


if __name__ == "__main__":
    main()
