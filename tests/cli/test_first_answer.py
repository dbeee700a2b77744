"""Help and mistakes are answered before torch is imported."""

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from nemo_lowprec import __version__
from nemo_lowprec.chart import CHART

HEAVY = ("torch", "lightning", "transformers", "megatron", "nemo_run", "fiddle")
CODE = (
    "import json, sys\nfrom nemo_lowprec.cli import main\nstatus = 0\n"
    "try: status = main()\nexcept SystemExit as error: status = error.code or 0\n"
    f"print(json.dumps([status, [m for m in {HEAVY!r} if m in sys.modules]]), file=sys.stderr)"
)
COMMANDS = (
    "pretrain", "prepare-data", "audit", "plan", "advise", "report", "compare", "export", "levels", "run"
)  # fmt: skip


def answer(folder: Path, *arguments: str) -> tuple[int, str, str, float]:
    """Exit status, stdout, stderr and CPU seconds of a command in which nothing heavy was imported."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-c", CODE, *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        stdin=subprocess.DEVNULL,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    error, _, last = done.stderr.rstrip().rpartition("\n")
    status, heavy = json.loads(last)
    assert heavy == []
    return status, done.stdout, error, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


@pytest.mark.parametrize("command", COMMANDS)
def test_help_is_the_command_s_own_and_fits_the_screen(command: str, tmp_path: Path) -> None:
    status, out, _, seconds = answer(tmp_path, command, "--help")
    assert status == 0 and f"nemo-lowprec {command}" in out and seconds < 1
    assert max(map(len, out.splitlines())) <= 80
    if command in ("pretrain", "audit", "plan", "advise", "compare"):
        assert all(level in out for level in CHART)


def test_version_is_that_of_the_package_and_of_what_it_needs(tmp_path: Path) -> None:
    status, out, _, _ = answer(tmp_path, "--version")
    assert status == 0 and f"nemo-lowprec {__version__}\ntorch " in out


MISTAKES = [
    ("pretrain precision=msamp_o9", "Unknown precision level 'msamp_o9'. Choose one of: fp16_amp, te_fp8, msamp_o1,"),
    ("audit precision=msamp_o9", "Unknown precision level 'msamp_o9'"),
    ("plan precision=msamp_o9 gpus=8", "Unknown precision level 'msamp_o9'"),
    ("plan precision=msamp_o2,msamp_o9", "Unknown precision level 'msamp_o9'"),
    ("plan precision=msamp_o2 gpus=1,two", "gpus='two' must be an integer of at least 1"),
    ("plan fits=80,141", "fits=80,141: fits takes one value"),
    ("plan precision=msamp_o1,msamp_o2 --cfg job", "A config is shown for one combination"),
    ("advise precision=msamp_o9", "Unknown precision level 'msamp_o9'"),
    ("advise -m", "advise writes nothing, and -m a record of its runs. Call it without -m."),
    ("pretrain model=llama9", "Unknown model 'llama9'. Choose one of: gpt2, gpt2_tiny,"),
    ("pretrain precision.fp8_margn=1", "bf16_with_fp8_mixed has no argument 'fp8_margn'. It takes: fp8, fp8_margin,"),
    ("pretrain +precision.fp8_margn=1", "bf16_with_fp8_mixed has no argument 'fp8_margn'. It takes: fp8, fp8_margin,"),
    ("pretrain precision=msamp_o2 precision.half=fp32", "half='fp32' must be 'bf16' or 'fp16'"),
    ("pretrain precision=fp16_mixed precision.fp8_margin=1", "fp16_mixed takes no 'fp8_margin'. Levels that do:"),
    ("pretrain experiment=megatron_tiny precision.half=fp16", "bf16_mixed takes no 'half'. Levels that do: msamp_o1"),
    ("pretrain trainer.max_step=3", "There is no setting 'trainer.max_step'. Did you mean 'max_steps'?"),
    ("pretrain model.lrr=3", "There is no setting 'model.lrr'. Did you mean 'lr'?"),
    ("pretrain model.lr=fast", "model.lr='fast' must be a number"),
    ("pretrain sed=1", "There is no setting 'sed'. Did you mean 'seed'?"),
    ("pretrain trainer.strategy.shard_size=8", "trainer.strategy is 'auto'. Choose strategy=lowprec_sharded,"),
    ("pretrain data=text", "data.data_dir is missing: add data.data_dir=..."),
    ("pretrain -m precision=bf16_mixed,msamp_o9", "Unknown precision level 'msamp_o9'"),
    ("run --yes trainer.plugins=msamp_o9", "Unknown precision level 'msamp_o9'. Choose one of: fp16_amp, te_fp8,"),
    ("run --yes --factory llama9", "Unknown recipe 'llama9'. Choose one of: tiny,"),
    ("run --yes trainer.max_step=5", "There is no setting 'trainer.max_step'. Did you mean 'max_steps'?"),
    ("run trainer.max_steps=5", "Add --yes: nemo_run asks whether to start, and there is no terminal"),
    ("prepare-data --out data --source nowhere", "nowhere does not exist"),
    ("report nowhere", "nowhere does not exist"),
    ("compare nowhere nowhere", "nowhere does not exist"),
    ("compare precision=bf16_mixed,msamp_o9", "Unknown precision level 'msamp_o9'. Choose one of: fp16_amp, te_fp8,"),
    ("compare precision=bf16_mixed", "compare needs two levels or more: precision=bf16_mixed,bf16_with_fp8_mixed"),
    ("compare", "compare needs two levels or more"),
    ("compare precision=bf16_mixed,msamp_o2 seeds=many", "seeds=many must be a number of seeds, or seeds with commas"),
    ("compare precision=bf16_mixed,msamp_o2 seeds=0", "seeds=0 must be from 1 to 100 seeds"),
    ("compare precision=bf16_mixed,msamp_o2 seeds=1,-4", "seeds=-4 must be an integer from 0 to 2**32 - 1"),
    ("compare precision=bf16_mixed,msamp_o2 seed=1", "seed is not read by compare: use seeds=3, or seeds=1,2."),
    ("compare precision=bf16_mixed,msamp_o2 model.lr=fast", "model.lr='fast' must be a number"),
    ("compare precision=bf16_mixed,msamp_o2 sed=1", "There is no setting 'sed'. Did you mean 'seed'?"),
    ("compare precision=bf16_mixed,msamp_o2 precision.fp8_margin=1", "bf16_mixed takes no 'fp8_margin'"),
    ("compare precision=bf16_mixed,msamp_o2 data=text", "data.data_dir is missing: add data.data_dir=..."),
    ("compare -m precision=bf16_mixed,msamp_o2", "compare trains every level with every seed without -m"),
    ("compare . model.lr=1", "compare takes folders of runs, or settings of trainings: not . and model.lr=1."),
    ("compare . --out", "--out needs the path of an HTML file"),
    ("export nowhere.ckpt out", "nowhere.ckpt does not exist"),
]


@pytest.mark.parametrize(("line", "message"), MISTAKES)
def test_a_mistake_is_one_sentence_at_once(line: str, message: str, tmp_path: Path) -> None:
    status, out, error, seconds = answer(tmp_path, *line.split())
    assert status == 2 and out == "" and seconds < 2, error
    assert message in error and len(error.splitlines()) == 1
