"""Reports on a run, its checkpoints and its machine.

The plan tells memory and traffic beforehand, the audit compares a step with what the level declares, the inspection
shows what a checkpoint holds, and the doctor what a machine runs.
"""

from nemo_lowprec.report.assertion import assert_level
from nemo_lowprec.report.audit import Audit, AuditReport, Finding
from nemo_lowprec.report.doctor import DoctorReport, examine
from nemo_lowprec.report.inspection import Inspection, inspect_checkpoint
from nemo_lowprec.report.plan.columns import PlannedColumn
from nemo_lowprec.report.plan.layout import STRATEGIES
from nemo_lowprec.report.plan.plan import Plan, PlannedTraffic, plan_training

__all__ = [
    "STRATEGIES",
    "Audit",
    "AuditReport",
    "DoctorReport",
    "Finding",
    "Inspection",
    "Plan",
    "PlannedColumn",
    "PlannedTraffic",
    "assert_level",
    "examine",
    "inspect_checkpoint",
    "plan_training",
]
