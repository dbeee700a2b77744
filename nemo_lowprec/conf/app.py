"""The Hydra application around the jobs: one run, or with ``-m`` one run for each combination of choices.

This file does not import torch; the file of a job is imported once its config is composed.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator, Sequence
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
from nemo_lowprec.conf.command_line import CommandLine, one_sentence
from nemo_lowprec.conf.overrides import check_overrides, explain, with_plus, with_strategy
from nemo_lowprec.conf.sweep import SweptRun, one_run, print_sweep

_JOBS = {
    "pretrain": ("nemo_lowprec.conf.job", "pretrain_job"),
    "audit": ("nemo_lowprec.conf.job", "audit_job"),
    "plan": ("nemo_lowprec.conf.plan_job", "plan_job"),
    "doctor": ("nemo_lowprec.conf.doctor_job", "doctor_job"),
}
_WRITES_NOTHING = ("plan", "doctor")
_WITH_JSON, _JSON = ("audit", "doctor"), "--json"
_NOTHING_WRITTEN = ("hydra.run.dir=.", "hydra.output_subdir=null", "hydra/job_logging=stdout")


def run_job(command: str, arguments: Sequence[str]) -> None:
    """Run a job as a Hydra application, once or (with ``-m``) once for each combination of choices.

    Args:
        command: ``pretrain``, ``audit``, ``plan`` or ``doctor``.
        arguments: Hydra's flags, and overrides such as ``precision=fp16_mixed``; for ``audit`` and ``doctor`` also
            ``--json``.

    Raises:
        ValueError: an unknown choice of a group, a malformed or impossible override, or ``--json`` with ``-m``.
        TypeError: an unknown setting, or an argument that the level does not take.
    """
    options = {"json_to": sys.stdout} if command in _WITH_JSON and _JSON in arguments else {}
    line = CommandLine.of([word for word in arguments if word != _JSON or not options])
    check_overrides(line)
    line = with_plus(line)
    if line.is_multirun and options:
        raise ValueError("--json prints one report, and -m makes several runs. Call it once for each combination.")
    if command in _WRITES_NOTHING:
        if line.is_multirun:
            raise ValueError(
                f"{command} writes nothing, and -m a record of its runs. Call it once for each combination."
            )
        line = with_strategy(line) if command == "plan" else line
        line = replace(line, overrides=(*_NOTHING_WRITTEN, *line.overrides))

    register_levels()
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
                check_values(cfg, complete=command not in _WRITES_NOTHING)
                module, name = _JOBS[command]
                result = getattr(importlib.import_module(module), name)(cfg, **options)
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
        rest = redirect_stdout(sys.stderr) if options else nullcontext()
        with rest, _arguments([f"nemo-lowprec {command}", *line.arguments]):
            app()
        if failures:
            raise failures[0]
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
