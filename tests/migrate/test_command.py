"""The command: diff, rewritten files, comments, bad input."""

import io
import subprocess
import sys
import tokenize
from pathlib import Path

import pytest

from nemo_lowprec.cli import main

COMMENTED = '''#!/usr/bin/env python
"""Trains."""
# imports
import torch  # torch
from lightning.pytorch import Trainer
from lightning.pytorch.plugins import TransformerEnginePrecision  # the plugin
from transformer_engine.common.recipe import (
    DelayedScaling,  # delayed
    Format,  # formats
)


def main():
    # before the recipe
    recipe = DelayedScaling(
        margin=1,  # one bit
        # a comment of its own
        fp8_format=Format.HYBRID,
    )  # after the recipe

    if True:  # a block
        # the block's only statement
        dtype = torch.bfloat16  # unused afterwards
    # the plugin's comment
    plugin = TransformerEnginePrecision(weights_dtype=torch.bfloat16, recipe=recipe)
    with open(str(TransformerEnginePrecision(  # in a header
        weights_dtype=torch.float32
    ))):
        pass
    return Trainer(plugins=[plugin])  # done
    # the end
'''


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def comments(source):
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return sorted(token.string for token in tokens if token.type == tokenize.COMMENT)


def test_every_comment_stays(migrated):
    new, _ = migrated(COMMENTED)
    assert comments(new) == comments(COMMENTED)
    assert "bf16_with_fp8_mixed(fp8_margin=1" in new and "te_fp8()" in new and "DelayedScaling" not in new


def test_the_printed_diff_makes_the_file_that_write_makes(migrated, capsys):
    new, _ = migrated(COMMENTED)
    Path("train.py").write_text(COMMENTED)
    assert main(["migrate", "train.py"]) == 0
    assert Path("train.py").read_text() == COMMENTED
    diff = capsys.readouterr().out
    subprocess.run(["git", "apply", "-"], input=diff, text=True, check=True)
    assert Path("train.py").read_text() == new


def test_line_ends_mode_and_links_stay(capsys):
    source = b"\xef\xbb\xbfimport msamp\r\nx = '\xc3\xa9\x0c'  \r\n\r\n# end"
    Path("file.py").write_bytes(source)
    Path("file.py").chmod(0o755)
    Path("train.py").symlink_to("file.py")
    assert main(["migrate", "--write", "train.py"]) == 0
    assert Path("file.py").read_bytes() == source.replace(b"import msamp", b"from nemo_lowprec import msamp")
    assert Path("train.py").is_symlink() and Path("file.py").stat().st_mode & 0o777 == 0o755
    assert sorted(p.name for p in Path().iterdir()) == ["file.py", "train.py"]


def test_several_scripts_are_migrated_by_one_command(capsys):
    Path("a.py").write_text("import msamp\n")
    Path("b.py").write_text("import os\n")
    assert main(["migrate", "a.py", "b.py", "a.py"]) == 0
    printed = capsys.readouterr()
    assert printed.out.count("+from nemo_lowprec import msamp\n") == 1
    assert printed.err == "b.py needs no change.\n"


BAD = {
    "syntax.py": (b"x = (\n", "syntax.py cannot be migrated: line"),
    "latin.py": (b"x = '\xe9'\n", "latin.py cannot be migrated: byte 5 is not UTF-8."),
    "coding.py": (b"# coding: none\n", "coding.py cannot be migrated: unknown encoding: none."),
    "deep.py": (b"x" + b".a()" * 999, "deep.py cannot be migrated: an expression is nested too deeply."),
    "folder": (None, "folder is no file; name the scripts in it."),
    "missing.py": (b"", "missing.py does not exist."),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_sentence_and_no_file_is_changed(name, capsys):
    content, sentence = BAD[name]
    Path("good.py").write_text("import msamp\n")
    if content is None:
        Path(name).mkdir()
    elif content:
        Path(name).write_bytes(content)
    assert main(["migrate", "--write", "good.py", name]) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith(f"nemo-lowprec migrate: {sentence}") and printed.err.count("\n") == 1
    assert printed.out == "" and Path("good.py").read_text() == "import msamp\n"


def test_the_absence_of_libcst_is_one_sentence(monkeypatch, capsys):
    for name in [name for name in sys.modules if name.startswith("nemo_lowprec.migrate")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "libcst", None)
    Path("train.py").write_text("import msamp\n")
    assert main(["migrate", "train.py"]) == 2
    assert "pip install 'nemo-lowprec[migrate]'" in capsys.readouterr().err
