"""``assert_level``: a user's test compares what a Trainer's step was found to do with what the level declares."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl

from nemo_lowprec.report.audit import Audit
from nemo_lowprec.report.findings import AuditReport


def assert_level(trainer: pl.Trainer) -> AuditReport:
    """Check that the audited step of ``trainer`` did what the level declares, in every column of the chart.

    A test calls it after ``trainer.fit`` with an ``Audit`` among the callbacks::

        trainer = Trainer(plugins=msamp_o2(), callbacks=[Audit()], max_steps=2)
        trainer.fit(model, data)
        assert_level(trainer)

    Args:
        trainer: has fitted at least two optimizer steps; the second step is audited.

    Returns:
        The findings, with declared and found formats and bytes a parameter.

    Raises:
        LevelDiffersError: an AssertionError that names each differing column, the declared and the found format.
        ValueError: the Trainer has no ``Audit`` callback, or its last fit did not finish the second step.
    """
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    audit = next((callback for callback in callbacks if isinstance(callback, Audit)), None)
    if audit is None:
        raise ValueError("assert_level needs an Audit that has watched the fit: Trainer(callbacks=[Audit()], ...).")
    if audit.report is None:
        raise ValueError(
            f"assert_level found no audited step: the Audit watches optimizer step {audit.STEP + 1}, and this Trainer "
            f"has made {trainer.global_step}. Fit at least {audit.STEP + 1} steps before."
        )
    audit.report.check()
    return audit.report
