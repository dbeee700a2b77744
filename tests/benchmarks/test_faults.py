"""A small part of the faults that the benchmark counts; and that it counts what is not survived."""

import torch

from benchmarks.fault_kinds import FAULTS
from benchmarks.fault_tables import FORMS
from benchmarks.fault_tables import faults as rst
from benchmarks.fault_trials import Bench
from benchmarks.faults import figure, run, table
from benchmarks.record import Record

CHEAP = ["dead_after", "disk_full", "nan_after"]


def test_a_few_faults_are_survived(tmp_path):
    outcomes, failures = run(tmp_path, CHEAP, ["lowprec_ddp"], trials=1, jobs=2, seed=3, mounts=False)
    assert not failures
    figures = [figure(fault, form, found) for (fault, form), found in outcomes.items()]
    assert [f["survived"] for f in figures] == [1] * len(CHEAP)
    by_fault = {f["fault"]: f for f in figures}
    assert by_fault["dead_after"]["lost_steps_max"] <= 1 and by_fault["dead_after"]["seconds_max"] < 40
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


def test_the_table_has_every_fault_and_form(tmp_path):
    record = Record(tmp_path / "faults.jsonl")
    for fault in FAULTS:
        for form in FORMS:
            record.add(benchmark="faults", fault=fault, form=form, trials=3, survived=2, seconds_max=1.25)
    made = rst(record.path)
    assert f"Survived: {2 * len(FAULTS) * len(FORMS)} of {3 * len(FAULTS) * len(FORMS)}." in made
    assert made.count("2 of 3; 1.2 s") == len(FAULTS) * len(FORMS)
    assert torch.cuda.is_available() or "on a CPU" in made
