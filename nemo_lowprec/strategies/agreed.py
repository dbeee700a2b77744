"""A base of the strategies that load checkpoints together: processes that resume differently raise, and do not hang."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist
from lightning.pytorch.strategies import Strategy
from typing_extensions import override

from nemo_lowprec.checkpoint.writing import recover
from nemo_lowprec.comm import check_same
from nemo_lowprec.plugins.agreement import name_of

_END = "_CheckpointConnector.resume_end"  # Lightning's name of the barrier after a resume, or after no resume


class AgreesOnResume(Strategy):
    """A strategy that loads checkpoints with collectives, after its setup.

    A process without ``ckpt_path`` loads nothing, and comes to the barrier after the resume. The names of the
    checkpoints are compared once for each call of the Trainer.
    """

    _agreed_on_resume = True

    @override
    def setup_environment(self) -> None:
        super().setup_environment()  # type: ignore[safe-super]
        self._agreed_on_resume = False

    def agreed_path(self, path: Any) -> Path:
        """The first process's path of a checkpoint that all processes load, recovered from a killed write.

        Raises:
            ValueError: on every process, if some processes do not resume, or resume from a checkpoint of another name.
        """
        self._agree_on_resume(path)
        path = Path(self.broadcast(path))
        if self.is_global_zero:
            recover(path)
        self.barrier()
        return path

    def _agree_on_resume(self, path: Any) -> None:
        if not self._agreed_on_resume and dist.is_initialized():
            check_same({"ckpt_path": name_of(path)})
        self._agreed_on_resume = True

    @override
    def barrier(self, name: str | None = None) -> None:
        if name == _END:
            self._agree_on_resume(None)
        super().barrier(name)  # type: ignore[safe-super]
