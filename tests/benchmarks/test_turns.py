"""Processes that prepare side by side and work in turns."""

import os
import time
from pathlib import Path

import pytest

from benchmarks.turns import in_turns

LOG = "TURNS_LOG"


def note(*words):
    with Path(os.environ[LOG]).open("a") as file:
        file.write(" ".join(map(str, words)) + "\n")


def prepare():
    note("ready", os.getpid())


def work(number, until_ready):
    """Ends once so many processes have prepared."""
    note("begins", number, os.getpid())
    while Path(os.environ[LOG]).read_text().count("ready") < until_ready:
        time.sleep(0.01)
    note("ends", number, os.getpid())


def fail(number):
    if number == 1:
        os._exit(7)
    note("ends", number, os.getpid())


@pytest.fixture
def log(tmp_path, monkeypatch):
    monkeypatch.setenv(LOG, str(tmp_path / "log"))
    return lambda: [line.split() for line in (tmp_path / "log").read_text().splitlines()]


@pytest.mark.parametrize("ahead", [1, 3])
def test_work_is_done_in_order_by_processes_that_have_prepared(log, ahead):
    in_turns(prepare, work, [(0, ahead), (1, 0), (2, 0)], ahead)
    lines = log()
    worked = [line[:2] for line in lines if line[0] != "ready"]
    assert worked == [[word, str(n)] for n in range(3) for word in ("begins", "ends")]
    assert len({line[-1] for line in lines}) == 3
    before = [line[0] for line in lines].index("ends")
    assert sum(line[0] == "ready" for line in lines[:before]) == ahead


def test_a_process_that_fails_is_named_and_no_other_goes_on(log):
    with pytest.raises(RuntimeError, match=r"process of \(1,\) ended with 7"):
        in_turns(prepare, fail, [(0,), (1,), (2,)], 3)
    assert [line[1] for line in log() if line[0] == "ends"] == ["0"]
