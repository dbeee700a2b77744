"""``nemo-lowprec`` called in the test's own process."""

from __future__ import annotations

import pytest

from nemo_lowprec.cli import main


def printed(capsys: pytest.CaptureFixture, *arguments: str) -> str:
    """Standard output of a command that succeeds."""
    assert main(list(arguments)) == 0
    out: str = capsys.readouterr().out
    return out


def refusal(capsys: pytest.CaptureFixture, *arguments: str) -> str:
    """The one line with which a command refuses its arguments."""
    assert main(list(arguments)) == 2
    error: str = capsys.readouterr().err
    assert len(error.splitlines()) == 1
    return error
