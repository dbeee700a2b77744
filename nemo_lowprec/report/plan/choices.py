"""Several plans of one model in one table, the cheapest one that fits a GPU first."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from torch import nn

from nemo_lowprec.lines import bytes_text, count_text, signed_bytes_text, text_lines
from nemo_lowprec.plugins import LowPrecision
from nemo_lowprec.report.plan.gpu_memory import memory_here, memory_of
from nemo_lowprec.report.plan.plan import NOT_PLANNED, Plan, plan_training

_NAME_WIDTH = 23


@dataclass(frozen=True)
class PlanChoice:
    """One plan among several.

    Attributes:
        name: the level, with what else sets the choice apart, in lines.
        plan: of one process.
        memory: bytes of a GPU; None where no GPU is known.
        beyond: bytes that measured steps take and a plan does not count, such as those of CUDA graphs.
    """

    name: str
    plan: Plan
    memory: int | None = None
    beyond: int = 0

    @property
    def total(self) -> int:
        """Bytes of all columns of the plan, at most, and those beyond it."""
        return self.plan.total + self.beyond

    @property
    def left(self) -> int | None:
        """Bytes of the GPU that are left, negative where the choice does not fit; None where no GPU is known."""
        return None if self.memory is None else self.memory - self.total

    @property
    def fits(self) -> bool:
        """Whether the choice takes no more than the GPU has; True where no GPU is known."""
        return self.left is None or self.left >= 0

    def sentence(self) -> str:
        """Whether the plan fits, and what it leaves or lacks; empty where no GPU is known."""
        if self.memory is None or self.left is None:
            return ""
        size = bytes_text(self.memory)
        return (
            f"It fits into {size}: {bytes_text(self.left)} are left."
            if self.fits
            else (f"It does not fit into {size}: it lacks {bytes_text(-self.left)}.")
        )

    @property
    def where(self) -> str:
        """Processes and strategy in words: "1 GPU, single_device"."""
        layout = self.plan.layout
        kind = "GPU" if layout.accelerator == "gpu" else "process"
        several = {"GPU": "GPUs", "process": "processes"}[kind]
        return f"{layout.world} {kind if layout.world == 1 else several}, {layout.strategy}"


@dataclass(frozen=True)
class PlanRequest:
    """A plan that is still to be made.

    Attributes:
        level: the level's name, with options; empty for the name that the plan has.
        others: what else sets the choice apart, but for processes and strategy.
        where: processes and strategy, for a choice that is refused.
        make: makes the plan, and raises ValueError or TypeError where the choice is refused.
    """

    level: str
    others: tuple[str, ...]
    where: str
    make: Callable[[], Plan]


@dataclass(frozen=True)
class RefusedChoice:
    """A choice that cannot be planned.

    Attributes:
        name: as in ``PlanChoice``, with processes and strategy.
        reason: one sentence.
    """

    name: str
    reason: str


@dataclass(frozen=True)
class PlanChoices:
    """Plans in their order, of which the first one is the cheapest that fits.

    Plans that fit come first: by the number of processes, then by bytes sent in a step, then by bytes of a process.
    The others follow by the bytes that they lack.

    Attributes:
        choices: what was planned.
        refused: what cannot be planned.
        memory: bytes of a GPU; None where no GPU is known.
    """

    choices: tuple[PlanChoice, ...]
    refused: tuple[RefusedChoice, ...] = ()
    memory: int | None = None

    @property
    def best(self) -> PlanChoice | None:
        """The cheapest choice that fits; None where none fits."""
        return next((choice for choice in self.choices if choice.fits), None)

    def answer(self) -> str:
        """How many GPUs the model needs, in one sentence; empty where no GPU is known."""
        if self.memory is None:
            return ""
        size = bytes_text(self.memory)
        if self.best is None:
            nearest = self.choices[0]
            return (
                f"Nothing fits into {size}. Nearest is {_flat(nearest.name)} on {nearest.where}, which lacks "
                f"{bytes_text(-(nearest.left or 0))}."
            )
        return f"The cheapest that fits into {size}: {_flat(self.best.name)} on {self.best.where}."

    def table(self) -> Table:
        """The plans for people, in 80 columns."""
        models = dict.fromkeys((c.plan.model, count_text(c.plan.parameters)) for c in self.choices)
        title = "Plans of " + "; ".join(f"{model}, {count} parameters" for model, count in models)
        if self.memory is not None:
            title += f", for GPUs of {bytes_text(self.memory)}"
        table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
        table.add_column("Level", no_wrap=True, min_width=_NAME_WIDTH)
        table.add_column("GPUs", no_wrap=True)
        table.add_column("Strategy", no_wrap=True)
        for heading in ("A process", "Sent", "Left")[: 2 if self.memory is None else 3]:
            table.add_column(heading, justify="right", no_wrap=True, min_width=9)
        fits = True
        for choice in self.choices:
            if fits and not choice.fits:
                table.add_section()
            fits = choice.fits
            plan, layout = choice.plan, choice.plan.layout
            row = [_broken(choice.name), f"{layout.nodes} × {layout.gpus}", layout.strategy]
            row += [bytes_text(plan.total), bytes_text(plan.sent)]
            if choice.left is not None:
                row.append(signed_bytes_text(choice.left))
            table.add_row(*row)
        return table

    def notes(self) -> list[str]:
        """Lines below the table: the answer, what is not planned, and why choices were refused."""
        lines = text_lines(self.answer()) if self.memory is not None else []
        left = "" if self.memory is None else "Left: of a GPU's memory; negative where a plan does not fit. "
        without = dict.fromkeys(choice.plan.without for choice in self.choices if choice.plan.without)
        lines += text_lines(f"A process: all columns at most. Sent: in a step. {left}{NOT_PLANNED}")
        for reason in without:
            lines += text_lines(f"Activations are not planned: {reason}.")
        reasons: dict[str, list[str]] = {}
        for one in self.refused:
            reasons.setdefault(one.reason, []).append(_flat(one.name))
        for reason, names in reasons.items():
            lines += text_lines(f"Refused: {'; '.join(names)}. {reason}", hanging=2)
        return lines

    def print(self) -> None:
        """Print the table and its notes."""
        Console().print(self.table())
        print("\n".join(self.notes()))


def plan_choices(
    model: nn.Module,
    precisions: Sequence[LowPrecision],
    nodes: Sequence[int] = (1,),
    gpus: Sequence[int] = (1,),
    strategies: Sequence[str | None] = (None,),
    *,
    fits: float | str | None = None,
    **options: Any,
) -> PlanChoices:
    """Plan the training of ``model`` at each combination of levels, strategies and numbers of GPUs.

    Args:
        model: as for ``plan_training``.
        precisions: the levels.
        nodes, gpus: machines, and processes of each.
        strategies: names as for ``plan_training``.
        fits: GiB of a GPU, or its name: ``H100`` or ``H200``. None for the GPU of this machine, where it has one.
        options: other arguments of ``plan_training``; ``both_choices`` is False here, unless given.

    Raises:
        ValueError: ``fits`` is no memory of a GPU, or no combination can be planned.
        TypeError: the same, for an option that no combination takes.
    """
    requests, options = [], {"both_choices": False, **options}
    for precision, machines, each, strategy in product(precisions, nodes, gpus, strategies):
        where = f"{machines} × {each}" + (f" {strategy}" if strategy else "")
        plan = partial(plan_training, model, precision, machines, each, strategy, **options)
        requests.append(PlanRequest(repr(precision).removesuffix("()"), (), where, plan))
    return plan_requests(requests, fits)


def plan_requests(requests: Iterable[PlanRequest], fits: float | str | None = None) -> PlanChoices:
    """Make every plan that can be made, and put the plans in order.

    Args:
        requests: the plans to make.
        fits: as for ``plan_choices``.

    Raises:
        ValueError, TypeError: as ``plan_choices`` does.
    """
    memory = memory_here() if fits is None else memory_of(fits)
    choices: list[PlanChoice] = []
    refused: list[RefusedChoice] = []
    failed: Exception | None = None
    for request in requests:
        try:
            plan = request.make()
        except (ValueError, TypeError) as error:
            failed = failed or error
            name = " ".join(part for part in (request.level, *request.others, request.where) if part)
            refused.append(RefusedChoice(name, str(error)))
        else:
            choices.append(PlanChoice("\n".join([request.level or plan.level.name, *request.others]), plan, memory))
    if not choices and failed is not None:
        raise failed
    return PlanChoices(tuple(sorted(choices, key=_cost)), tuple(refused), memory)


def _cost(choice: PlanChoice) -> tuple[float, ...]:
    plan = choice.plan
    cost = (plan.layout.world, plan.sent, plan.total)
    return (0, *cost) if choice.fits else (1, -(choice.left or 0), *cost)


def _flat(name: str) -> str:
    return ", ".join(line.strip() for line in name.splitlines())


def _broken(name: str) -> str:
    """``name`` with lines that fit the column: a longer one is broken behind an underscore, a comma or a dot."""
    lines = []
    for line in name.splitlines():
        while len(line) > _NAME_WIDTH:
            at = max(line.rfind(sign, 0, _NAME_WIDTH) for sign in "_,.") + 1 or _NAME_WIDTH
            lines.append(line[:at])
            line = "  " + line[at:].lstrip()
        lines.append(line)
    return "\n".join(lines)
