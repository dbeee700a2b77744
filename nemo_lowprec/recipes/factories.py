"""Every level, every strategy and the monitor as nemo_run factories, and the decorator that registers factories."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import nemo_run as run
from lightning.pytorch import Callback
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import Strategy

from nemo_lowprec.chart import get_level
from nemo_lowprec.chart.options import check_option
from nemo_lowprec.lines import nearest
from nemo_lowprec.plugins import ALIASED, LEVELS, LowPrecision
from nemo_lowprec.recipes.parsers import register_annotations
from nemo_lowprec.report.monitor import PrecisionMonitor
from nemo_lowprec.strategies import LowPrecisionDDPStrategy, LowPrecisionShardedStrategy, MegatronStrategy

F = TypeVar("F", bound=Callable[..., Any])


def factory(target: Any, name: str | None = None) -> Callable[[F], F]:
    """Register a function that returns a config with nemo_run, and name the known arguments in its TypeErrors.

    Args:
        target: class or function of the returned config.
        name: name on the command line; None: the name of the function.
    """

    def known(function: F) -> F:
        parameters = inspect.signature(function).parameters

        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            for argument in kwargs:
                if argument not in parameters:
                    raise TypeError(
                        f"{name or function.__name__} has no argument {argument!r}.{nearest(argument, parameters)}"
                    )
            return function(*args, **kwargs)

        return run.cli.factory(call, name=name, target=target)  # type: ignore[no-any-return]

    return known


def _level_factory(name: str) -> Callable[..., run.Config[LowPrecision]]:
    """A factory with the arguments of the level or alias ``name``, which returns the level's config."""
    level = (LEVELS | ALIASED)[name]

    @wraps(level)
    def build(**arguments: Any) -> run.Config[LowPrecision]:
        for argument in arguments:
            check_option(get_level(name), argument)
        return run.Config(level, **arguments)

    build.__module__ = __name__
    build.__signature__ = inspect.signature(level).replace(  # type: ignore[attr-defined]
        return_annotation=run.Config[LowPrecision]
    )
    # nemo_run looks a factory up under the exact types in an argument's annotation: Precision for the Trainer's
    # `plugins`, and perhaps LowPrecision in a function of the user's own.
    run.cli.factory(build, target=LowPrecision)
    return run.cli.factory(build, target=Precision)  # type: ignore[no-any-return]


def _strategy_factory(strategy: Any) -> Callable[..., run.Config[Any]]:
    """A factory with the name and the own arguments of a strategy, which returns the strategy's config."""
    of_class = inspect.signature(strategy, eval_str=True)
    own = [p.replace(kind=p.KEYWORD_ONLY) for p in of_class.parameters.values() if p.kind is not p.VAR_KEYWORD]
    signature = of_class.replace(parameters=own, return_annotation=run.Config[strategy])

    def build(**arguments: Any) -> run.Config[Any]:
        given = signature.bind(**arguments)
        given.apply_defaults()
        return run.Config(strategy, **given.arguments)

    build.__name__ = build.__qualname__ = strategy.strategy_name
    build.__module__, build.__doc__ = __name__, strategy.__doc__
    build.__signature__ = signature  # type: ignore[attr-defined]
    return factory(Strategy)(build)


register_annotations(LowPrecisionDDPStrategy, LowPrecisionShardedStrategy, MegatronStrategy)
lowprec_ddp = _strategy_factory(LowPrecisionDDPStrategy)
lowprec_sharded = _strategy_factory(LowPrecisionShardedStrategy)
lowprec_megatron = _strategy_factory(MegatronStrategy)
FACTORIES: dict[str, Callable[..., run.Config[LowPrecision]]] = {
    name: _level_factory(name) for name in (*LEVELS, *ALIASED)
}


@factory(Callback)
def precision_monitor(every_n_steps: int = 50, folder: str | None = None) -> run.Config[PrecisionMonitor]:
    """The config of ``nemo_lowprec.PrecisionMonitor``, which takes the same arguments."""
    return run.Config(PrecisionMonitor, every_n_steps=every_n_steps, folder=folder)


run.cli.factory(precision_monitor, target=PrecisionMonitor)
