"""nemo_run's command line for the recipes: ``python -m nemo_lowprec.recipes --factory tiny trainer.max_steps=20``."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import nemo_run as run
from nemo_run.cli.cli_parser import CLIException

import nemo_lowprec.recipes  # noqa: F401  registers the factories
from nemo_lowprec.chart import get_level
from nemo_lowprec.models.architecture import one_line
from nemo_lowprec.recipes.entrypoint import DEFAULT_RECIPE, RECIPES
from nemo_lowprec.train import pretrain

__all__ = ["main", "own_words"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs ``pretrain`` by nemo_run's own command line (``--help`` lists its options; ``--yes`` asks nothing).

    The recipe is ``tiny`` where ``--factory`` names no other.

    Args:
        arguments: without the program's name; None: the process' own.

    Raises:
        ValueError: an unknown level or recipe, or an override that nemo_run cannot read.
        RuntimeError: a strategy that this machine cannot run.
    """
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    for argument in arguments:
        level = re.fullmatch(r"trainer\.plugins=(\w+)(\(.*\))?", argument)
        if level:
            get_level(level[1])
    saved = sys.argv
    # Without --verbose nemo_run prints an error and returns as if all were well.
    sys.argv = ["nemo-lowprec run", "--verbose", *arguments]
    # nemo_run logs the whole recipe before it raises; the exception is enough.
    parser_log = logging.getLogger("nemo_run.cli.cli_parser")
    was_disabled, parser_log.disabled = parser_log.disabled, True
    try:
        with own_words():
            run.cli.main(pretrain, default_factory=DEFAULT_RECIPE)
    except CLIException as error:
        raise ValueError(_one_sentence(error)) from error
    except ValueError as error:
        if "No matching factory" in str(error):
            raise ValueError(f"{error}. The recipes are: {', '.join(RECIPES)}.") from error
        raise
    finally:
        sys.argv = saved
        parser_log.disabled = was_disabled


@contextmanager
def own_words() -> Iterator[None]:
    """fiddle adds the recipe to what a class says while it is made; the class says it better."""
    try:
        yield
    except Exception as error:
        own = getattr(error, "proxy_base_exception", None)
        if own is None:
            raise
        if isinstance(own, RuntimeError):  # ours or torch's: where it was raised tells
            raise own.with_traceback(error.__traceback__) from own.__cause__
        # Nothing has begun yet: what another library says here is about its arguments.
        kind = TypeError if isinstance(own, TypeError) else ValueError
        raise kind(one_line(own)) from error


def _one_sentence(error: BaseException) -> str:
    """What nemo_run's nested errors began with, without the recipe that they quote."""
    while error.__cause__ is not None:
        error = error.__cause__
    return re.split(r" for <| \(Argument:", str(error).splitlines()[0])[0] + "."


if __name__ == "__main__":
    main()
