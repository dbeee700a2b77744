"""The Hydra application around the jobs: one run, or with ``-m`` one run for each combination of choices.

This file does not import torch; the file of a job is imported once its config is composed.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import replace
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from nemo_lowprec.conf.check import check_values
from nemo_lowprec.conf.choices import CONF_DIR, register_levels
from nemo_lowprec.conf.combinations import OWN, combinations, take_own
from nemo_lowprec.conf.command_line import CommandLine, one_sentence
from nemo_lowprec.conf.overrides import check_overrides, explain, with_plus, with_strategy
from nemo_lowprec.conf.sweep import SweptRun, one_run, print_sweep

_JOBS = {
    "pretrain": ("nemo_lowprec.conf.job", "pretrain_job"),
    "audit": ("nemo_lowprec.conf.job", "audit_job"),
    "plan": ("nemo_lowprec.conf.plan_job", "plan_job"),
    "advise": ("nemo_lowprec.conf.advise_job", "advise_job"),
    "doctor": ("nemo_lowprec.conf.doctor_job", "doctor_job"),
    "profile": ("nemo_lowprec.conf.profile_job", "profile_job"),
}
_RUNS_NOTHING = ("plan", "advise", "doctor")
_WRITES_NOTHING = (*_RUNS_NOTHING, "profile")
_WITH_JSON, _JSON = ("audit", "doctor"), "--json"
_NOTHING_WRITTEN = ("hydra.run.dir=.", "hydra.output_subdir=null", "hydra/job_logging=stdout")


def run_job(command: str, arguments: Sequence[str]) -> None:
    """Run a job as a Hydra application, once or (with ``-m``) once for each combination of choices.

    ``plan`` composes the config of each combination without ``-m``, and prints one table; ``advise`` does so for each
    level.

    Args:
        command: ``pretrain``, ``audit``, ``plan``, ``advise``, ``doctor`` or ``profile``.
        arguments: Hydra's flags, and overrides such as ``precision=fp16_mixed``; for ``audit`` and ``doctor`` also
            ``--json``.

    Raises:
        ValueError: an unknown choice of a group, a malformed or impossible override, ``--json`` with ``-m``, or a
            monitor of another command than ``pretrain``.
        TypeError: an unknown setting, or an argument that the level does not take.
    """
    options: dict[str, Any] = {"json_to": sys.stdout} if command in _WITH_JSON and _JSON in arguments else {}
    line = CommandLine.of([word for word in arguments if word != _JSON or not options])
    own, line = take_own(line, command)
    check_overrides(line)
    if command != "pretrain" and any(o.key_or_group.partition(".")[0] == "monitor" for o in line.parsed):
        raise ValueError(f"{command} reads no monitor, which is a group of pretrain.")
    line = with_plus(line)
    if line.is_multirun and options:
        raise ValueError("--json prints one report, and -m makes several runs. Call it once for each combination.")
    if line.is_multirun and command in _WRITES_NOTHING:
        raise ValueError(f"{command} writes nothing, and -m a record of its runs. Call it without -m.")
    register_levels()

    def run(one: CommandLine, job: Callable[..., Any]) -> Any:
        one = with_strategy(one) if command == "plan" else one
        if command in _WRITES_NOTHING:
            one = replace(one, overrides=(*_NOTHING_WRITTEN, *one.overrides))
        return _run(command, one, arguments, job, bool(options))

    lines = combinations(line) if command in OWN else [line]
    shows = bool({"-c", "--cfg", "-i", "--info"} & set(line.flags))  # the config, and runs nothing
    if shows and len(lines) > 1:
        raise ValueError(f"A config is shown for one combination, and this command line gives {len(lines)}.")
    module, name = _JOBS[command]
    if command == "advise" and not shows:
        _job(module, name)(line, run, **own)
    elif len(lines) > 1:
        _job("nemo_lowprec.conf.plans_job", "plans_job")(lines, line, run, **own)
    else:
        run(line, lambda cfg: _job(module, name)(cfg, **options, **own))


def _job(module: str, name: str) -> Callable[..., Any]:
    """A function of a job's file, which is imported only now."""
    return getattr(importlib.import_module(module), name)  # type: ignore[no-any-return]


def _run(
    command: str, line: CommandLine, arguments: Sequence[str], job: Callable[[DictConfig], Any], apart: bool
) -> Any:
    """Compose the config of ``line``, and call ``job`` with it.

    Args:
        command, arguments: as for ``run_job``.
        line: the command line to compose.
        job: called once, or with ``-m`` once for each combination.
        apart: whether everything but the job's own report goes to stderr.

    Returns:
        The value that ``job`` has returned; None with ``-m``.
    """
    results: list[Any] = []
    failures: list[Exception] = []
    swept: list[SweptRun] = []
    begun, sweep_dir = False, ""
    is_own = sys.argv[len(sys.argv) - len(arguments) :] == list(arguments)
    own = sys.argv if is_own else [sys.argv[0], command, *arguments]

    def run(cfg: DictConfig) -> Any:
        nonlocal begun, sweep_dir
        begun = True
        result = None
        # Lightning starts the other processes of the run with this command line.
        one = nullcontext(own) if not line.is_multirun else one_run(own[: len(own) - len(arguments)], line.flags)
        try:
            with one as argv, _arguments(argv):
                check_values(cfg, complete=command not in _RUNS_NOTHING)
                result = job(cfg)
            results.append(result)
            return result
        except Exception as error:
            # In a sweep Hydra's message names the failed run; for a single run Hydra adds nothing to the sentence.
            if line.is_multirun:
                raise
            failures.append(error)
        finally:
            if line.is_multirun:
                settings = HydraConfig.get()
                sweep_dir = settings.sweep.dir
                swept.append(SweptRun(settings.sweep.subdir, tuple(settings.overrides.task), result))

    app = hydra.main(config_path=str(CONF_DIR), config_name="config", version_base="1.3")(run)
    try:
        # With --json stdout is the report's alone; Hydra's logging takes the stream that it finds here.
        rest = redirect_stdout(sys.stderr) if apart else nullcontext()
        with rest, _arguments([f"nemo-lowprec {command}", *line.arguments]):
            app()
        if failures:
            raise failures[0]
        return results[0] if len(results) == 1 else None
    except (HydraException, OmegaConfBaseException) as error:
        raise explain(error, line) from error
    except Exception as error:
        if begun:
            raise
        # The job has not begun: Hydra cannot make the folder of the run, or refuses one of its own settings.
        said = f"{type(error).__name__}: {one_sentence(error)}"
        raise ValueError(f"Hydra cannot begin with these settings of its own (hydra.*): {said}") from error
    finally:
        print_sweep(swept, sweep_dir)


@contextmanager
def _arguments(argv: list[str]) -> Iterator[None]:
    """Set ``sys.argv``, which Hydra reads, and make Hydra raise its exceptions instead of printing and exiting."""
    saved, full_error = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    sys.argv = argv
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        yield
    finally:
        sys.argv = saved
        if full_error is None:
            del os.environ["HYDRA_FULL_ERROR"]
        else:
            os.environ["HYDRA_FULL_ERROR"] = full_error
