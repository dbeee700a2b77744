"""A command's first answer and a level's import are quick: nothing is imported that only training uses."""

import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from functools import cache

import pytest

TRIES = 7  # other processes slow a process down, and nothing makes it faster than it is
IMPORT = """
import json, sys, time
import lightning.pytorch
before, start = set(sys.modules), time.process_time()
from nemo_lowprec import msamp_o2
seconds = time.process_time() - start
print(json.dumps([seconds, sorted({name.partition(".")[0] for name in set(sys.modules) - before})]))
"""


def run(*arguments: str) -> str:
    # Without bytecode each process would compile the package anew.
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run([sys.executable, *arguments], env=env, capture_output=True, text=True, check=True)
    return done.stdout


def command_seconds(command: str) -> float:
    """CPU seconds of ``nemo-lowprec`` with ``command``, of its start to its end."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert "msamp" in run("-m", "nemo_lowprec.cli", command) or command == "--help"
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


@cache
def import_once(_: int) -> tuple[float, list[str]]:
    """CPU seconds of a level's import behind Lightning's, and the packages of which it has imported a module."""
    seconds, packages = json.loads(run("-c", IMPORT))
    return seconds, packages


def is_below(bound: float, seconds: Callable[[int], float]) -> bool:
    """Whether one of ``TRIES`` takes less than ``bound``."""
    return any(seconds(number) < bound for number in range(TRIES))


@pytest.mark.parametrize("command", ["--help", "levels"])
def test_the_first_answer_takes_less_than_half_a_second(command: str) -> None:
    assert is_below(0.5, lambda _: command_seconds(command))


def test_a_level_s_import_takes_less_than_three_tenths_of_a_second_behind_lightning_s() -> None:
    assert is_below(0.3, lambda number: import_once(number)[0])


def test_a_level_s_import_imports_no_package_that_only_training_uses() -> None:
    """No part of torch, either, that Lightning has not imported."""
    _, packages = import_once(0)
    assert packages == ["annotated_types", "nemo_lowprec"]


def test_the_chart_is_printed_without_torch_and_numpy() -> None:
    code = "import sys; from nemo_lowprec.cli import main; main(['levels']); print(*sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "lightning", "numpy", "pydantic", "hydra"} & set(done.stderr.split())
