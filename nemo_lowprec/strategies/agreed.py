"""A base of the strategies that load checkpoints together: processes that resume differently raise, and do not hang."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.pytorch.strategies import Strategy
from typing_extensions import override

from nemo_lowprec.checkpoint.writing import recover
from nemo_lowprec.comm import check_same
from nemo_lowprec.plugins.agreement import name_of

_END = "_CheckpointConnector.resume_end"  # Lightning's name of the barrier after a resume, or after no resume


class AgreesOnResume(Strategy):
    """A strategy that loads checkpoints with collectives, after its setup.

    A process without ``ckpt_path`` loads nothing. It compares at the barrier after the resume.
    """

    def agreed_path(self, path: Any) -> Path:
        """The first process's path of a checkpoint that all processes load, recovered from a killed write.

        Raises:
            ValueError: on every process, if some processes do not resume, or resume from a checkpoint of another name.
        """
        check_same({"ckpt_path": name_of(path)})
        path = Path(self.broadcast(path))
        if self.is_global_zero:
            recover(path)
        self.barrier()
        return path

    @override
    def barrier(self, name: str | None = None) -> None:
        module = self.lightning_module
        if name == _END and module is not None and not module.trainer.ckpt_path:
            check_same({"ckpt_path": name_of(None)})
        super().barrier(name)  # type: ignore[safe-super]
