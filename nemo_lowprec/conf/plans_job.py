"""The job of ``nemo-lowprec plan`` over lists of choices: one table of the plans of all combinations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from nemo_lowprec.conf.combinations import described
from nemo_lowprec.conf.command_line import CommandLine
from nemo_lowprec.conf.plan_job import planned
from nemo_lowprec.report.plan.choices import PlanChoices, PlanRequest, plan_requests
from nemo_lowprec.report.plan.plan import Plan


def plans_job(
    lines: Sequence[CommandLine], whole: CommandLine, run: Callable[..., Plan], fits: float | str | None = None
) -> PlanChoices:
    """Prints one table of the plans of several command lines, the cheapest that fits first.

    Args:
        lines: the ``combinations`` of ``whole``.
        run: composes the config of a command line, and calls a job with it.
        fits: as for ``plan_choices``.

    Raises:
        ValueError: ``fits`` is no memory of a GPU, or no command line can be planned.
        TypeError: no command line takes one of the settings.
    """
    job = partial(planned, both_choices=False)
    found = plan_requests([PlanRequest(*described(line, whole), partial(run, line, job)) for line in lines], fits)
    found.print()
    return found
