"""What the strategies of this package add to Lightning's: processes that disagree say so before they wait."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.strategies import Strategy
from typing_extensions import override

from nemo_lowprec.comm import check_same
from nemo_lowprec.plugins.agreement import is_grouped, name_of

_END = "_CheckpointConnector.resume_end"  # Lightning's name of the barrier after it has resumed, or has not


class AgreesOnResume(Strategy):
    """A strategy that loads checkpoints with collectives, once it is set up.

    A process that has no ``ckpt_path`` loads nothing, and comes to the barrier behind it.
    """

    _agreed_on_resume = True

    def expect_resume(self) -> None:
        """Before Lightning resumes, or does not."""
        self._agreed_on_resume = False

    def agree_on_resume(self, path: Any) -> None:
        """Once for each call of the Trainer.

        Raises:
            ValueError: on every process, where some resume and others do not, or from another checkpoint.
        """
        if not self._agreed_on_resume and is_grouped():
            check_same({"ckpt_path": name_of(path)})
        self._agreed_on_resume = True

    @override
    def barrier(self, name: str | None = None) -> None:
        if name == _END:
            self.agree_on_resume(None)
        super().barrier(name)  # type: ignore[safe-super]
