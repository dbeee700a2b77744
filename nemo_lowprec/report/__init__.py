"""Reports on a run: the plan tells its memory and traffic beforehand, the audit holds it against what is declared."""

from nemo_lowprec.report.audit import Audit, AuditReport, Finding
from nemo_lowprec.report.plan import STRATEGIES, Plan, PlannedColumn, PlannedTraffic, plan_training

__all__ = [
    "STRATEGIES",
    "Audit",
    "AuditReport",
    "Finding",
    "Plan",
    "PlannedColumn",
    "PlannedTraffic",
    "plan_training",
]
