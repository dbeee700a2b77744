"""A small part of the faults that the benchmark counts; and that it counts what is not survived."""

import os
import random
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch

from benchmarks import faults
from benchmarks.fault_job import TIMEOUT
from benchmarks.fault_kinds import FAULTS
from benchmarks.fault_tables import FORMS
from benchmarks.fault_tables import faults as rst
from benchmarks.fault_trials import SECONDS, Bench, NotSurvivedError, Outcome, Trial
from benchmarks.faults import figure, run, table
from benchmarks.processes import FORKING
from benchmarks.record import Record, lines

CHEAP = ["dead_after", "hang", "int_one", "requeue", "disk_full", "nan_after"]


def test_a_few_faults_are_survived(tmp_path):
    outcomes, failures = run(Bench(tmp_path, False), CHEAP, ["lowprec_ddp"], trials=1, jobs=2, seed=3)
    assert not failures
    figures = [figure(fault, form, found) for (fault, form), found in outcomes.items()]
    assert [f["survived"] for f in figures] == [1] * len(CHEAP)
    by_fault = {f["fault"]: f for f in figures}
    assert by_fault["dead_after"]["lost_steps_max"] <= 1 and by_fault["dead_after"]["seconds_max"] < 40
    assert TIMEOUT - 1 < by_fault["hang"]["seconds_max"] < SECONDS and by_fault["requeue"]["lost_steps_max"] == 0
    assert len(table(figures, ["lowprec_ddp"]).splitlines()) == 1 + len(CHEAP)


def test_what_is_not_survived_is_counted_and_said(tmp_path):
    bench = Bench(tmp_path, mounts=False)
    whole = bench.whole("lowprec_ddp", "bf16_mixed")
    whole.end["weights"]["mid.weight"][0, 0] += 1  # so that the restart ends elsewhere
    lost = bench.trial(FAULTS["term_one"], "lowprec_ddp", "bf16_mixed", "0")
    assert not lost.survived and "other weights or states than the undisturbed one" in lost.said
    whole.checkpoint.write_bytes(b"")  # a checkpoint whose damage cannot be seen, since it is no checkpoint
    broken = bench.trial(FAULTS["cut"], "lowprec_ddp", "bf16_mixed", "1")
    assert not broken.survived and "Traceback" in broken.said
    found = figure("term_one", "lowprec_ddp", [lost])
    assert (found["trials"], found["survived"]) == (1, 0)


def test_no_trial_outlives_the_time_that_there_is(tmp_path):
    start = time.monotonic()
    outcomes, failures = run(Bench(tmp_path, mounts=False), ["hang"], ["lowprec_ddp"], 4, jobs=2, seed=0, seconds=3)
    assert time.monotonic() - start < TIMEOUT and not outcomes and not failures


def test_sigint_keeps_what_was_found(tmp_path):
    read, stopped = threading.Event(), threading.Event()

    class Read:
        @property
        def survived(self):
            read.set()
            return True

    class Interrupted(Bench):
        def trial(self, fault, form, level, name):
            if name.endswith("-0"):
                return Read()
            assert read.wait(60)
            os.kill(os.getpid(), signal.SIGINT)
            stopped.wait(60)
            return Outcome()

        def stop(self):
            stopped.set()

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        outcomes, failures = run(Interrupted(tmp_path, False), ["hang"], ["lowprec_ddp"], 3, jobs=1, seed=0)
    finally:
        signal.signal(signal.SIGINT, before)
    assert [len(found) for found in outcomes.values()] == [1] and not failures


def test_figures_of_other_faults_and_forms_stay(tmp_path, monkeypatch):
    def made(bench, names, forms, *_):
        outcomes = {(fault, form): [Outcome(survived=False, said="lost")] for fault in names for form in forms}
        return outcomes, [{"fault": fault, "form": form, "said": "lost"} for fault, form in outcomes]

    monkeypatch.setattr(faults, "run", made)
    monkeypatch.setattr(faults, "may_mount", lambda: False)
    monkeypatch.setattr(FORKING, "set_forkserver_preload", lambda modules: None)
    for words in (["--faults", "kill", "cut", "--forms", "ddp"], ["--faults", "cut", "--forms", "ddp", "async"]):
        monkeypatch.setattr(sys, "argv", ["faults", "--out", str(tmp_path / "faults.jsonl"), *words])
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # what main sets is taken back
        monkeypatch.setenv("PYTHONWARNINGS", "ignore")
        with pytest.raises(SystemExit, match="True"):
            faults.main()
    first, second = (i for i, line in enumerate(lines(tmp_path / "faults.jsonl")) if "command" in line)
    found = [(f["fault"], f["form"], f["benchmark"]) for f in lines(tmp_path / "faults.jsonl") if "fault" in f]
    assert found == [
        ("kill", "ddp", "faults"), ("kill", "ddp", "faults_failure"),
        ("cut", "ddp", "faults"), ("cut", "async", "faults"),
        ("cut", "ddp", "faults_failure"), ("cut", "async", "faults_failure"),
    ]  # fmt: skip
    assert (first, second) == (0, 3)


@pytest.mark.parametrize("code", [0, 1])
def test_what_starts_cuda_is_not_imported_before_the_fork(monkeypatch, capsys, code):
    said = "RuntimeError: CUDA error: initialization error"
    tried = subprocess.CompletedProcess([], code, stderr=f"Traceback:\n{said}\n")
    monkeypatch.setattr(subprocess, "run", lambda *args, **options: tried)
    modules = faults.to_import("cuda", list(FORMS))
    assert ("benchmarks.fault_imports" in modules) == (code == 0)
    assert (said in capsys.readouterr().err) == (code == 1)


def test_a_process_that_was_left_alone_must_say_so(tmp_path):
    trial = Trial(Bench(tmp_path, mounts=False), "ddp", "bf16_mixed", random.Random(0), tmp_path)

    class Ended:
        codes = (-9, 1)

        def __init__(self, text):
            self.text = text

        def output(self, rank):
            return self.text

    trial.check_said(Ended("RuntimeError: Connection closed by peer"), 1)
    with pytest.raises(NotSurvivedError, match="Rank 1 does not say that the other one was gone"):
        trial.check_said(Ended("RuntimeError: unspecified launch failure"), 1)


def test_the_table_has_every_fault_and_form(tmp_path):
    record = Record(tmp_path / "faults.jsonl")
    for fault in FAULTS:
        for form in FORMS:
            record.add(benchmark="faults", fault=fault, form=form, trials=3, survived=2, seconds_max=1.25)
    made = rst(record.path)
    assert f"Survived: {2 * len(FAULTS) * len(FORMS)} of {3 * len(FAULTS) * len(FORMS)}." in made
    assert made.count("2 of 3; 1.2 s") == len(FAULTS) * len(FORMS)
    assert torch.cuda.is_available() or "on a CPU" in made
    part = Record(tmp_path / "part.jsonl")
    part.add(benchmark="faults", fault="hang", form="async", trials=1, survived=1, seconds_max=30.25)
    made = rst(part.path)
    assert "Survived: 1 of 1. Every process had ended within 30.2 s of the fault." in made
    assert made.count("–") == (len(FORMS) + 1) * len(FAULTS) - 1
