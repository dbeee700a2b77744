"""``nemo-lowprec plan`` over lists of choices, and a memory to fit into."""

from pathlib import Path

import pytest

from nemo_lowprec.conf.combinations import combinations, described
from nemo_lowprec.conf.command_line import CommandLine
from tests.called import printed, refusal

pytestmark = pytest.mark.usefixtures("nowhere")


def planned(capsys: pytest.CaptureFixture, *overrides: str) -> str:
    out = printed(capsys, "plan", *overrides)
    assert not list(Path.cwd().iterdir())
    return out


def refused(capsys: pytest.CaptureFixture, *overrides: str) -> str:
    return refusal(capsys, "plan", *overrides)


def rows(out: str) -> list[list[str]]:
    lines = out.partition("─\n")[2].partition("\nThe cheapest")[0].splitlines()
    return [line.split() for line in lines if line.strip()]


def test_one_table_has_every_combination_the_cheapest_that_fits_first(capsys: pytest.CaptureFixture) -> None:
    lists = ["precision=bf16_mixed,msamp_o2", "strategy=lowprec_ddp,lowprec_sharded", "gpus=1,2", "nodes=1,2"]
    out = planned(capsys, *lists, "fits=1")
    found = rows(out)
    assert len(found) == 16 and max(map(len, out.splitlines())) <= 80
    assert {(row[0], " ".join(row[1:4]), row[4]) for row in found} == {
        (level, f"{nodes} × {gpus}", strategy)
        for level in ("bf16_mixed", "msamp_o2")
        for nodes in (1, 2)
        for gpus in (1, 2)
        for strategy in ("lowprec_ddp", "lowprec_sharded")
    }
    worlds = [int(row[1]) * int(row[3]) for row in found]
    assert worlds == sorted(worlds) and "The cheapest that fits into 1.00 GiB: msamp_o2 on 1 GPU" in out


def test_several_processes_are_sharded_and_one_is_not(capsys: pytest.CaptureFixture) -> None:
    found = rows(planned(capsys, "gpus=1,2", "fits=h100"))
    assert [row[4] for row in found] == ["single_device", "lowprec_sharded"]
    assert {row[0] for row in found} == {"bf16_with_fp8_mixed"[:23]}


def test_other_lists_are_told_below_the_level(capsys: pytest.CaptureFixture) -> None:
    out = planned(capsys, "data.seq_length=128,256", "fits=1")
    assert "data.seq_length=128" in out and "data.seq_length=256" in out


def test_what_does_not_fit_comes_after_it_with_what_it_lacks(capsys: pytest.CaptureFixture) -> None:
    out = planned(capsys, "model=llama3_8b", "precision=bf16_mixed,msamp_o2", "fits=80", "data.micro_batch_size=1")
    first, second = rows(out)
    assert first[0] == "msamp_o2" and not first[-2].startswith("-")
    assert second[0] == "bf16_mixed" and second[-2].startswith("-")


def test_refused_combinations_are_told_with_their_sentence(capsys: pytest.CaptureFixture) -> None:
    out = " ".join(planned(capsys, "precision=bf16_mixed,msamp_o2", "precision.fp8_margin=1", "fits=1").split())
    assert "Refused: bf16_mixed. bf16_mixed takes no 'fp8_margin'. Levels that do:" in out
    out = " ".join(planned(capsys, "strategy=single_device,lowprec_ddp", "gpus=2", "fits=1").split())
    assert "Refused: strategy=single_device gpus=2. single_device is one process" in out


def test_one_plan_stays_as_it_is_and_says_whether_it_fits(capsys: pytest.CaptureFixture) -> None:
    plain = planned(capsys, "precision=msamp_o2")
    out = planned(capsys, "precision=msamp_o2", "fits=H200")
    assert out.startswith(plain.rpartition("A GPU of this machine")[0] or plain)
    assert "It fits into 140 GiB: 140 GiB are left." in out
    assert "It does not fit into 1.02 MiB: it lacks" in planned(capsys, "precision=msamp_o2", "fits=0.001")


def test_mistakes_are_one_sentence(capsys: pytest.CaptureFixture) -> None:
    levels = "precision=bf16_mixed,msamp_o2"
    assert "Unknown precision level 'msamp_o9'" in refused(capsys, "precision=msamp_o2,msamp_o9")
    assert "Unknown model 'llama9'" in refused(capsys, levels, "model=llama_tiny,llama9")
    assert "gpus='many' must be an integer" in refused(capsys, levels, "gpus=1,many")
    assert "nodes=0 must be an integer of at least 1" in refused(capsys, "nodes=0,1")
    assert "'small' is no memory of a GPU" in refused(capsys, levels, "fits=small")
    assert "'small' is no memory of a GPU" in refused(capsys, "fits=small")
    assert "There is no setting 'sed'. Did you mean 'seed'?" in refused(capsys, levels, "sed=1")
    assert "add gpus=8" in refused(capsys, levels, "strategy=ddp")


def test_combinations_are_those_of_the_lists() -> None:
    line = CommandLine.of(["precision=msamp_o1,msamp_o2", "gpus=2", "+x=range(1,3)", "--config-dir", "here"])
    found = combinations(line)
    assert [one.overrides for one in found] == [
        (f"precision={level}", "gpus=2", f"+x={x}") for level in ("msamp_o1", "msamp_o2") for x in (1, 2)
    ]
    assert all(one.flags == line.flags for one in found)
    assert described(found[0], line) == ("msamp_o1", ("+x=1",), "gpus=2")
    assert combinations(found[0]) == [found[0]]
