"""nemo_run's command line for the recipes: ``python -m nemo_lowprec.recipes --yes --factory tiny``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import nemo_run as run
import nemo_run.cli.api as nemo_run_cli
import typer

import nemo_lowprec.recipes  # noqa: F401  registers the factories
from nemo_lowprec.recipes.context import RecipeContext, replaced
from nemo_lowprec.run_arguments import check_run_arguments
from nemo_lowprec.train import pretrain


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs ``pretrain`` by nemo_run's command line (``--yes`` asks nothing).

    ``nemo_lowprec.run_arguments`` has the text of ``--help``.

    Args:
        arguments: the command line without the program's name; None: the command line of this process.

    Raises:
        ValueError, TypeError: as ``check_run_arguments``; or a value that nemo_run cannot read.
        RuntimeError: a strategy that this machine cannot run.
        KeyboardInterrupt: the question whether to start was not answered.
    """
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    check_run_arguments(arguments)
    # Without --verbose nemo_run prints an error and returns normally.
    argv = ["nemo-lowprec run", "--verbose", *arguments]
    try:
        with (
            replaced(RecipeContext, "started_as", sys.argv),
            replaced(sys, "argv", argv),
            replaced(nemo_run_cli, "print", _print),
        ):
            run.cli.main(pretrain)
    except typer.Abort:
        raise KeyboardInterrupt from None


def _print(*values: Any, **options: Any) -> None:
    """``print`` for nemo_run, without a line that tells a user nothing."""
    if values != ("Configuring global options",):
        print(*values, **options)


if __name__ == "__main__":
    main()
