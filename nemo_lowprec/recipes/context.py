"""nemo_run's context of ``pretrain``, with checks of names and with errors of one sentence."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import nemo_run as run
from nemo_run.cli.api import RunContext
from nemo_run.cli.cli_parser import parse_factory
from typing_extensions import override

from nemo_lowprec.lines import one_line
from nemo_lowprec.recipes.names import check_names, nemo_run_words
from nemo_lowprec.recipes.shown import show_recipe
from nemo_lowprec.run_arguments import DEFAULT_RECIPE, check_recipe, check_terminal


class RecipeContext(RunContext):
    """nemo_run's context of one command line, which checks names first; a mistake is one sentence.

    Attributes:
        started_as: ``sys.argv`` of this process, while nemo_run reads another ``sys.argv``. Lightning starts its other
            processes with the command line in ``started_as``.
    """

    started_as: ClassVar[list[str] | None] = None

    @override
    def cli_execute(self, fn: Callable[..., Any], args: list[str], entrypoint_type: str = "task") -> None:
        argv = sys.argv if self.started_as is None else self.started_as
        with own_words(), replaced(sys, "argv", argv), replaced(run, "dryrun_fn", show_recipe):
            super().cli_execute(fn, args, entrypoint_type)

    @override
    def parse_args(self, args: list[str], lazy: bool = False) -> list[str]:
        with nemo_run_words():
            return super().parse_args(args, lazy)  # type: ignore[no-any-return]

    @override
    def parse_fn(self, fn: Any, args: list[str], **default_kwargs: Any) -> Any:
        does_nothing = self.dryrun or self.to_yaml or self.to_toml or self.to_json
        check_terminal(asks=not (self.skip_confirmation or self.repl or does_nothing))
        recipe: Any = self.factory  # type: ignore[has-type]
        if recipe is None and self.yaml is None:
            recipe = self.factory = DEFAULT_RECIPE
        if isinstance(recipe, str):
            check_recipe(recipe)
            with nemo_run_words():
                recipe = parse_factory(fn, "", fn, recipe)
        elif recipe is not None:
            recipe = recipe()
        # With a YAML file or a value "@file" the recipe may differ from the factory's.
        if recipe is not None and self.yaml is None and not any("=@" in argument for argument in args):
            check_names(recipe, args)
        with nemo_run_words():
            return super().parse_fn(fn, args, **default_kwargs)


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set an attribute of a module or a class while the context lasts."""
    missing = object()
    before = vars(owner).get(name, missing)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is missing:
            delattr(owner, name)
        else:
            setattr(owner, name, before)


@contextmanager
def own_words() -> Iterator[None]:
    """Raise the exception of a class or function in place of fiddle's, which adds the text of the whole recipe."""
    try:
        yield
    except Exception as error:
        own = getattr(error, "proxy_base_exception", None)
        if own is None:
            raise
        if isinstance(own, RuntimeError):  # its traceback tells whether this package or torch raised it
            raise own.with_traceback(error.__traceback__) from own.__cause__
        # Objects are only being made: an exception of another library is about the arguments.
        kind = TypeError if isinstance(own, TypeError) else ValueError
        raise kind(one_line(own)) from error
