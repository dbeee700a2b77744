"""``nemo-lowprec profile``."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nemo_lowprec.cli import main
from nemo_lowprec.conf import profile_both
from nemo_lowprec.report.page.profile_section import profile_section
from nemo_lowprec.report.page.run_page import write_report
from nemo_lowprec.report.profile.step_profile import FILE, HALF_FILE, read_profile
from tests.called import printed, refusal
from tests.runs import write_run


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[list[str]]:
    """The command lines of the runs, which are not started: profiles of other runs are put in their place."""
    monkeypatch.chdir(tmp_path)
    commands: list[list[str]] = []

    def run(command: list[str], **_: Any) -> Any:
        commands.append(command[command.index("profile") + 1 :])
        file = Path(command[-1].removeprefix("into="))
        half = file.stem == "bf16_mixed"
        shutil.copy(Path(__file__).parents[1] / "report" / "profile" / (HALF_FILE if half else FILE), file)
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(profile_both, "subprocess", SimpleNamespace(run=run))
    return commands


def test_bf16_gets_what_is_no_argument_of_the_level(children: list[list[str]], capsys: pytest.CaptureFixture) -> None:
    words = ["model=llama_100m", "precision.fp8_margin=1", "data.micro_batch_size=2"]
    said = printed(capsys, "profile", *words)
    half, low = (command[:-1] for command in children)
    assert half == ["precision=bf16_mixed", "model=llama_100m", "data.micro_batch_size=2"]
    assert low == ["precision=bf16_with_fp8_mixed", words[0], words[2], words[1]]
    assert max(map(len, said.splitlines())) <= 80
    assert "Step" in said and "Host gaps" in said and "layers.*.mlp *" in said


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["precision=bf16_mixed"], "profile compares a level with bf16_mixed: choose another one"),
        (["precision=msamp_o9"], "Unknown precision level 'msamp_o9'"),
        (["precision=msamp_o1,msamp_o2"], "profile takes one level, which it compares with bf16_mixed"),
        (["-m"], "profile takes one level"),
        (["trainer.max_steps=4"], "trainer.max_steps is not read by profile: profile takes the steps that it needs."),
        (["monitor=on"], "monitor is not read by profile: a sampled step takes longer."),
        (["model=llama_9b"], "llama_9b"),
        (["data.micro_batch=2"], "micro_batch"),
    ],
)
def test_bad_input_is_one_sentence(
    words: list[str], sentence: str, children: list[list[str]], capsys: pytest.CaptureFixture
) -> None:
    assert sentence in refusal(capsys, "profile", *words)
    assert children == []


def test_a_run_that_fails_has_said_why(nowhere: None, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = SimpleNamespace(run=lambda *_, **__: SimpleNamespace(returncode=2))
    monkeypatch.setattr(profile_both, "subprocess", failed)
    with pytest.raises(SystemExit) as exit_:
        main(["profile"])
    assert exit_.value.code == 2


@pytest.mark.parametrize("has_half", [True, False])
def test_profiles_in_the_folder_of_a_run_are_a_part_of_its_page(has_half: bool, tmp_path: Path) -> None:
    folder = write_run(tmp_path)
    assert "Where the time goes" not in write_report(folder).read_text()
    kept = Path(__file__).parents[1] / "report" / "profile"
    for name in (FILE, HALF_FILE)[: 1 + has_half]:
        shutil.copy(kept / name, folder / name)
    page = write_report(folder).read_text()
    assert "Where the time goes" in page and "<code>layers.*.mlp</code>" in page
    assert ("BF16 / level" in page) == has_half


@pytest.mark.parametrize(
    ("device", "slower", "state"), [("CPU", 9.0, "unclear"), ("GPU", 9.0, "bad"), ("GPU", 0.5, "good")]
)
def test_the_page_is_red_only_where_a_gpu_is_faster_in_bf16(
    device: str, slower: float, state: str, tmp_path: Path
) -> None:
    kept = read_profile(Path(__file__).parents[1] / "report" / "profile" / HALF_FILE)
    half = replace(kept, about={**kept.about, "device": device})
    layers = {name: {part: slower * us for part, us in of.items()} for name, of in half.layers.items()}
    about = half.about | {"level": "bf16_with_fp8_mixed"}
    replace(half, about=about, layers=layers, low=half.linears).save(tmp_path / FILE)
    half.save(tmp_path / HALF_FILE)
    section = profile_section(tmp_path)
    assert section is not None and section["state"] == state
